"""Rotary tables against formulas written separately and against transformers; the rotation against complex numbers."""

import cmath
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvine.errors import ModelLoadError
from kvine.models.config_gguf import config_from_gguf
from kvine.models.config_hf import config_from_hf, rope_from_hf
from kvine.models.fields import Fields
from kvine.rope import RopeConfig, RotaryEmbedding, rotate
from kvine.rope_scaling import attention_scaling, inverse_frequencies

HEAD_DIM, THETA, TRAINED, ORIGINAL = 64, 10_000.0, 4096, 1024
SHORT = [1.0 + pair / 50 for pair in range(HEAD_DIM // 2)]
LONG = [1.5 + pair / 4 for pair in range(HEAD_DIM // 2)]
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": ORIGINAL},
}


def formula(kind: str, length: int = 0) -> tuple[list[float], float]:
    """Each kind's table from its paper, one frequency at a time, in wavelengths where the code counts turns."""
    table, scaling = [], 1.0
    for pair in range(HEAD_DIM // 2):
        theta = THETA
        if kind == "dynamic" and length > TRAINED:
            theta *= (4.0 * length / TRAINED - 3.0) ** (HEAD_DIM / (HEAD_DIM - 2))
        frequency = 1 / theta ** (2 * pair / HEAD_DIM)
        wavelength = 2 * math.pi / frequency
        if kind == "linear":
            frequency /= 4
        elif kind == "yarn":

            def pair_of(turns: float) -> float:
                return HEAD_DIM * math.log(ORIGINAL / (turns * 2 * math.pi)) / (2 * math.log(THETA))

            first, last = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), HEAD_DIM - 1)
            keep = 1 - min(1, max(0, (pair - first) / (last - first)))
            frequency = keep * frequency + (1 - keep) * frequency / 4
            scaling = 0.1 * math.log(4) + 1
        elif kind == "llama3":
            longest, shortest = ORIGINAL / 1, ORIGINAL / 4
            if wavelength > longest:
                frequency /= 8
            elif wavelength >= shortest:
                smooth = (ORIGINAL / wavelength - 1) / (4 - 1)
                frequency = (1 - smooth) * frequency / 8 + smooth * frequency
        elif kind == "longrope":
            frequency /= (LONG if length > ORIGINAL else SHORT)[pair]
            scaling = math.sqrt(1 + math.log(TRAINED / ORIGINAL) / math.log(ORIGINAL))
        table.append(frequency)
    return table, scaling


def hf_config(kind: str, key: str = "rope_type", form: str = "rope_parameters") -> dict[str, Any]:
    rope = {key: kind, **PARAMETERS[kind]}
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 4 * HEAD_DIM,
        "intermediate_size": 100,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": TRAINED,
    }
    if form == "rope_parameters":
        return {**values, "rope_parameters": {**rope, "rope_theta": THETA}}
    return {**values, "rope_theta": THETA, "rope_scaling": rope}


def hf_rope(values: dict[str, Any]) -> RopeConfig:
    """As `config_from_hf` reads it, but for longrope too, which no model may have yet."""
    fields = Fields(values, "config.json")
    form = "rope_parameters" if "rope_parameters" in values else "rope_scaling"
    rope = fields.nested(form)
    assert rope is not None
    return rope_from_hf(rope, fields, values.get("rope_theta", 1.0), HEAD_DIM)


def close(ours: list[float], theirs: list[float], tolerance: float = 1e-6) -> bool:
    return len(ours) == len(theirs) and all(
        math.isclose(a, b, rel_tol=tolerance) for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", PARAMETERS)
def test_e04_table_from_config_equals_the_formula(kind: str, key: str, form: str):
    values = hf_config(kind, key, form)
    rope = hf_rope(values)
    assert rope.kind == kind
    if kind != "longrope":
        assert config_from_hf(values, "config.json").layers[0].rope == rope
    for length in (None, ORIGINAL, ORIGINAL + 1, TRAINED, TRAINED + 1, 3 * TRAINED):
        table, scaling = formula(kind, length or 0)
        assert close(inverse_frequencies(rope, length), table)
        assert math.isclose(attention_scaling(rope), scaling, rel_tol=1e-6)


@pytest.mark.parametrize("length", [None, 3 * TRAINED])
@pytest.mark.parametrize("kind", [kind for kind in PARAMETERS if kind != "default"])
def test_e04_table_equals_transformers(kind: str, length: int | None):
    values = hf_config(kind)
    theirs = LlamaConfig(**{key: value for key, value in values.items() if key != "architectures"})
    table, scaling = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"), seq_len=length)
    rope = hf_rope(values)
    assert close(inverse_frequencies(rope, length), table.tolist(), 5e-6)  # they compute in fp32
    assert math.isclose(attention_scaling(rope), scaling, rel_tol=1e-6)


@pytest.mark.parametrize(
    "extra",
    [
        {"attention_factor": 1.5},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"mscale": 0.7, "mscale_all_dim": 0.9},
        {"truncate": False},
    ],
)
def test_e04_yarn_options_equal_transformers(extra: dict[str, Any]):
    values = hf_config("yarn")
    values["rope_parameters"].update(extra)
    theirs = LlamaConfig(**{key: value for key, value in values.items() if key != "architectures"})
    table, scaling = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    rope = hf_rope(values)
    assert close(inverse_frequencies(rope), table.tolist(), 5e-6)
    assert math.isclose(attention_scaling(rope), scaling, rel_tol=1e-6)


def gguf_rope(rope_keys: dict[str, Any], divisors: tuple[float, ...] = (), arch: str = "llama") -> RopeConfig:
    metadata = {
        "general.architecture": arch,
        f"{arch}.block_count": 1,
        f"{arch}.context_length": TRAINED,
        f"{arch}.embedding_length": 4 * HEAD_DIM,
        f"{arch}.feed_forward_length": 100,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.vocab_size": 100,
        f"{arch}.rope.freq_base": THETA,
        **{f"{arch}.rope.{key}": value for key, value in rope_keys.items()},
    }
    return config_from_gguf(metadata, {}, "m.gguf", rope_divisors=divisors).layers[0].rope


GGUF_KEYS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"scaling.type": "linear", "scaling.factor": 4.0},
    "yarn": {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": ORIGINAL},
}


@pytest.mark.parametrize("with_freqs", [False, True])
@pytest.mark.parametrize("kind", GGUF_KEYS)
def test_e04_table_from_gguf_equals_the_formula(kind: str, with_freqs: bool):
    divisors = tuple(LONG) if with_freqs else ()
    rope = gguf_rope(GGUF_KEYS[kind], divisors)
    table, scaling = formula(kind)
    expected = [f / d for f, d in zip(table, divisors or [1.0] * len(table), strict=True)]
    assert close(inverse_frequencies(rope), expected)
    assert math.isclose(attention_scaling(rope), scaling, rel_tol=1e-6)


@pytest.mark.parametrize("kind", ["llama3", "longrope"])
def test_e04_kinds_that_gguf_stores_as_rope_freqs(kind: str):
    plain, _ = formula("default")
    scaled, _ = formula(kind)
    rope = gguf_rope({}, tuple(p / s for p, s in zip(plain, scaled, strict=True)))
    assert close(inverse_frequencies(rope), scaled)


def test_gguf_factor_without_type_is_linear_and_none_is_default():
    assert close(inverse_frequencies(gguf_rope({"scaling.factor": 4.0})), formula("linear")[0])
    assert close(inverse_frequencies(gguf_rope({"scale_linear": 4.0})), formula("linear")[0])
    ignored = gguf_rope({"scaling.type": "none", "scaling.factor": 4.0})
    assert close(inverse_frequencies(ignored), formula("default")[0])


def test_gguf_yarn_attention_factor_multiplies():
    rope = gguf_rope({**GGUF_KEYS["yarn"], "scaling.attn_factor": 0.5})
    assert math.isclose(attention_scaling(rope), 0.5 * (1 + 0.1 * math.log(4)))


@pytest.mark.parametrize(
    ("form", "key", "value"),
    [
        ("rope_scaling", "rope_type", "su"),
        ("rope_scaling", "type", "mrope"),
        ("rope_parameters", "rope_type", "axial"),
        ("rope_parameters", "type", ""),
    ],
)
def test_e04_unknown_kind_is_an_error(form: str, key: str, value: str):
    values = hf_config("linear", key, form)
    values[form][key] = value
    with pytest.raises(ModelLoadError, match=rf"config\.json.*{form}\.rope_type.*{value}"):
        config_from_hf(values, "config.json")


def test_e04_contradicting_kinds_are_an_error():
    values = hf_config("linear")
    values["rope_parameters"]["type"] = "yarn"
    with pytest.raises(ModelLoadError, match="contradict"):
        config_from_hf(values, "config.json")


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"scaling.type": "mystery"}, "mystery"),
        ({"scaling.type": "longrope", "scaling.factor": 4.0}, "longrope"),
        ({**GGUF_KEYS["yarn"], "scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({**GGUF_KEYS["yarn"], "scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ({"dimension_count": HEAD_DIM // 2}, "dimension_count"),
    ],
)
def test_e04_gguf_rope_that_kvine_cannot_run_is_an_error(keys: dict[str, Any], named: str):
    with pytest.raises(ModelLoadError, match=rf"m\.gguf.*{named}"):
        gguf_rope(keys)


def test_gguf_divisors_of_a_wrong_length_are_an_error():
    with pytest.raises(ModelLoadError, match=r"m\.gguf.*divisors has 3 entries where 32"):
        gguf_rope({}, (1.0, 2.0, 3.0))


def test_longrope_models_are_refused_clearly():
    with pytest.raises(ModelLoadError, match=r"config\.json.*longrope"):
        config_from_hf(hf_config("longrope"), "config.json")


def test_dynamic_serves_the_trained_length_with_the_plain_table():
    config = config_from_hf(hf_config("dynamic"), "config.json")
    assert config.max_context == TRAINED
    plain = config_from_hf(hf_config("default"), "config.json").layers[0].rope
    assert inverse_frequencies(config.layers[0].rope, config.max_context) == inverse_frequencies(plain)


def test_partial_rotary_factor_inside_or_outside():
    for form in ("rope_parameters", "rope_scaling"):
        values = hf_config("linear", form=form)
        (values[form] if form == "rope_parameters" else values)["partial_rotary_factor"] = 0.5
        rope = config_from_hf(values, "config.json").layers[0].rope
        assert rope.rotary_dim == HEAD_DIM // 2
        expected = [THETA ** (-2 * pair / rope.rotary_dim) / 4 for pair in range(rope.rotary_dim // 2)]
        assert close(inverse_frequencies(rope), expected)
    assert gguf_rope({"dimension_count": 32}, arch="qwen2").rotary_dim == 32


@pytest.mark.parametrize("rotary_dim", [8, 6, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotation_is_multiplication_by_unit_complex_numbers(dtype: torch.dtype, rotary_dim: int):
    embedding = RotaryEmbedding(RopeConfig(100.0, rotary_dim), torch.device("cpu"))
    positions = torch.tensor([0, 1, 7, 1000])
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = x.clone()
    rotated = rotate(x, *embedding.cos_sin(positions))
    assert rotated.dtype == dtype and rotated.is_contiguous() and torch.equal(x, before)
    assert torch.equal(rotated[..., rotary_dim:], x[..., rotary_dim:])
    half = rotary_dim // 2
    for row, position in enumerate(positions.tolist()):
        for head in range(3):
            for pair in range(half):
                turn = cmath.exp(1j * position * 100.0 ** (-2 * pair / rotary_dim))
                expected = complex(x[row, head, pair], x[row, head, pair + half]) * turn
                got = complex(rotated[row, head, pair], rotated[row, head, pair + half])
                assert abs(got - expected) < {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


def test_angles_are_exact_far_out():
    """At position 1,000,000 an fp32 angle is wrong by 0.03; a double one is not."""
    config = RopeConfig(10_000.0, 128)
    positions = torch.tensor([1_000_003])
    cos, sin = RotaryEmbedding(config, torch.device("cpu")).cos_sin(positions)
    assert cos.shape == sin.shape == (1, 1, 128) and cos.dtype == sin.dtype == torch.float32
    for pair in range(64):
        angle = 1_000_003 * 10_000.0 ** (-2 * pair / 128)
        assert abs(cos[0, 0, pair].item() - math.cos(angle)) < 1e-7
        assert abs(sin[0, 0, pair + 64].item() - math.sin(angle)) < 1e-7
        assert cos[0, 0, pair + 64] == cos[0, 0, pair] and sin[0, 0, pair] == -sin[0, 0, pair + 64]


def test_scores_depend_on_the_distance_alone():
    embedding = RotaryEmbedding(RopeConfig(10_000.0, 64), torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(3))
    scores = []
    for start in (0, 5, 5000):
        cos, sin = embedding.cos_sin(torch.tensor([start + 17, start]))
        scores.append((rotate(q, cos[:1], sin[:1]) * rotate(k, cos[1:], sin[1:])).sum().item())
    assert max(scores) - min(scores) < 1e-4


def test_scaling_multiplies_cosine_and_sine():
    config = RopeConfig(10_000.0, 64, kind="yarn", factor=4.0, original_context=1024)
    cos, sin = RotaryEmbedding(config, torch.device("cpu")).cos_sin(torch.tensor([0]))
    assert torch.all(cos == torch.tensor(0.1 * math.log(4) + 1)) and torch.all(sin == 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rotary_dim": 7},
        {"rotary_dim": 0},
        {"theta": 0.0},
        {"theta": math.nan},
        {"factor": 0.0},
        {"kind": "yarn"},
        {"kind": "dynamic"},
        {"kind": "llama3", "original_context": 8, "low_freq_factor": 4.0},
        {"kind": "longrope", "original_context": 8, "max_context": 8},
        {"divisors": (1.0, 0.0, 1.0, 1.0)},
        {"kind": "other"},
    ],
)
def test_impossible_parameters_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ValueError):
        RopeConfig(**{"theta": 10_000.0, "rotary_dim": 8, **wrong})


def test_tables_and_configs_need_no_torch():
    code = (
        "import sys, kvine.rope_scaling, kvine.models.config, kvine.models.config_hf, kvine.models.config_gguf, "
        "kvine.models.names; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
