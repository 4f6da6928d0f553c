"""Random checkpoints are real ones: loaded by Kvine and by transformers alike."""

from pathlib import Path

import pytest
import torch
from checkpoints import tiny_model
from dense import dense_logits
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from kvine.errors import ConfigError, ModelLoadError
from kvine.evidence.random_model import QWEN3_0_6B, make_random_checkpoint, random_checkpoint
from kvine.hub import ModelSource
from kvine.models.config_hf import config_from_hf
from kvine.models.load import load_model
from kvine.models.names import required_shapes

SMALL = {
    **QWEN3_0_6B,
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def test_checkpoint_loads_here_and_in_transformers(tmp_path: Path):
    folder = make_random_checkpoint(SMALL, tmp_path / "model")
    loaded = load_model(ModelSource("random", folder, "safetensors", None), dtype="fp32")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    input_ids = torch.arange(30)
    with torch.no_grad():
        expected = theirs(input_ids[None]).logits[0]
    torch.testing.assert_close(dense_logits(loaded.decoder, input_ids), expected, atol=1e-4, rtol=0)
    weight = loaded.decoder.embedding.weight
    assert abs(weight.std().item() - 0.02) < 1e-3 and abs(weight.mean().item()) < 1e-3
    assert len(torch.unique(weight, dim=0)) == 300  # equal rows would be tied logits


def test_seed_decides_the_bytes(tmp_path: Path):
    first, same, other = (
        make_random_checkpoint(SMALL, tmp_path / str(index), seed) / "model.safetensors"
        for index, seed in enumerate((5, 5, 6))
    )
    assert first.read_bytes() == same.read_bytes() != other.read_bytes()


def test_tokenizer_knows_every_text(tmp_path: Path):
    tokenizer = Tokenizer.from_file(str(make_random_checkpoint(SMALL, tmp_path / "model") / "tokenizer.json"))
    text = "Grüße,  世界!\n\t🙂"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.encode("<|endoftext|>").ids == [256]


def test_shape_of_qwen3():
    shapes = required_shapes(config_from_hf(QWEN3_0_6B, "qwen3"))
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 596_049_920  # the published model's count


def test_refusals(tmp_path: Path):
    _, folder = tiny_model("TL")
    with pytest.raises(ConfigError, match="already holds a checkpoint"):
        make_random_checkpoint(SMALL, folder)
    with pytest.raises(ConfigError, match=r"no shape named 'gpt-7'.*qwen3-0\.6b"):
        random_checkpoint(tmp_path / "model", "gpt-7")
    with pytest.raises(ModelLoadError, match="hidden_act"):
        make_random_checkpoint({**SMALL, "hidden_act": "relu"}, tmp_path / "model")
    with pytest.raises(ConfigError, match="at least 256"):
        make_random_checkpoint({**SMALL, "vocab_size": 100}, tmp_path / "model")
    assert not (tmp_path / "model").exists()
