"""Loading: which tensor becomes what, what is refused before anything is read, and what is said of the result."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoints import interleave_heads, tiny_model, write_gguf
from dense import dense_logits
from safetensors.torch import load_file, save_file

from kvine.errors import ConfigError, ModelLoadError
from kvine.formats.gguf import GGUFFile
from kvine.hub import ModelSource
from kvine.models import load as load_module
from kvine.models.load import LoadedModel, load_model
from kvine.models.placement import choose_dtype

CPU = torch.device("cpu")


def load(path: Path, **options: str) -> LoadedModel:
    kind = "gguf" if path.suffix == ".gguf" else "safetensors"
    return load_model(ModelSource(path.name, path, kind, None), **options)


def weights_of(loaded: LoadedModel) -> list[torch.Tensor]:
    decoder = loaded.decoder
    linears = [decoder.head]
    for layer in decoder.layers:
        linears += [layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj]
        linears += [layer.mlp.gate, layer.mlp.up, layer.mlp.down]
    norms = [n for layer in decoder.layers for n in (layer.attn_norm, layer.mlp_norm, layer.q_norm, layer.k_norm) if n]
    tensors = [decoder.embedding.weight, decoder.final_norm.weight, *(norm.weight for norm in norms)]
    return [*tensors, *(t for linear in linears for t in (linear.weight, linear.bias) if t is not None)]


def edit(folder: Path, **changes: Any) -> None:
    """Change config.json; None removes a key."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (6, 2), (8, 1)])
def test_e01_gguf_llama_heads_are_put_back_in_order(num_heads: int, num_kv_heads: int):
    model, folder = tiny_model(
        "llama",
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        hidden_size=96,
        attention_bias=True,
    )
    from_hf, from_gguf = load(folder), load(write_gguf(model, folder))
    for hf, ours in zip(weights_of(from_hf), weights_of(from_gguf), strict=True):
        assert torch.equal(hf, ours)
    input_ids = torch.arange(3, 23)
    with torch.no_grad():
        expected = model(input_ids[None]).logits[0]
    torch.testing.assert_close(dense_logits(from_gguf.decoder, input_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_1"])
def test_e01_quantized_rows_are_permuted_exactly(quant: str, tiny):
    """A block never spans rows, so quantizing permuted rows and undoing it equals quantizing the rows as they are."""
    model, folder = tiny("llama", attention_bias=True)
    path = write_gguf(model, folder, quant)
    loaded = load(path, dtype="fp32")
    kind = gguf.GGMLQuantizationType[quant]
    for index, layer in enumerate(loaded.decoder.layers):
        theirs = model.model.layers[index].self_attn
        for ours, linear in ((layer.q_proj, theirs.q_proj), (layer.k_proj, theirs.k_proj)):
            rows = gguf.quants.dequantize(gguf.quants.quantize(linear.weight.detach().numpy(), kind), kind)
            assert torch.equal(ours.weight, torch.from_numpy(rows))
            assert torch.equal(ours.bias, linear.bias)
    assert load(path).dtype == torch.bfloat16


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma3"])
def test_e01_other_architectures_are_not_permuted(arch: str, tiny):
    model, folder = tiny(arch)
    path = write_gguf(model, folder)
    stored = GGUFFile(path).read("blk.0.attn_q.weight", torch.float32)
    ours = load(path).decoder.layers[0].q_proj.weight
    assert torch.equal(ours, stored) and torch.equal(ours, model.model.layers[0].self_attn.q_proj.weight)
    assert not torch.equal(ours, interleave_heads(ours, 4))


def test_tied_head_shares_the_embedding_and_counts_once(tiny):
    model, folder = tiny("llama", tie_word_embeddings=True)
    loaded = load(folder)
    assert loaded.decoder.head.weight is loaded.decoder.embedding.weight
    assert loaded.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())


def test_weight_and_mapped_bytes(tiny):
    model, folder = tiny("TL")
    total = sum(parameter.nbytes for parameter in model.parameters())
    as_stored = load(folder)
    assert (as_stored.weight_bytes, as_stored.mapped_bytes) == (total, total)
    rounded = load(folder, dtype="bf16")
    norms = 7 * 64 * 4  # stay fp32, and are mapped
    assert (rounded.weight_bytes, rounded.mapped_bytes) == ((total - norms) // 2 + norms, norms)
    from_gguf = load(write_gguf(model, folder))
    permuted = 3 * (64 + 32) * 64 * 4  # q and k of three layers
    assert (from_gguf.weight_bytes, from_gguf.mapped_bytes) == (total, total - permuted)


def test_mapped_weights_are_the_files_own_pages(tiny):
    """What is counted as mapped lies in a mapping of the checkpoint, and the rest does not."""
    _, folder = tiny("gemma3")
    loaded = load(folder)
    files = {str(path) for path in folder.glob("*.safetensors")}
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.split()[-1] in files:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            ranges.append((start, end))
    shared = {
        tensor.data_ptr(): tensor.nbytes
        for tensor in weights_of(loaded)
        if any(start <= tensor.data_ptr() < end for start, end in ranges)
    }
    assert sum(shared.values()) == loaded.mapped_bytes > 0
    assert loaded.decoder.final_norm.weight.data_ptr() not in shared  # Gemma's 1 has been added to a copy


def test_unused_tensors_are_reported(tmp_path: Path):
    _, folder = tiny_model("llama", tie_word_embeddings=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["vision_tower.patch.weight"] = torch.ones(2, 2)
    save_file(tensors, path)
    assert set(load(folder).unused_tensors) == {
        "lm_head.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "vision_tower.patch.weight",
    }


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model."])
def test_other_prefixes_of_the_decoder(prefix: str):
    model, folder = tiny_model("gemma3")
    path = folder / "model.safetensors"
    save_file({name.replace("model.", prefix, 1): tensor for name, tensor in load_file(path).items()}, path)
    assert torch.equal(load(folder).decoder.embedding.weight, model.model.embed_tokens.weight)


def test_text_part_of_a_multimodal_gemma():
    model, folder = tiny_model("gemma3")
    text = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (folder / "config.json").write_text(json.dumps(outer))
    input_ids = torch.arange(3, 23)
    with torch.no_grad():
        expected = model(input_ids[None]).logits[0]
    torch.testing.assert_close(dense_logits(load(folder).decoder, input_ids), expected, atol=1e-4, rtol=0)


def remove(name: str):
    return lambda tensors: tensors.pop(name)


def replace(name: str, *shape: int):
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (remove("model.layers.2.mlp.down_proj.weight"), "model.layers.2.mlp.down_proj.weight is missing"),
        (remove("model.embed_tokens.weight"), "model.embed_tokens.weight is missing"),
        (remove("lm_head.weight"), "lm_head.weight is missing"),
        (replace("model.norm.weight", 65), r"model.norm.weight has the shape \[65\].*\[64\]"),
        (replace("model.layers.1.self_attn.k_proj.weight", 64, 64), r"k_proj.weight has the shape \[64, 64\]"),
        (replace("model.layers.0.self_attn.q_proj.bias", 64), "q_proj.bias has no place"),
        (replace("model.layers.3.input_layernorm.weight", 64), "layers.3.input_layernorm.weight has no place"),
    ],
)
def test_tensors_that_contradict_the_config(change: Any, named: str, monkeypatch):
    _, folder = tiny_model("TL")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    monkeypatch.setattr(load_module, "_read", None)  # nothing may be read
    with pytest.raises(ModelLoadError, match=named) as error:
        load(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 4}, r"model.layers.3.self_attn.q_proj.weight is missing"),
        ({"num_hidden_layers": 2}, "model.layers.2.*has no place"),
        ({"num_key_value_heads": 4}, "k_proj.weight has the shape"),
        ({"vocab_size": 130}, "embed_tokens.weight has the shape"),
        ({"attention_bias": True}, "q_proj.bias is missing"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "q_norm.weight is missing"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
    ],
)
def test_configs_that_contradict_the_weights(change: dict[str, Any], named: str):
    _, folder = tiny_model("TL")
    edit(folder, **change)
    with pytest.raises(ModelLoadError, match=named):
        load(folder)


def test_missing_files():
    _, folder = tiny_model("TL", max_shard_size="60KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=shard.name):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"config\.json is missing"):
        load(folder)
    (folder / "config.json").write_text("{not json")
    with pytest.raises(ModelLoadError, match=r"config\.json is not readable JSON"):
        load(folder)


def test_gguf_without_a_layer(tiny):
    model, folder = tiny("TL")
    path = write_gguf(model, folder)
    renamed = path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_uq.weight")
    broken = path.with_name("broken.gguf")
    broken.write_bytes(renamed)
    with pytest.raises(ModelLoadError, match=r"broken\.gguf: tensor blk\.1\.ffn_up\.weight is missing"):
        load(broken)


def test_generation_config_adds_ends_of_turn():
    _, folder = tiny_model("TL")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load(folder).config.eos_token_ids == (2, 7)


def test_rope_freqs_are_used_not_reported(tiny):
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 32, "rope_theta": 10_000.0}
    model, folder = tiny("llama", rope_parameters=rope)
    loaded = load(write_gguf(model, folder))
    assert loaded.unused_tensors == ()
    assert len(loaded.config.layers[0].rope.divisors) == 8 and max(loaded.config.layers[0].rope.divisors) == 8.0


def test_fingerprint_tells_models_apart(tiny):
    model, folder = tiny("TL")
    same, again = load(folder), load(folder, dtype="bf16")
    assert len(same.fingerprint) == 32 and same.fingerprint == again.fingerprint
    others = [load(tiny_model("TL", seed=1)[1]).fingerprint, load(write_gguf(model, folder)).fingerprint]
    _, scaled = tiny_model("TL")
    edit(scaled, rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0})
    others.append(load(scaled).fingerprint)
    _, tuned = tiny_model("TL")
    tensors = load_file(tuned / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][-1, -1] += 1
    save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
    others.append(load(tuned).fingerprint)
    assert len({same.fingerprint, *others}) == 5


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["auto", "fp32", "bf16", "fp16"])
def test_e10_every_dtype_of_every_file(dtype: str, stored: torch.dtype, tiny):
    model, folder = tiny("TL", dtype=stored)
    loaded = load(folder, dtype=dtype)
    auto = {torch.float32: torch.float32, torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}[stored]
    named = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert loaded.dtype == named.get(dtype, auto)
    assert loaded.dtype_reason.startswith(next(name for name, value in named.items() if value == loaded.dtype))
    assert loaded.decoder.final_norm.weight.dtype == torch.float32
    input_ids = torch.arange(3, 23)
    with torch.no_grad():
        exact = model(input_ids[None]).logits[0]
    error = (dense_logits(loaded.decoder, input_ids) - exact).abs().max() / exact.std()
    assert error < {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-1}[loaded.dtype]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_e10_auto_is_no_slow_choice(stored: torch.dtype):
    """At least half of fp32's speed at one row and at many, in processor time of one thread: others use the machine."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 1024, "intermediate_size": 4096}  # more than a cache holds
    _, folder = tiny_model("llama", **sizes, head_dim=64, num_attention_heads=16, dtype=stored)
    models = {name: load(folder, dtype=name) for name in ("auto", "fp32")}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for rows in (1, 8, 64):
            input_ids = positions = torch.arange(rows)
            least = dict.fromkeys(models, float("inf"))
            for _ in range(60):  # least times, taken until a busy machine has let both run undisturbed
                for name, loaded in models.items():
                    start = time.thread_time()
                    loaded.decoder.forward(input_ids, positions, lambda layer, q, k, v: q)
                    least[name] = min(least[name], time.thread_time() - start)
                if least["auto"] <= 1.5 * least["fp32"]:
                    break
            assert least["auto"] <= 2 * least["fp32"], (rows, least)
    finally:
        torch.set_num_threads(threads)


def test_quantized_weights_run_in_bf16_and_fp16_becomes_fp32(tiny):
    model, folder = tiny("TL")
    for quant, expected in (
        ("Q4_1", "bf16 for weights stored as Q4_1"),
        ("F16", "fp32"),
        ("BF16", "bf16 as stored"),
    ):
        assert load(write_gguf(model, folder, quant)).dtype_reason.startswith(expected)
    assert choose_dtype("auto", "F16", torch.device("mps"))[0] == torch.float16


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"device": "tpu"}, {"device": "cuda"}, {"device": "mps"}])
def test_what_this_machine_or_kvine_lacks_is_a_config_error(options: dict[str, str], tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=rf"'{next(iter(options.values()))}'.*Choose one of auto"):
        load(tiny("TL")[1], **options)


def test_auto_device_and_frozen_result(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    loaded = load(tiny("TL")[1])
    assert loaded.device == CPU
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.dtype = torch.float16  # type: ignore[misc]
