"""The memory of a group: what is written is read back as its codec keeps it, and memory that is free goes back."""

import sys

import psutil
import pytest
import torch

from kvine.cache.blocks import BlockPool
from kvine.cache.codec import encode, storage_dtype
from kvine.cache.manager import BlockCopy
from kvine.cache.pool import KVPool
from kvine.cache.spec import CacheSpec
from kvine.errors import ConfigError

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CODECS = ("exact", *DTYPES)


def pool_of(
    key: str = "exact", value: str = "exact", *, compute: str = "fp32", blocks: int = 7, native: bool = False
) -> KVPool:
    spec = CacheSpec((3, 5), num_kv_heads=3, head_dim=8, block_size=4, key_codec=key, value_codec=value)
    return KVPool(spec, blocks, DTYPES[compute], CPU, native=native)


def kept(values: torch.Tensor, codec: str) -> torch.Tensor:
    """What a codec should keep of values, worked out in float64."""
    if codec == "exact" or DTYPES[codec] == values.dtype:
        return values
    exact = values.double()
    if codec == "fp16":
        exact = exact.clamp(-65504.0, 65504.0)
    return exact.to(DTYPES[codec])


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("value", CODECS)
@pytest.mark.parametrize("key", CODECS)
def test_a14_what_is_written_is_read_back_by_value(key: str, value: str, compute: str, native: bool) -> None:
    torch.manual_seed(0)
    pool = pool_of(key, value, compute=compute, native=native)
    table = [5, 0, 6, 2]  # a sequence's blocks lie anywhere
    tokens = 14
    slots = torch.tensor([table[p // 4] * 4 + p % 4 for p in range(tokens)])
    rows = pool.row_index(slots)
    written = []
    for layer in range(2):
        k, v = (torch.randn(tokens, 3, 8).mul(50).to(DTYPES[compute]) for _ in range(2))
        pool.write(layer, rows, k, v)
        written.append((k, v))
    for layer, (k, v) in enumerate(written):
        got_k, got_v = pool.read(layer, table, tokens)
        assert got_k.shape == got_v.shape == (1, 3, tokens, 8)
        assert torch.equal(got_k[0].transpose(0, 1), kept(k, key))
        assert torch.equal(got_v[0].transpose(0, 1), kept(v, value))
        # Slot by slot: position p lies in block table[p // 4] at p % 4, head by head.
        for p in range(tokens):
            assert torch.equal(pool.layers[layer].k[table[p // 4], :, p % 4], kept(k, key)[p])
    assert pool.k.dtype == storage_dtype(key, DTYPES[compute])
    assert pool.v.dtype == storage_dtype(value, DTYPES[compute])
    for untouched in (1, 3, 4):
        assert not pool.k[:, untouched].any() and not pool.v[:, untouched].any()


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a14_fp16_keeps_what_is_too_large_as_its_largest_value(compute: torch.dtype) -> None:
    values = torch.tensor([1e6, -1e6, 3e38, 65504.0, 65280.0, 0.5, -0.0, float("inf")], dtype=compute)
    limit = 65504.0
    assert encode(values, torch.float16).tolist() == [limit, -limit, limit, limit, 65280.0, 0.5, 0.0, limit]
    assert values[0] > 9e5, "the caller's values are left alone"


def test_a14_the_torch_default_dtype_changes_nothing() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        pool = pool_of(compute="bf16")
        assert pool.k.dtype == torch.bfloat16
        assert pool.row_index(torch.tensor([0, 5])).dtype == torch.int64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_the_pool_takes_the_bytes_that_the_spec_names(codec: str, compute: str) -> None:
    pool = pool_of(codec, "exact", compute=compute)
    assert pool.k.nbytes + pool.v.nbytes == 7 * pool.spec.bytes_per_block(compute)


def test_a18_memory_is_laid_out_for_kv_heads() -> None:
    pool = pool_of()
    assert pool.k.shape == pool.v.shape == (2, 7, 3, 4, 8)
    assert pool.layers[1].k.data_ptr() == pool.k[1].data_ptr()


def test_copies_take_the_first_tokens_of_a_block_in_every_layer_and_in_order() -> None:
    pool = pool_of()
    pool.k.copy_(torch.randn(pool.k.shape))
    pool.v.copy_(torch.randn(pool.v.shape))
    k, v = pool.k.clone(), pool.v.clone()
    pool.copy([BlockCopy(0, 1, 4, 3), BlockCopy(0, 4, 2, 2)])
    for now, before in ((pool.k, k), (pool.v, v)):
        assert torch.equal(now[:, 4, :, :3], before[:, 1, :, :3])
        assert torch.equal(now[:, 4, :, 3:], before[:, 4, :, 3:])
        assert torch.equal(now[:, 2, :, :2], before[:, 1, :, :2])
        assert torch.equal(now[:, 2, :, 2:], before[:, 2, :, 2:])
        for untouched in (0, 1, 3, 5, 6):
            assert torch.equal(now[:, untouched], before[:, untouched])


def test_a_pool_without_blocks_is_empty() -> None:
    assert pool_of(blocks=0).k.numel() == 0


# -- memory -----------------------------------------------------------------------------------------------------------

MIB = 1 << 20


def large_pool(blocks: int) -> KVPool:
    """A block of one layer is 256 KiB in K, and as much in V: 1 MiB in all."""
    return KVPool(CacheSpec((0, 1), num_kv_heads=8, head_dim=256, block_size=32), blocks, torch.float32, CPU)


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_memory_is_committed_by_use_and_given_back() -> None:
    before = resident()
    pool = large_pool(256)
    assert resident() - before < 16 * MIB, "only address space is reserved"
    for block in range(128):
        pool.k[:, block] = block + 1
        pool.v[:, block] = -block - 1
    used = resident()
    assert used - before > 100 * MIB
    pool.give_back(range(32, 128))
    if sys.platform == "linux":  # elsewhere nothing is asked of the system
        assert used - resident() > 80 * MIB
        assert not pool.k[:, 32:128].any(), "the system has really taken the pages: new ones are zero"
    for block in range(32):  # the others' contents are untouched
        assert (pool.k[:, block] == block + 1).all() and (pool.v[:, block] == -block - 1).all()


def test_giving_back_small_blocks_leaves_their_neighbours_alone() -> None:
    """A page may be shared with a neighbour: only whole pages inside the freed block may go."""
    for dim in (8, 40, 96, 200):  # blocks of 384 to 9,600 bytes a layer
        spec = CacheSpec((0, 1), num_kv_heads=3, head_dim=dim, block_size=4)
        pool = KVPool(spec, 50, torch.float32, CPU)
        pool.k.fill_(1.0)
        pool.v.fill_(2.0)
        pool.give_back(range(1, 50, 2))
        assert (pool.k[:, ::2] == 1.0).all() and (pool.v[:, ::2] == 2.0).all()


# -- the pool of ids --------------------------------------------------------------------------------------------------


def test_low_ids_are_taken_first() -> None:
    pool = BlockPool(4, bytes_per_block=10)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    pool.release(2, now=1)
    pool.release(0, now=2)
    assert [pool.take() for _ in range(3)] == [0, 2, 3]
    assert pool.num_free == 0 and pool.bytes_used == 40
    pool.check()


def test_a_block_is_free_only_after_its_last_reference() -> None:
    pool = BlockPool(2, bytes_per_block=10)
    block = pool.take()
    pool.acquire(block)
    assert not pool.writable(block)
    pool.release(block, now=1)
    assert pool.writable(block) and pool.num_free == 1
    pool.release(block, now=2)
    assert pool.num_free == 2 and pool.freed == {block}
    pool.check()


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._returned.append(0),  # free and referenced at once
        lambda pool: pool.references.pop(0),  # lost
        lambda pool: pool.references.update({0: 0}),
        lambda pool: pool.cached.update({0: 1}),
        lambda pool: pool.freed.add(0),
    ],
)
def test_check_finds_a_damaged_pool(damage: object) -> None:
    pool = BlockPool(2, bytes_per_block=10)
    pool.take()
    damage(pool)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        pool.check()


def test_memory_that_the_system_refuses_is_a_mistake_of_the_user() -> None:
    spec = CacheSpec(layers=(0,), num_kv_heads=1, head_dim=64)
    for num_blocks in (2**50, 2**60):
        with pytest.raises(ConfigError, match="lower kv_memory"):
            KVPool(spec, num_blocks, torch.float32, torch.device("cpu"))
