"""The decoder against transformers in fp32, for every architecture and from both formats."""

from pathlib import Path

import pytest
import torch
from checkpoints import tiny_model, write_gguf
from dense import dense_attend, dense_logits

from kvine.hub import ModelSource
from kvine.models.load import LoadedModel, load_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
GEMMA_LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
CASES = {
    "TL": ("TL", {}),
    "TH": ("TH", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-padded-vocab": ("llama", {"vocab_size": 192}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral-window": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "gemma3": ("gemma3", {}),
    "gemma3-softcap": ("gemma3", {"final_logit_softcapping": 5.0, "head_dim": 32}),
    "gemma3-linear": ("gemma3", {"rope_parameters": GEMMA_LINEAR}),
}
NUM_TOKENS = 48  # beyond each window (8) and each original context (32)


def load(path: Path, **options: str) -> LoadedModel:
    kind = "gguf" if path.suffix == ".gguf" else "safetensors"
    return load_model(ModelSource(path.name, path, kind, None), **options)


def reference_logits(model, input_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids[None]).logits[0].float()


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(case: str, form: str, tiny):
    arch, overrides = CASES[case]
    model, folder = tiny(arch, **overrides)
    loaded = load(write_gguf(model, folder) if form == "gguf" else folder)
    assert loaded.dtype == torch.float32
    assert loaded.unused_tensors == ()
    input_ids = torch.randint(3, 131, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    expected = reference_logits(model, input_ids)
    assert expected.std() > 0.5  # logits that differ, or nothing is compared
    torch.testing.assert_close(dense_logits(loaded.decoder, input_ids), expected, atol=1e-4, rtol=0)


def test_sharded_checkpoint_gives_the_same_logits():
    model, folder = tiny_model("TL", max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    input_ids = torch.arange(20)
    torch.testing.assert_close(
        dense_logits(load(folder).decoder, input_ids), reference_logits(model, input_ids), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("arch", ["TL", "gemma3"])
def test_bf16_is_as_close_to_fp32_as_transformers_bf16_is(arch: str):
    model, folder = tiny_model(arch, dtype=torch.bfloat16)
    input_ids = torch.arange(3, 27)
    exact = reference_logits(model, input_ids)
    theirs = type(model).from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    error = (reference_logits(theirs, input_ids) - exact).abs().mean()
    loaded = load(folder, dtype="bf16")
    ours = (dense_logits(loaded.decoder, input_ids) - exact).abs().mean()
    assert 0 < ours < 1.5 * error


def test_gemma_embedding_scale_is_rounded_to_the_compute_dtype():
    _, folder = tiny_model("gemma3", hidden_size=96, head_dim=24, dtype=torch.bfloat16)  # sqrt(96) is inexact in bf16
    scale = load(folder, dtype="bf16").decoder.embedding.scale
    assert scale is not None
    assert scale.item() == 9.8125  # 9.797959 to eight bits of mantissa


def test_attention_softcap_reaches_the_config():
    _, folder = tiny_model("gemma3", attn_logit_softcapping=30.0)
    assert load(folder).config.attention_softcap == 30.0


def test_observer_sees_named_tensors_in_order_and_changes_nothing():
    _, folder = tiny_model("gemma3")
    decoder = load(folder).decoder
    input_ids, positions = torch.arange(5), torch.arange(5)
    seen: list[tuple[str, int, tuple[int, ...]]] = []
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def observer(name: str, layer: int, tensor: torch.Tensor) -> None:
        seen.append((name, layer, tuple(tensor.shape)))
        kept.append((tensor, tensor.clone()))

    attend = dense_attend(decoder.config, positions)
    observed = decoder.forward(input_ids, positions, attend, observer)
    assert torch.equal(observed, decoder.forward(input_ids, positions, attend))
    assert all(torch.equal(tensor, copy) for tensor, copy in kept)  # a kept tensor is not overwritten later
    names = ["attn_norm", "q", "k", "v", "attn_out", "attn_residual", "mlp_out", "layer_out"]
    assert [(name, layer) for name, layer, _ in seen] == [
        ("embedding", -1),
        *((name, layer) for layer in range(3) for name in names),
        ("final_norm", -1),
    ]
    shapes = {name: shape for name, _, shape in seen}
    assert shapes["q"] == (5, 4, 16) and shapes["k"] == shapes["v"] == (5, 2, 16) and shapes["attn_norm"] == (5, 64)


def test_attend_gets_unrotated_normed_heads():
    """At another start position q and k are the same: position enters in attention alone."""
    _, folder = tiny_model("qwen3")
    decoder = load(folder).decoder
    records: list[torch.Tensor] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        records.append(q)
        return torch.zeros_like(q)

    for start in (0, 100):
        decoder.forward(torch.arange(4), torch.arange(start, start + 4), attend)
    assert torch.equal(records[0], records[3])
    first = decoder.layers[0]
    raw = first.q_proj(first.attn_norm(decoder.embedding(torch.arange(4)))).view(4, 4, 16)
    normed = raw / (raw.square().mean(-1, keepdim=True) + decoder.config.norm_eps).sqrt() * first.q_norm.weight
    torch.testing.assert_close(records[0], normed, atol=1e-5, rtol=1e-5)


def test_logits_are_computed_for_the_given_rows_only():
    _, folder = tiny_model("TL", dtype=torch.bfloat16)
    decoder = load(folder).decoder
    logits = decoder.logits(torch.randn(2, 64, dtype=torch.bfloat16))
    assert logits.shape == (2, 131) and logits.dtype == torch.float32
