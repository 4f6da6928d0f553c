import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import gguf.quants
import gguf_bytes as gb
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvine.errors import ModelLoadError
from kvine.formats.gguf import GGUFFile
from kvine.formats.quants import BLOCK_TYPES


def write(path: Path, content: gb.File | bytes) -> Path:
    path.write_bytes(bytes(content))
    return path


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@pytest.fixture
def small(tmp_path: Path) -> GGUFFile:
    return GGUFFile(write(tmp_path / "small.gguf", gb.small_model()))


def test_metadata_of_every_kind(small: GGUFFile):
    found = dict(small.metadata)
    assert found["general.architecture"] == "llama"
    assert found["llama.block_count"] == 2
    assert found["llama.context_length"] == 2048
    assert found["llama.rope.freq_base"] == 10000.0
    assert found["llama.attention.layer_norm_rms_epsilon"] == 1e-5
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert found["tokenizer.ggml.tokens"] == ["<s>", "hé", "", "▁a", "文"]
    assert found["tokenizer.ggml.scores"].dtype == np.float32
    assert found["tokenizer.ggml.scores"].tolist() == [0.0, -1.5, 2.0, 0.25, -3.0]
    assert found["layer.kinds"].tolist() == [True, False, True]
    assert found["small.numbers"].tolist() == [-1, 0, 1]
    assert type(found["llama.block_count"]) is int
    assert type(found["llama.rope.freq_base"]) is float


def test_tensor_infos_are_in_torch_order_with_absolute_offsets(small: GGUFFile):
    raw = small.path.read_bytes()
    info = small.tensors["blk.0.attn_q.weight"]
    assert (info.shape, info.type, info.nbytes) == ((2, 64), "Q4_0", 72)
    assert raw[info.offset : info.offset + info.nbytes] == bytes(range(72))
    assert list(small.tensors) == [tensor.name for tensor in gb.small_model().tensors]


def test_plain_types_read_exactly(small: GGUFFile):
    expected = torch.tensor([i / 7 for i in range(128)], dtype=torch.float32).view(4, 32)
    assert torch.equal(small.read("token_embd.weight", torch.float32), expected)
    assert small.read("norm.weight", torch.float32).tolist() == [1.0, -2.0, 0.5, 65504.0, 0.0]
    half = small.read("half.weight", torch.bfloat16)
    assert half.shape == (2, 3)
    assert bits(half).flatten().tolist() == [0x3F80 + i for i in range(6)]


def test_stored_dtype_shares_pages_and_a_write_never_reaches_the_file(small: GGUFFile):
    before = small.path.read_bytes()
    first, second = (small.read("token_embd.weight", torch.float32) for _ in range(2))
    assert first.data_ptr() == second.data_ptr()
    first.zero_()
    assert small.path.read_bytes() == before
    assert torch.equal(GGUFFile(small.path).read("token_embd.weight", torch.float32)[0, 1:2], torch.tensor([1 / 7]))


def test_unreadable_type_is_listed_and_refused_by_name_when_read(small: GGUFFile):
    assert small.tensors["other.weight"].type == "Q2_K"
    with pytest.raises(ModelLoadError, match=r"other\.weight is stored as Q2_K.*Q4_1"):
        small.read("other.weight", torch.float32)


def test_a_read_only_file_opens(tmp_path: Path):
    path = write(tmp_path / "m.gguf", gb.small_model())
    path.chmod(0o444)
    assert GGUFFile(path).read("norm.weight", torch.float16).shape == (5,)


def test_header_digest_depends_on_the_header_alone(tmp_path: Path):
    digests = []
    for change in (lambda f: None, lambda f: f.metadata.append(("x", gb.value(gb.U8, 1)))):
        model = gb.small_model()
        change(model)
        digests.append(GGUFFile(write(tmp_path / "m.gguf", model)).header_digest())
    model = gb.small_model()
    model.tensors[0].data = bytes(512)
    assert GGUFFile(write(tmp_path / "w.gguf", model)).header_digest() == digests[0] != digests[1]
    assert len(digests[0]) == 32


def test_agrees_with_the_gguf_packages_writer(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama")
    writer.add_token_list(["a", "b"])
    writer.add_array("per.layer", [1, 2, 3])
    weight = np.random.default_rng(0).standard_normal((6, 64), dtype=np.float32)
    writer.add_tensor("w", gguf.quants.quantize(weight, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("v", weight[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = GGUFFile(tmp_path / "w.gguf")
    assert ours.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    assert ours.metadata["per.layer"].tolist() == [1, 2, 3]
    assert torch.equal(ours.read("v", torch.float32), torch.from_numpy(weight[0]))
    assert (ours.read("w", torch.float32) - torch.from_numpy(weight)).abs().max() < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("type_name", sorted(BLOCK_TYPES))
def test_blocks_decode_bit_equal_to_the_gguf_package(tmp_path: Path, type_name: str, dtype: torch.dtype):
    """Random bytes, infinities and NaNs among the scales, in rows that fill no whole number of pieces."""
    kind = GGMLQuantizationType[type_name]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rows, row_blocks = 263, 768 // block
    raw = np.random.default_rng(7).integers(0, 256, (rows, row_blocks * block_bytes), dtype=np.uint8)
    model = gb.File(tensors=[gb.Tensor("w", (row_blocks * block, rows), kind.value, raw.tobytes())])
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(raw, kind)).to(dtype)
    found = GGUFFile(write(tmp_path / "m.gguf", model)).read("w", dtype)
    assert found.shape == (rows, 768)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(bits(found)[~found.isnan()], bits(expected)[~expected.isnan()])


def test_version_2_reads_and_the_others_are_refused(tmp_path: Path):
    model = gb.small_model()
    model.version = 2
    assert len(GGUFFile(write(tmp_path / "v2.gguf", model)).tensors) == 6
    for version, message in ((1, "version 1"), (4, "version 4"), (0, "version 0"), (3 << 24, "big-endian")):
        model.version = version
        with pytest.raises(ModelLoadError, match=message):
            GGUFFile(write(tmp_path / "v.gguf", model))


def test_what_is_no_gguf_file_is_said(tmp_path: Path):
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        GGUFFile(write(tmp_path / "x.gguf", b"PK\x03\x04" * 20))
    with pytest.raises(ModelLoadError, match="No such file"):
        GGUFFile(tmp_path / "absent.gguf")
    with pytest.raises(ModelLoadError, match="not a file"):
        GGUFFile(tmp_path)


def test_one_part_of_a_split_model_is_refused(tmp_path: Path):
    model = gb.small_model()
    model.metadata.append(("split.count", gb.value(gb.U16, 3)))
    with pytest.raises(ModelLoadError, match="split into 3 files"):
        GGUFFile(write(tmp_path / "m.gguf", model))


def test_e07_truncated_or_lengthened(tmp_path: Path):
    model = gb.small_model()
    whole, header = bytes(model), len(model.header())
    middle = GGUFFile(write(tmp_path / "m.gguf", whole)).tensors["blk.0.attn_q.weight"].offset + 10
    last = max(info.offset + info.nbytes for info in GGUFFile(tmp_path / "m.gguf").tensors.values())
    for size in (0, 4, 8, header // 2, header, middle, last - 1):
        with pytest.raises(ModelLoadError, match=re.escape(str(tmp_path / "m.gguf"))) as caught:
            GGUFFile(write(tmp_path / "m.gguf", whole[:size]))
        if size >= header:
            assert "tensor " in str(caught.value)
    with pytest.raises(ModelLoadError, match=r"bytes follow the last tensor, other\.weight"):
        GGUFFile(write(tmp_path / "m.gguf", whole + bytes(33)))
    assert len(GGUFFile(write(tmp_path / "m.gguf", whole[:last])).tensors) == 6  # the last padding may be left out


def changed_tensor(index: int, **changes: object):
    def change(model: gb.File) -> None:
        for field, value in changes.items():
            setattr(model.tensors[index], field, value)

    return change


def added_key(key: str, content: bytes):
    return lambda model: model.metadata.append((key, content))


def replaced_key(key: str, content: bytes):
    def change(model: gb.File) -> None:
        model.metadata = [(name, content if name == key else old) for name, old in model.metadata]

    return change


def set_field(**changes: object):
    def change(model: gb.File) -> None:
        for field, value in changes.items():
            setattr(model, field, value)

    return change


E08 = {
    "n_dims a million": (changed_tensor(1, num_dims=10**6), "blk.0.attn_q.weight has 1000000 dimensions"),
    "n_dims zero": (changed_tensor(1, dims=()), "blk.0.attn_q.weight has 0 dimensions"),
    "dim zero": (changed_tensor(1, dims=(64, 0)), "blk.0.attn_q.weight has a dimension of 0"),
    "dims wrap to 0": (changed_tensor(0, dims=(2**32, 2**32)), "token_embd.weight ends at byte"),
    "dims wrap to a small number": (changed_tensor(0, dims=(2**63 + 32, 2, 2)), "token_embd.weight ends at byte"),
    "bytes wrap": (changed_tensor(0, dims=(2**62 + 32,)), "token_embd.weight ends at byte"),
    "row not a multiple of the block": (changed_tensor(1, dims=(48, 2)), "no multiple of Q4_0's block of 32"),
    "unknown tensor type": (changed_tensor(1, type=999), "blk.0.attn_q.weight has the unknown type 999"),
    "removed tensor type": (changed_tensor(1, type=4), "blk.0.attn_q.weight has the unknown type 4"),
    "nameless tensor": (changed_tensor(1, name=""), "tensor 1 has no name"),
    "tensor twice": (changed_tensor(2, name="blk.0.attn_q.weight"), "blk.0.attn_q.weight is given twice"),
    "offset past the end": (changed_tensor(1, offset=2**40), "blk.0.attn_q.weight is said to start"),
    "offset wraps": (changed_tensor(1, offset=2**64 - 32), "blk.0.attn_q.weight is said to start"),
    "offset overlaps": (changed_tensor(1, offset=480), "blk.0.attn_q.weight is said to start"),
    "offset descends": (changed_tensor(2, offset=0), "blk.0.attn_k.weight is said to start"),
    "offset unaligned": (changed_tensor(1, offset=516), "blk.0.attn_q.weight is said to start"),
    "tensors without end": (set_field(num_tensors=2**63), "number of tensors is 9223372036854775808"),
    "more tensors than there are": (set_field(num_tensors=7), "tensor 6"),
    "keys without end": (set_field(num_keys=2**64 - 1), "number of metadata keys"),
    "empty key": (added_key("", gb.value(gb.U8, 1)), "metadata key 13 is empty"),
    "key twice": (added_key("llama.block_count", gb.value(gb.U32, 3)), "'llama.block_count' is given twice"),
    "key not UTF-8": (lambda m: m.metadata.append((b"\xff\xfe", gb.value(gb.U8, 1))), "key 13 is not valid UTF-8"),
    "unknown value type": (added_key("k", struct.pack("<I", 13)), "'k' has the unknown value type 13"),
    "unknown element type": (added_key("k", struct.pack("<IIQ", gb.ARRAY, 77, 2)), "'k' has the unknown value type 77"),
    "array of arrays": (added_key("k", struct.pack("<IIQ", gb.ARRAY, gb.ARRAY, 1)), "'k' is an array of arrays"),
    "array without end": (added_key("k", gb.array(gb.U8, [1], length=2**62)), "'k' is 4611686018427387904, more than"),
    "array bytes wrap": (added_key("k", gb.array(gb.U64, [1], length=2**61)), "'k' is 2305843009213693952, more than"),
    "strings without end": (added_key("k", gb.array(gb.STRING, ["a"], length=2**61)), "more than the file can hold"),
    "string length huge": (added_key("k", struct.pack("<I", gb.STRING) + gb.string("a", 2**63)), "'k' needs 92233720"),
    "string in array huge": (
        added_key("k", struct.pack("<IIQ", gb.ARRAY, gb.STRING, 1) + gb.string("a", 2**62)),
        "'k': string 0 of 1 runs past",
    ),
    "string in array not UTF-8": (added_key("k", gb.array(gb.STRING, [b"a", b"\xff"])), "'k': string 1 is not valid"),
    "boolean neither 0 nor 1": (added_key("k", struct.pack("<IB", gb.BOOL, 2)), "'k' holds a boolean"),
    "alignment 0": (replaced_key("general.alignment", gb.value(gb.U32, 0)), "general.alignment is 0"),
    "alignment 48": (replaced_key("general.alignment", gb.value(gb.U32, 48)), "general.alignment is 48"),
    "alignment 4": (replaced_key("general.alignment", gb.value(gb.U32, 4)), "general.alignment is 4"),
    "alignment negative": (replaced_key("general.alignment", gb.value(gb.I32, -32)), "general.alignment is -32"),
    "alignment a float": (replaced_key("general.alignment", gb.value(gb.F32, 32.0)), "is not an integer"),
    "scores narrower": (
        replaced_key("tokenizer.ggml.scores", gb.array(gb.U8, [0] * 5)),
        "'tokenizer.ggml.scores' is not an array of 32-bit floats",
    ),
    "token types narrower": (
        replaced_key("tokenizer.ggml.token_type", gb.array(gb.I8, [0] * 5)),
        "'tokenizer.ggml.token_type' is not an array of 32-bit integers",
    ),
    "tokens not strings": (
        replaced_key("tokenizer.ggml.tokens", gb.array(gb.U32, [0] * 5)),
        "'tokenizer.ggml.tokens' is not an array of strings",
    ),
    "architecture a number": (replaced_key("general.architecture", gb.value(gb.U32, 1)), "is not a string"),
}


@pytest.mark.parametrize("case", E08)
def test_e08_crafted(tmp_path: Path, case: str):
    change, message = E08[case]
    model = gb.small_model()
    change(model)
    with pytest.raises(ModelLoadError, match=re.escape(message)) as caught:
        GGUFFile(write(tmp_path / "crafted.gguf", model))
    assert str(tmp_path / "crafted.gguf") in str(caught.value)


_FUZZ = """
import random, resource, sys, time
from pathlib import Path
import torch
from kvine.errors import ModelLoadError
from kvine.formats.gguf import GGUFFile

path = Path(sys.argv[1])
whole = path.read_bytes()
def attempt():
    file = GGUFFile(path)
    file.header_digest()
    for name in file.tensors:
        try:
            file.read(name, torch.bfloat16)
        except ModelLoadError:
            pass
attempt()
used = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + 256 * 2**20,) * 2)
random.seed(8)
refused, start = 0, time.process_time()
for _ in range(2000):
    damaged = bytearray(whole)
    for _ in range(random.choice((1, 1, 2, 8))):
        damaged[random.randrange(len(whole))] = random.randrange(256)
    path.write_bytes(damaged)
    try:
        attempt()
    except ModelLoadError:
        refused += 1
print(refused, time.process_time() - start)
"""


def test_e08_two_thousand_byte_flips_under_a_memory_limit(tmp_path: Path):
    """Any error but ModelLoadError ends the child: MemoryError, a shape that numpy refuses, a hang.

    The 2,000 take about 3 s of processor time.
    """
    path = write(tmp_path / "fuzz.gguf", gb.small_model())
    assert 1800 < path.stat().st_size < 3000
    done = subprocess.run([sys.executable, "-c", _FUZZ, str(path)], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, seconds = done.stdout.split()
    assert 500 < int(refused) < 2000
    assert float(seconds) < 15


def test_e08_a_large_vocabulary_opens_quickly(tmp_path: Path):
    """262,144 tokens, the size of Gemma's; half a second on a quiet machine, asserted with room for a busy one."""
    tokens = [f"▁token{i}" for i in range(262_144)]
    metadata = [
        ("tokenizer.ggml.tokens", gb.array(gb.STRING, tokens)),
        ("tokenizer.ggml.scores", gb.array(gb.F32, [-float(i) for i in range(len(tokens))])),
    ]
    path = write(tmp_path / "vocabulary.gguf", gb.File(metadata=metadata))
    start = time.process_time()
    found = GGUFFile(path)
    assert time.process_time() - start < 1.5
    assert found.metadata["tokenizer.ggml.tokens"] == tokens
    assert found.metadata["tokenizer.ggml.scores"][-1] == -262_143
