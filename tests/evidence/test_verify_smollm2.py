"""`verify` on the real SmolLM2: no false alarm, and a subtle fault is seen. The longer proof."""

import broken_parts
import pytest
from broken_parts import with_fault

from kvine.evidence.prompts import DEFAULT_PROMPT, QUICK_PROMPT
from kvine.evidence.verify import CACHED, IN_COMPANY, PathOptions, compare, verify
from kvine.hub import resolve
from kvine.llm import LLM


@pytest.mark.slow
def test_smollm2_quick_is_without_fault_in_fp32_and_bf16() -> None:
    report = verify(resolve("smollm2-135m"), PathOptions(QUICK_PROMPT, 16), None)
    assert report.ok and len(report.runs) == 8
    assert all(run.verdict in ("reference", "identical") for run in report.runs if run.dtype == "fp32")
    assert all(
        rounding.measured < 1e-5 * rounding.logit_range for rounding in report.rounding if rounding.dtype == "fp32"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [broken_parts.late_positions, broken_parts.slightly_off_scale], ids=lambda fault: fault.__name__
)
def test_smollm2_faults_are_seen(fault: broken_parts.Fault) -> None:
    llm = LLM("smollm2-135m", dtype="fp32")
    parts = with_fault(llm.parts, fault)
    runs, _ = compare(parts, llm.dense, llm.engine_config, llm.encode(QUICK_PROMPT), 8, dtype=llm.model.dtype)
    assert {run.path: run.verdict for run in runs[1:]} == {CACHED: "fault", IN_COMPANY: "fault"}


@pytest.mark.slow
def test_the_default_prompt_has_1929_tokens() -> None:
    assert len(LLM("smollm2-135m").encode(DEFAULT_PROMPT)) == 1929
