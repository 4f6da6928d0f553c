"""The second control of `verify`: transformers' angles, to the bit, and a bound that knows of them."""

from pathlib import Path

import pytest
import torch
from tiny_models import Subject, random_prompt, write_checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvine.evidence.coarse_angles import CoarseAngles, with_coarse_angles
from kvine.evidence.judge import measure_rounding
from kvine.evidence.paths import Record
from kvine.evidence.row_split import whole_logits
from kvine.evidence.verify import TRANSFORMERS, compare
from kvine.rope import RopeConfig, RotaryEmbedding

DIM, THETA, POSITIONS = 64, 100_000.0, torch.arange(0, 8192, 7)


def test_the_angles_are_those_of_transformers() -> None:
    config = LlamaConfig(
        hidden_size=DIM, num_attention_heads=1, rope_parameters={"rope_theta": THETA, "rope_type": "default"}
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), POSITIONS[None])  # [1, N, DIM] each
    ours = CoarseAngles(RopeConfig(THETA, DIM), torch.device("cpu")).cos_sin(POSITIONS)
    # Both round frequency and angle to fp32; the power may round the frequency's last bit another way.
    last_bits = 2 * torch.finfo(torch.float32).eps * int(POSITIONS.max())
    assert (ours[0][:, 0] - cos[0]).abs().max() <= last_bits
    assert (ours[1][:, 0, DIM // 2 :] - sin[0, :, DIM // 2 :]).abs().max() <= last_bits
    exact = RotaryEmbedding(RopeConfig(THETA, DIM), torch.device("cpu")).cos_sin(POSITIONS)
    assert 1e-5 < (ours[0] - exact[0]).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_right_path_with_coarse_angles_is_no_fault_far_into_a_text(tmp_path: Path, dtype: str) -> None:
    subject = Subject.load(write_checkpoint(tmp_path, "llama"), dtype)
    prompt = random_prompt(subject.model.config.max_context - 8)
    coarse = with_coarse_angles(subject.dense)

    def other(prompt_ids, text, vocab_size, on_step) -> Record:
        logits = whole_logits(coarse, [*prompt_ids, *text[:-1]], len(text))[:, :vocab_size]
        return Record(logits.argmax(-1).tolist(), logits)

    runs, rounding = compare(
        subject.parts, subject.dense, subject.config, prompt, 4, dtype=subject.model.dtype, other=other
    )
    run = runs[-1]
    assert run.path == TRANSFORMERS and run.verdict in ("identical", "rounding")
    assert run.bound is not None and run.bound >= rounding.bound


def test_the_widest_control_makes_the_bound() -> None:
    logits = torch.tensor([[1.0, -200.0]])
    near, far = logits + 1e-3, logits + 2e-3
    reference = Record([0], logits)
    one, both = (measure_rounding(torch.float32, reference, *controls) for controls in ((near,), (near, far)))
    assert one.measured == pytest.approx(1e-3, rel=0.02) and both.measured == pytest.approx(2e-3, rel=0.02)
    assert both.bound == pytest.approx(2 * one.bound, rel=0.02)
