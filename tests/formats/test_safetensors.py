import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvine.errors import ModelLoadError
from kvine.formats.safetensors import SafetensorsFiles

TENSORS = {
    "model.a": torch.arange(12, dtype=torch.float32).view(3, 4) / 7,
    "model.b": torch.linspace(-3, 3, 10).to(torch.bfloat16),
    "model.c": torch.tensor([[1.5, -2.0]], dtype=torch.float16),
    "model.ids": torch.arange(3),
    "model.none": torch.zeros(0, 4),
}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def entry(dtype: str, shape: list[Any], *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def write(path: Path, header: Any, nbytes: int, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(nbytes))
    return path


def write_shards(folder: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, Any]) -> Path:
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("from_folder", [True, False])
def test_reads_what_was_saved(whole: Path, from_folder: bool):
    files = SafetensorsFiles(whole.parent if from_folder else whole)
    assert set(files.tensors) == set(TENSORS)
    assert files.mapped
    for name in ("model.a", "model.b", "model.c", "model.none"):
        info = files.tensors[name]
        assert info.shape == tuple(TENSORS[name].shape)
        assert info.path == whole
        assert torch.equal(files.read(name, TENSORS[name].dtype), TENSORS[name])
        assert torch.equal(files.read(name, torch.float64), TENSORS[name].double())
        raw = TENSORS[name].contiguous().flatten().view(torch.uint8).numpy().tobytes()
        assert whole.read_bytes()[info.offset : info.offset + info.nbytes] == raw


def test_stored_dtype_is_mapped_and_a_write_never_reaches_the_file(whole: Path):
    files = SafetensorsFiles(whole)
    before = whole.read_bytes()
    first, second = files.read("model.a", torch.float32), files.read("model.a", torch.float32)
    assert first.data_ptr() == second.data_ptr()
    assert files.read("model.a", torch.bfloat16).data_ptr() != first.data_ptr()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(whole))]
    spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in mapped]
    assert any(start <= first.data_ptr() < end for start, end in spans)
    first.zero_()
    assert whole.read_bytes() == before


def test_data_that_lies_askew_is_copied_and_said(tmp_path: Path):
    header = json.dumps({"w": entry("F32", [2], 0, 8)}).encode()
    header += b" " * (-len(header) % 8 + 1)
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1.25, -8.0))
    files = SafetensorsFiles(path)
    assert not files.mapped
    tensor = files.read("w", torch.float32)
    assert tensor.tolist() == [1.25, -8.0]
    assert tensor.data_ptr() % 4 == 0


def test_types_that_are_not_plain_weights_are_refused_by_name(whole: Path, tmp_path: Path):
    with pytest.raises(ModelLoadError, match=r"model\.ids is stored as I64"):
        SafetensorsFiles(whole).read("model.ids", torch.float32)
    save_file({"w": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / "eight.safetensors")
    with pytest.raises(ModelLoadError, match="w is stored as F8_E4M3"):
        SafetensorsFiles(tmp_path / "eight.safetensors").read("w", torch.bfloat16)


def test_sharded(tmp_path: Path):
    shards = {
        "model-00001-of-00002.safetensors": {"a": torch.ones(2), "b": torch.zeros(3)},
        "model-00002-of-00002.safetensors": {"c": torch.full((4,), 2.0)},
    }
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    files = SafetensorsFiles(write_shards(tmp_path, shards, weight_map))
    assert {name: files.read(name, torch.float32).tolist() for name in files.tensors} == {
        "a": [1.0, 1.0],
        "b": [0.0] * 3,
        "c": [2.0] * 4,
    }
    assert files.tensors["c"].path == tmp_path / "model-00002-of-00002.safetensors"


def test_header_digest_depends_on_the_headers_alone(tmp_path: Path):
    def digest(name: str, value: float, shape: tuple[int, ...] = (2,)) -> bytes:
        save_file({name: torch.full(shape, value)}, tmp_path / "model.safetensors")
        return SafetensorsFiles(tmp_path).header_digest()

    assert digest("w", 1.0) == digest("w", 2.0)
    assert len({digest("w", 1.0), digest("v", 1.0), digest("w", 1.0, (1, 2))}) == 3


def test_a_folder_without_weights_says_what_is_missing(tmp_path: Path):
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        SafetensorsFiles(tmp_path)
    with pytest.raises(ModelLoadError, match="No such file"):
        SafetensorsFiles(tmp_path / "absent.safetensors")


def test_e07_truncated_or_lengthened(whole: Path):
    content = whole.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    middle = SafetensorsFiles(whole).tensors["model.a"].offset + 5
    for damaged in [content[:size] for size in (0, 4, 8, header // 2, header, middle, len(content) - 1)] + [
        content + b"\0",
        content + bytes(4096),
    ]:
        whole.write_bytes(damaged)
        with pytest.raises(ModelLoadError, match=re.escape(str(whole))) as caught:
            SafetensorsFiles(whole)
        if len(damaged) >= header:
            assert "model." in str(caught.value)


E07 = {
    "overlap": ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, 12, "tensor b: its data starts at"),
    "hole": ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 12, 20)}, 20, "tensor b: its data starts at"),
    "descending": ({"a": entry("F32", [2], 8, 0)}, 8, "tensor a takes 8 bytes, but its data_offsets are 8 and 0"),
    "negative": ({"a": entry("F32", [2], -8, 0)}, 8, "tensor a takes 8 bytes"),
    "shape disagrees": ({"a": entry("F32", [3], 0, 8)}, 8, "tensor a takes 12 bytes"),
    "shape wraps": ({"a": entry("U8", [2**32, 2**32], 0, 0)}, 0, "tensor a takes 18446744073709551616 bytes"),
    "shape beyond int64": ({"a": entry("F32", [2**64], 0, 8)}, 8, "tensor a has an impossible shape"),
    "shape negative": ({"a": entry("F32", [-1, -2], 0, 8)}, 8, "tensor a has an impossible shape"),
    "shape of fractions": ({"a": entry("F32", [2.0], 0, 8)}, 8, "tensor a has an impossible shape"),
    "shape of a million dims": ({"a": entry("F32", [1] * 10**6, 0, 4)}, 4, "tensor a has an impossible shape"),
    "past the end": ({"a": entry("F32", [2**40], 0, 2**42)}, 8, "the last is a"),
    "unknown dtype": ({"a": entry("Q4", [2], 0, 8)}, 8, "tensor a has the unknown dtype Q4"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, 8, "tensor a is described without"),
    "not an object": ([], 0, "not a JSON object"),
    "not JSON": (b"{nonsense", 0, "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', 0, "not valid JSON"),
    "nested without end": (b'{"a":' + b"[" * 100_000, 0, "not valid JSON"),
    "tensor twice": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        4,
        "a is given twice",
    ),
}


@pytest.mark.parametrize("case", E07)
def test_e07_crafted_header(tmp_path: Path, case: str):
    header, nbytes, message = E07[case]
    path = write(tmp_path / "model.safetensors", header, nbytes)
    with pytest.raises(ModelLoadError, match=re.escape(message)) as caught:
        SafetensorsFiles(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40, 200])
def test_e07_header_length_beyond_the_file(tmp_path: Path, length: int):
    path = write(tmp_path / "model.safetensors", {"a": entry("F32", [2], 0, 8)}, 8, length=length)
    with pytest.raises(ModelLoadError, match=f"header is said to take {length} bytes"):
        SafetensorsFiles(path)


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_e07_a_shard_is_missing(tmp_path: Path):
    folder = write_shards(tmp_path, {ONE: {"a": torch.ones(2)}}, {"a": ONE, "b": TWO})
    with pytest.raises(ModelLoadError, match=rf"{TWO}, which holds tensor b, is missing"):
        SafetensorsFiles(folder)


def test_e07_a_shard_lacks_a_tensor_of_the_index(tmp_path: Path):
    shards = {ONE: {"a": torch.ones(2)}, TWO: {"b": torch.ones(2)}}
    folder = write_shards(tmp_path, shards, {"a": ONE, "b": TWO, "c": TWO})
    with pytest.raises(ModelLoadError, match=rf"{TWO}: it lacks tensor c"):
        SafetensorsFiles(folder)
    write_shards(tmp_path, shards, {"a": TWO, "b": ONE})
    with pytest.raises(ModelLoadError, match="it lacks tensor"):
        SafetensorsFiles(folder)


def test_e07_two_shards_hold_the_same_tensor(tmp_path: Path):
    folder = write_shards(tmp_path, {ONE: {"a": torch.ones(2)}, TWO: {"a": torch.ones(2)}}, {"a": ONE, "b": TWO})
    with pytest.raises(ModelLoadError, match=rf"{TWO}: tensor a is also in {ONE}"):
        SafetensorsFiles(folder)


def test_e07_one_shard_cut_short_is_found_before_anything_is_read(tmp_path: Path):
    folder = write_shards(tmp_path, {ONE: {"a": torch.ones(2)}, TWO: {"b": torch.ones(64)}}, {"a": ONE, "b": TWO})
    (folder / TWO).write_bytes((folder / TWO).read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=rf"{TWO}.*the last is b"):
        SafetensorsFiles(folder)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../secret.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
    ],
)
def test_e07_an_index_that_is_none(tmp_path: Path, index: str):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json"):
        SafetensorsFiles(tmp_path)
