"""Models with packed weights, kept or rounded: the same values, rounded products, and everything else as ever."""

import itertools
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
from kvine.kernels.packed import BLOCKS, PackedWeight, bytes_of
from kvine.models.load import LoadedModel, load_model
from kvine.models.packing import packed_bytes, packed_row_bytes
from kvine.sampling.params import SamplingParams


def load(path: Path, weights: str = "packed", dtype: str = "fp32") -> LoadedModel:
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


PACKED_KINDS = [*itertools.product(("llama", "qwen2", "gemma3"), ("Q8_0", "Q4_1", "Q5_0")), ("llama", "Q4_0")]
PACKED_KINDS += [("llama", kind) for kind in BLOCKS if kind.endswith("_K")] + [("gemma3", "Q6_K"), ("qwen2", "Q5_1")]


@pytest.mark.parametrize(("arch", "quant"), PACKED_KINDS)
def test_packed_is_exact_but_for_the_rounding_of_what_is_multiplied(arch: str, quant: str) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16} if quant.endswith("_K") else {}
    model, folder = tiny_model(arch, **wide)
    path = write_gguf(model, folder, quant)
    exact, packed = load(path, "exact"), load(path)
    assert packed.weight_bytes < exact.weight_bytes / 2 and f"stay packed ({quant})" in packed.dtype_reason
    assert set(packed.packings.values()) == {quant} and exact.packings == {}
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
    for path in (folder, write_gguf(model, folder, "F16")):
        assert not packed_of(load(path)) and load(path).dtype_reason.endswith(
            "; no weight is packed in this checkpoint"
        )
        assert load(path, "exact").dtype_reason == load(path, "auto").dtype_reason == "fp32 as asked"
    path = write_gguf(model, folder, "Q8_0")
    assert packed_of(load(path)) and not packed_of(load(path, "exact"))
    with pytest.raises(ConfigError, match="weights 'q3' is unknown: choose one of auto, exact, packed, q8, q4"):
        load(path, "q3")
    monkeypatch.setenv(kernels.VARIABLE, "off")
    for weights, what in (("packed", "that stay packed"), ("q8", "packed to q8"), ("q4", "packed to q4")):
        with pytest.raises(ConfigError, match=f"Weights {what} need .* compiled kernels: choose exact"):
            load(path, weights)


def test_auto_is_packed_but_in_fp32_and_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = tiny_model("llama")
    path = write_gguf(model, folder, "Q8_0")
    number = len(load(path).packings)
    for dtype in ("auto", "bf16", "fp16"):
        auto, packed = load(path, "auto", dtype), load(path, "packed", dtype)
        assert auto.packings == packed.packings and auto.fingerprint == packed.fingerprint and packed_of(auto)
        assert auto.dtype_reason.endswith(f"; {number} weights stay packed (Q8_0)")
        assert "instructions" not in auto.dtype_reason, "no weight is multiplied as it would be decoded"
    asked = "bf16 for weights stored as Q8_0"
    assert load(path, "auto", "auto").dtype_reason == f"{asked}; {number} weights stay packed (Q8_0)"
    decoded = f"{number} weights are decoded (Q8_0)"
    auto, exact = load(path, "auto", "fp32"), load(path, "exact", "fp32")
    assert not packed_of(auto) and auto.dtype_reason == f"fp32 as asked; {decoded}, as auto does in fp32"
    assert auto.fingerprint == exact.fingerprint and exact.dtype_reason == f"fp32 as asked; {decoded}, as asked"
    monkeypatch.setenv(kernels.VARIABLE, "off")
    auto = load(path, "auto", "bf16")
    assert not packed_of(auto)
    assert auto.dtype_reason.endswith(f"; {decoded}, for there are no kernels to multiply them packed")


@pytest.mark.parametrize("packing", BLOCKS)
def test_sizes_are_known_without_the_kernels(packing: str) -> None:
    """The planner's formula and the extension's own, of rows that fill tiles and rows that do not."""
    for out, width in ((1, 256), (16, 512), (131, 256), (49_152, 768)):
        assert packed_bytes(packing, (out, width)) == bytes_of(packing, (out, width))
    assert 16 * packed_row_bytes(packing, 256) == bytes_of(packing, (16, 256))


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_any_weights_are_rounded_on_demand(arch: str) -> None:
    """From safetensors in each dtype and from a GGUF file, whose llama has its heads' rows in another order."""
    model, folder = tiny_model(arch, dtype=torch.bfloat16)
    exact = load(folder, "exact")
    of_gguf = {weights: load(write_gguf(model, folder, "BF16"), weights) for weights in ("q8", "q4")}
    for weights, kind, loss, of_logits in (("q8", "Q8_0", 0.01, 0.1), ("q4", "Q4_1", 0.1, 0.5)):
        rounded = load(folder, weights)
        tables = {role for role in ("embedding.weight", "head.weight") if role in rounded.packings}
        assert tables and {rounded.packings[role] for role in tables} == {"Q8_0"}
        assert {rounded.packings[role] for role in rounded.packings.keys() - tables} == {kind}
        assert f"{len(packed_of(rounded)) - (arch == 'gemma3')} weights are packed" in rounded.dtype_reason
        assert "stay exact" not in rounded.dtype_reason and rounded.mapped_bytes == 0
        for whole, layer, other in zip(
            exact.decoder.layers, rounded.decoder.layers, of_gguf[weights].decoder.layers, strict=True
        ):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                values, right = getattr(layer, name).weight.unpacked(torch.float32), getattr(whole, name).weight
                assert 0 < (values - right).square().mean().sqrt() < loss * right.square().mean().sqrt()
                assert torch.equal(values, getattr(other, name).weight.unpacked(torch.float32))
        ids = torch.randint(0, exact.config.vocab_size, (40,), generator=torch.Generator().manual_seed(0))
        right, ours = dense_logits(exact.decoder, ids), dense_logits(rounded.decoder, ids)
        assert (ours - right).square().mean().sqrt() / right.std() < of_logits


def test_what_a_file_has_packed_in_as_little_is_kept() -> None:
    model, folder = tiny_model("llama")
    for quant, weights, kind in [
        ("Q8_0", "q8", "Q8_0"),
        ("Q5_0", "q8", "Q5_0"),
        ("Q4_0", "q4", "Q4_0"),
        ("Q5_0", "q4", "Q4_1"),
        ("Q8_0", "q4", "Q4_1"),
    ]:
        path = write_gguf(model, folder, quant)
        kept, asked = load(path), load(path, weights)
        layer = "layers.1.down.weight"
        assert asked.packings[layer] == kind and asked.packings["embedding.weight"] == quant
        is_same = torch.equal(asked.decoder.layers[1].mlp.down.weight.data, kept.decoder.layers[1].mlp.down.weight.data)
        assert is_same == (kind == quant)
        assert f"{len(asked.packings) if kind == quant else 2} of them as stored" in asked.dtype_reason
        assert (asked.fingerprint == kept.fingerprint) == (kind == quant)


def test_rows_of_odd_length_stay_exact() -> None:
    _, folder = tiny_model("llama", intermediate_size=80)
    rounded = load(folder, "q4")
    assert isinstance(rounded.decoder.layers[0].mlp.down.weight, torch.Tensor)
    assert isinstance(rounded.decoder.layers[0].mlp.up.weight, PackedWeight)
    assert rounded.dtype_reason.endswith("; 3 stay exact, whose rows are no multiple of 32")
    assert 0 < rounded.mapped_bytes < rounded.weight_bytes


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
