"""Random checkpoints of any size: real shapes, dtypes and files without a download, to measure speed and memory on.

They say nothing of quality: their text is noise.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from kvine.errors import ConfigError
from kvine.models.config import ModelConfig
from kvine.models.config_hf import config_from_hf
from kvine.models.names import hf_names, required_shapes

Bits = npt.NDArray[np.uint16]

QWEN3_0_6B: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }
)
SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType({"qwen3-0.6b": QWEN3_0_6B})
_STANDARD_DEVIATION = 0.02
# So many normal numbers are made and written over and over, at the disk's speed. Their count is prime, so that no two
# rows of a matrix are alike.
_CYCLE = 4_194_301


def random_checkpoint(folder: Path, name: str, *, seed: int = 0) -> Path:
    """A random checkpoint in the shape of a known model, a key of `SHAPES`, in `folder`, which is returned."""
    if name not in SHAPES:
        raise ConfigError(f"There is no shape named {name!r}. Choose one of {', '.join(SHAPES)}.")
    return make_random_checkpoint(SHAPES[name], folder, seed)


def make_random_checkpoint(config: Mapping[str, Any], folder: Path, seed: int = 0) -> Path:
    """Write config.json, bf16 model.safetensors and tokenizer.json of a random model into `folder`, which is returned.

    `config` is the contents of a config.json of a supported architecture. Matrices are normal with deviation 0.02,
    biases 0, norms 1; the same seed gives the same bytes. The tokenizer has one token for each byte and ends of
    text as id 256. Raises ModelLoadError for a config that Kvine cannot run and ConfigError for a vocabulary
    under 256 or if `folder` already holds a checkpoint.
    """
    model = config_from_hf(config, "the given config")
    weights = folder / "model.safetensors"
    if weights.exists() or (folder / "config.json").exists():
        raise ConfigError(f"{folder} already holds a checkpoint. Choose an empty folder.")
    if model.vocab_size < 256:
        raise ConfigError(f"The byte-level tokenizer needs a vocabulary of at least 256, not {model.vocab_size}.")
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, model.vocab_size)
    _write_weights(weights, model, seed)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2))
    return folder


def _write_weights(path: Path, model: ModelConfig, seed: int) -> None:
    """Written as it is made, so that a model larger than memory is none the harder."""
    shapes = required_shapes(model)
    names = hf_names(model, ())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for role, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[names[role]] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    values = np.random.Generator(np.random.SFC64(seed)).standard_normal(_CYCLE, dtype=np.float32)
    cycle, position = _bf16(values * np.float32(_STANDARD_DEVIATION)), 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for role, shape in shapes.items():
            if len(shape) == 2:
                position = _write_cycle(file, cycle, position, int(np.prod(shape)))
            else:
                is_one = "norm." in role and not model.norm_offset
                file.write(_bf16(np.full(shape, float(is_one), np.float32)).data)


def _write_cycle(file: BinaryIO, cycle: Bits, position: int, count: int) -> int:
    """Write `count` values from `position` on, over and over; returns where the next tensor goes on."""
    while count:
        part = cycle[position : position + count]
        file.write(part.data)
        position, count = (position + len(part)) % len(cycle), count - len(part)
    return position


def _bf16(values: npt.NDArray[np.float32]) -> Bits:
    """The upper halves of fp32: rounded toward zero, which random numbers do not mind."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer: ids 0 to 255 are one byte each, 256 ends the text where the vocabulary has room."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if vocab_size > 256:
        tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
