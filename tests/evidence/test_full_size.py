"""The full size of a real model: Qwen3-0.6B as its public config describes it, with random weights."""

from pathlib import Path

import pytest
import torch

from kvine.evidence.random_model import random_checkpoint
from kvine.llm import LLM

NINE_TOKENS = [785, 4226, 311, 220, 17, 488, 220, 18, 374]


@pytest.mark.slow
def test_logits_of_a_full_size_qwen3_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "qwen3-0.6b"
    random_checkpoint(folder, "qwen3-0.6b")
    llm = LLM(str(folder), dtype="fp32")
    dense = llm.logits(NINE_TOKENS)
    cached, cache = llm.forward(NINE_TOKENS[:5])
    rest, cache = llm.forward(NINE_TOKENS[5:], cache)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([NINE_TOKENS])).logits

    assert dense.shape == expected.shape == (1, 9, 151_936)
    assert len(cache) == 9
    assert (dense - expected).abs().max() < 1e-3
    assert (torch.cat((cached, rest), dim=1) - expected).abs().max() < 1e-3
