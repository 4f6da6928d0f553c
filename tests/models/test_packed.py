"""Models whose GGUF weights stay packed: the same values, rounded products, and everything else as ever."""

from pathlib import Path

import pytest
import torch
from checkpoints import tiny_model, write_gguf
from dense import dense_logits

from kvine import kernels
from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import build_engine, standard_parts
from kvine.errors import ConfigError
from kvine.hub import ModelSource
from kvine.kernels.packed import BLOCK_BYTES, PackedWeight
from kvine.models.load import LoadedModel, load_model
from kvine.sampling.params import SamplingParams


def load(path: Path, weights: str = "auto", dtype: str = "fp32") -> LoadedModel:
    kind = "gguf" if path.suffix == ".gguf" else "safetensors"
    return load_model(ModelSource(path.name, path, kind, None), dtype=dtype, device="cpu", weights=weights)


def packed_of(model: LoadedModel) -> list[PackedWeight]:
    layers = model.decoder.layers
    linears = [
        part
        for layer in layers
        for part in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, *vars_of(layer.mlp))
    ]
    weights = [model.decoder.embedding.weight, model.decoder.head.weight, *(linear.weight for linear in linears)]
    return [weight for weight in weights if isinstance(weight, PackedWeight)]


def vars_of(mlp: object) -> tuple:
    return mlp.gate, mlp.up, mlp.down  # type: ignore[attr-defined]


@pytest.mark.parametrize("quant", BLOCK_BYTES)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3"])
def test_packed_is_exact_but_for_the_rounding_of_what_is_multiplied(arch: str, quant: str) -> None:
    model, folder = tiny_model(arch)
    path = write_gguf(model, folder, quant)
    exact, packed = load(path, "exact"), load(path)
    assert packed.weight_bytes < exact.weight_bytes / 2 and "stay packed" in packed.dtype_reason
    assert exact.fingerprint != packed.fingerprint, "blocks of the one are no hits for the other"
    for whole, layer in zip(exact.decoder.layers, packed.decoder.layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = getattr(layer, name).weight
            assert isinstance(weight, PackedWeight)
            assert torch.equal(weight.unpacked(torch.float32), getattr(whole, name).weight)
    ids = torch.randint(0, exact.config.vocab_size, (40,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(packed.decoder.embedding(ids), exact.decoder.embedding(ids))
    right, ours = dense_logits(exact.decoder, ids), dense_logits(packed.decoder, ids)
    difference = (ours - right).square().mean().sqrt() / right.std()
    assert 1e-4 < difference < 0.05, "activations in 8 bits are near, and not the same"


def test_a_tied_head_is_one_packed_weight() -> None:
    model, folder = tiny_model("gemma3")
    packed = load(write_gguf(model, folder, "Q8_0"))
    assert packed.decoder.head.weight is packed.decoder.embedding.weight
    assert packed.weight_bytes == sum(
        weight.nbytes for weight in {id(weight): weight for weight in packed_of(packed)}.values()
    ) + norm_bytes(packed)


def norm_bytes(model: LoadedModel) -> int:
    layers = model.decoder.layers
    names = ("attn_norm", "mlp_norm", "q_norm", "k_norm", "post_attn_norm", "post_mlp_norm")
    norms = [getattr(layer, name) for layer in layers for name in names]
    return sum(norm.weight.nbytes for norm in [*norms, model.decoder.final_norm] if norm is not None)


def test_what_cannot_be_packed_stays_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = tiny_model("llama")
    for path in (folder, write_gguf(model, folder, "F16"), write_gguf(model, folder, "Q5_1")):
        assert not packed_of(load(path)) and "no weight stays packed" in load(path).dtype_reason
        assert "packed" not in load(path, "exact").dtype_reason
    path = write_gguf(model, folder, "Q8_0")
    assert packed_of(load(path)) and not packed_of(load(path, "exact"))
    with pytest.raises(ConfigError, match="weights 'q3' is unknown: choose one of exact, auto"):
        load(path, "q3")
    monkeypatch.setenv(kernels.VARIABLE, "off")
    assert not packed_of(load(path)) and "no weight stays packed" in load(path).dtype_reason


@pytest.mark.parametrize("path", kernels.available())
def test_tokens_do_not_depend_on_batch_mates(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 too: no product depends on the number of rows, so that mates cannot turn a near-tie."""
    monkeypatch.setenv(kernels.VARIABLE, path)
    oracle, folder = tiny_model("llama")
    model = load(write_gguf(oracle, folder, "Q4_1"), dtype="bf16")
    vocabulary = model.config.vocab_size
    texts = [
        torch.randint(0, vocabulary, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 9, 33)
    ]
    cache = CacheConfig(block_size=4, prefix_caching=False)

    def logits(groups: list[list[list[int]]]) -> list[torch.Tensor]:
        """Of every next token, [12, vocabulary] for each text."""
        engine = build_engine(
            EngineConfig(), standard_parts(model, cache, EngineConfig(), vocab_size=vocabulary, eos_ids=())
        )
        seen: dict[int, list[torch.Tensor]] = {}
        whole = engine.parts.runner.run

        def run(step, **options):
            rows = whole(step, **options)
            sampling = [item.request.id for item in step if item.samples]
            for request_id, row in zip(sampling, rows, strict=True):
                seen.setdefault(request_id, []).append(row)
            return rows

        engine.parts.runner.run = run
        for group in groups:
            for text in group:
                engine.add(text, SamplingParams(max_tokens=12, ignore_eos=True))
            while engine.busy:
                engine.step()
        return [torch.stack(rows) for _, rows in sorted(seen.items())]

    together, alone = logits([texts]), logits([[text] for text in texts])
    assert [rows.shape for rows in together] == [(12, vocabulary)] * 3
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
