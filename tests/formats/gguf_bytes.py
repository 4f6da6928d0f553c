"""GGUF files written byte by byte, so that tests can lie in any field. Independent of the gguf package's writer."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {
    U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"
}  # fmt: skip
GGML_F32, GGML_F16, GGML_Q4_0, GGML_Q4_1, GGML_Q2_K, GGML_BF16 = 0, 1, 2, 3, 10, 30


def string(text: str | bytes, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def scalar(kind: int, value: Any) -> bytes:
    return string(value) if kind == STRING else struct.pack("<" + _CODES[kind], value)


def value(kind: int, content: Any) -> bytes:
    return struct.pack("<I", kind) + scalar(kind, content)


def array(kind: int, items: Sequence[Any], length: int | None = None) -> bytes:
    head = struct.pack("<IIQ", ARRAY, kind, len(items) if length is None else length)
    return head + b"".join(scalar(kind, item) for item in items)


@dataclass
class Tensor:
    name: str
    dims: tuple[int, ...]  # ggml's order: row length first
    type: int
    data: bytes
    offset: int | None = None  # None: where ggml would put it
    num_dims: int | None = None


@dataclass
class File:
    metadata: list[tuple[str, bytes]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    version: int = 3
    num_tensors: int | None = None
    num_keys: int | None = None
    alignment: int = 32

    def header(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_keys = len(self.metadata) if self.num_keys is None else self.num_keys
        out = b"GGUF" + struct.pack("<IQQ", self.version, num_tensors, num_keys)
        out += b"".join(string(key) + content for key, content in self.metadata)
        offset = 0
        for tensor in self.tensors:
            num_dims = len(tensor.dims) if tensor.num_dims is None else tensor.num_dims
            out += (
                string(tensor.name) + struct.pack("<I", num_dims) + struct.pack(f"<{len(tensor.dims)}Q", *tensor.dims)
            )
            out += struct.pack("<IQ", tensor.type, offset if tensor.offset is None else tensor.offset)
            offset += len(self._padded(tensor.data))
        return out

    def __bytes__(self) -> bytes:
        return self._padded(self.header()) + b"".join(self._padded(tensor.data) for tensor in self.tensors)

    def _padded(self, raw: bytes) -> bytes:
        return raw + bytes(-len(raw) % self.alignment)


def small_model() -> File:
    """About 2 KB: every kind of metadata, and tensors plain and in blocks."""
    return File(
        metadata=[
            ("general.architecture", value(STRING, "llama")),
            ("general.alignment", value(U32, 32)),
            ("llama.block_count", value(U32, 2)),
            ("llama.context_length", value(U64, 2048)),
            ("llama.rope.freq_base", value(F32, 10000.0)),
            ("llama.attention.layer_norm_rms_epsilon", value(F64, 1e-5)),
            ("tokenizer.ggml.add_bos_token", value(BOOL, True)),
            ("tokenizer.ggml.tokens", array(STRING, ["<s>", "hé", "", "▁a", "文"])),
            ("tokenizer.ggml.scores", array(F32, [0.0, -1.5, 2.0, 0.25, -3.0])),
            ("tokenizer.ggml.token_type", array(I32, [3, 1, 1, 1, 1])),
            ("tokenizer.ggml.merges", array(STRING, ["h é", "▁ a"])),
            ("layer.kinds", array(BOOL, [True, False, True])),
            ("small.numbers", array(I8, [-1, 0, 1])),
        ],
        tensors=[
            Tensor("token_embd.weight", (32, 4), GGML_F32, struct.pack("<128f", *[i / 7 for i in range(128)])),
            Tensor("blk.0.attn_q.weight", (64, 2), GGML_Q4_0, bytes(range(72))),
            Tensor("blk.0.attn_k.weight", (32, 3), GGML_Q4_1, bytes(range(60))),
            Tensor("norm.weight", (5,), GGML_F16, struct.pack("<5e", 1.0, -2.0, 0.5, 65504.0, 0.0)),
            Tensor("half.weight", (3, 2), GGML_BF16, struct.pack("<6H", *[0x3F80 + i for i in range(6)])),
            Tensor("other.weight", (256, 2), GGML_Q2_K, bytes(168)),
        ],
    )
