"""Packed weights: 4 to 8 bits for each, in groups of 32 with a scale, as GGUF stores them or rounded to that.

A step reads all weights once, so that a weight of half the size is read in half the time. What is multiplied with them
is rounded to 8 bits, in groups of 32 too, whatever the number of rows: a row's result never depends on its neighbours.
"""

import contextlib
import itertools
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvine import kernels
from kvine.kernels import Kernels, NativeLinear, is_plain

GROUP = 32
# GGUF's blocks: how many weights are in one, and how many bytes.
BLOCKS = {
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
# What other weights are rounded to.
ROUNDED = ("Q8_0", "Q4_1")


_LARGE_PAGE = 2 << 20
_CACHE_LINE = 64


def allocate(sizes: Sequence[int]) -> list[Tensor]:
    """Memory for packed weights of so many bytes: uint8 [size] each, all in one piece.

    A system with large pages maps it in these: a step that reads all weights from small ones waits for as many
    translations of addresses.
    """
    starts = [0, *itertools.accumulate(-(-size // _CACHE_LINE) * _CACHE_LINE for size in sizes)]
    if not starts[-1]:
        return [torch.empty(0, dtype=torch.uint8) for _ in sizes]
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    mapped = mmap.mmap(-1, starts[-1] + _LARGE_PAGE, **private)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % _LARGE_PAGE :]
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def packing_code(packing: str) -> int:
    """The extension's name of a packing."""
    code: int = getattr(kernels.require_native(), packing)
    return code


def bytes_of(packing: str, shape: tuple[int, int]) -> int:
    """What a weight [out, in] takes in memory."""
    nbytes: int = kernels.require_native().packed_bytes(packing_code(packing), shape[1], shape[0])
    return nbytes


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out, in] in the kernels' order.

    `packing` is GGUF's name of the block type, whose values it has bit for bit; `data` are the bytes, of whole tiles of
    16 rows. The 6-bit scales of Q4_K and Q5_K take 8 bits here, an eighth of a bit for each weight more than in a file.
    """

    data: Tensor  # uint8
    packing: str
    shape: tuple[int, int]

    @classmethod
    def from_blocks(
        cls,
        blocks: Tensor,
        packing: str,
        order: Tensor | None = None,
        *,
        memory: Tensor | None = None,
        num_threads: int | None = None,
    ) -> "PackedWeight":
        """From `blocks`, uint8 [out, bytes of a row] as GGUF stores them. Row i is row `order[i]` of the blocks.

        `memory` is where it goes, see `allocate`; its own by default. `num_threads` are torch's by default.
        """
        weights, size = BLOCKS[packing]
        out, row_bytes = blocks.shape
        packed = cls._empty(packing, (out, row_bytes // size * weights), memory)
        blocks = blocks.contiguous()
        kernels.require_native().pack(
            packed._kind,
            blocks.data_ptr(),
            0 if order is None else order.data_ptr(),
            packed.data.data_ptr(),
            packed.shape[1],
            out,
            torch.get_num_threads() if num_threads is None else num_threads,
        )
        return packed

    @classmethod
    def from_values(
        cls, values: Tensor, packing: str, *, memory: Tensor | None = None, num_threads: int | None = None
    ) -> "PackedWeight":
        """From any `values` [out, in], rounded; `in` is a multiple of 32.

        Q8_0 rounds to multiples of a 127th of a group's greatest: by half of that at most. Q4_1 divides what lies
        between a group's least and greatest into 15 steps, and then fits scale, least value and numbers to each other
        by least squares: of normally distributed weights 7.3% is lost, in root mean square, where the steps alone
        would lose 7.8%. Both round scale and least value to fp16, which ends at 65,504 and 6e-8: a group with weights
        beyond 8e6 (Q8_0) or 65,504 (Q4_1) becomes NaN, as does one with an infinity or a NaN, and weights are no nearer
        than 4e-6 (Q8_0) or 5e-7 (Q4_1), whatever their size.
        """
        assert packing in ROUNDED and values.dim() == 2 and values.shape[1] % GROUP == 0
        native, values = kernels.require_native(), values.contiguous()
        packed = cls._empty(packing, (values.shape[0], values.shape[1]), memory)
        native.round_and_pack(
            packed._kind,
            kernels.dtype_codes(native)[values.dtype],
            values.data_ptr(),
            packed.data.data_ptr(),
            packed.shape[1],
            packed.shape[0],
            torch.get_num_threads() if num_threads is None else num_threads,
        )
        return packed

    @classmethod
    def _empty(cls, packing: str, shape: tuple[int, int], memory: Tensor | None) -> "PackedWeight":
        size = bytes_of(packing, shape)
        if memory is None:
            memory = torch.empty(size, dtype=torch.uint8)
        assert memory.shape == (size,) and memory.dtype is torch.uint8 and is_plain(memory)
        return cls(memory, packing, shape)

    @property
    def _kind(self) -> int:
        return packing_code(self.packing)

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return self.data.nbytes

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `ids` [N] (whole numbers), unpacked: [N, in]. Raises IndexError for a row that there is not."""
        native, (out, in_features) = kernels.require_native(), self.shape
        ids = ids.to(torch.long).contiguous()
        rows = torch.empty((len(ids), in_features), dtype=dtype)
        native.unpack_rows(
            self._kind,
            self.data.data_ptr(),
            in_features,
            out,
            ids.data_ptr(),
            len(ids),
            kernels.dtype_codes(native)[dtype],
            rows.data_ptr(),
            torch.get_num_threads(),
        )
        return rows

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """All of it, [out, in]: for people, tests and whatever cannot do without."""
        return self.rows(torch.arange(self.shape[0]), dtype)


class PackedLinear:
    """A product with a packed weight, for any number of rows."""

    __slots__ = ("_bias", "_dtype", "_in", "_out", "_weight", "bound")

    def __init__(self, native: Kernels, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._weight, self._bias = weight, bias  # to keep alive what the kernel reads
        self._dtype = dtype
        self._out, self._in = weight.shape
        assert bias is None or (bias.dtype is dtype and bias.shape == (self._out,) and is_plain(bias))
        self.bound = native.path.packed_linear(
            native.dtypes[dtype],
            packing_code(weight.packing),
            weight.data.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            self._in,
            self._out,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out], in one dtype."""
        assert x.dtype is self._dtype and x.dim() == 2 and x.shape[1] == self._in
        if not is_plain(x):
            x = x.detach().contiguous().resolve_neg()
        rows = x.shape[0]
        y = torch.empty((rows, self._out), dtype=self._dtype)
        if rows:
            self.bound(x.data_ptr(), y.data_ptr(), rows, torch.get_num_threads())
        return y


NativeProduct = NativeLinear | PackedLinear
