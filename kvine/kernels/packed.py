"""Weights that stay packed: 4 or 8 bits for each, in groups of 32 with a scale, as GGUF stores them.

A step reads all weights once, so that a weight of half the size is read in half the time. What is multiplied with them
is rounded to 8 bits, in groups of 32 too, whatever the number of rows: a row's result never depends on its neighbours.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvine import kernels
from kvine.kernels import Kernels, NativeLinear, is_plain

GROUP = 32
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}  # of GGUF's block of 32 weights


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out, in] in the kernels' order. Its values are those of GGUF's blocks, bit for bit.

    `packing` is GGUF's name of the block type; `data` are the bytes, of whole tiles of 16 rows.
    """

    data: Tensor  # uint8
    packing: str
    shape: tuple[int, int]

    @classmethod
    def from_blocks(
        cls, blocks: Tensor, packing: str, order: Tensor | None = None, *, num_threads: int | None = None
    ) -> "PackedWeight":
        """From `blocks`, uint8 [out, bytes of a row] as GGUF stores them. Row i is row `order[i]` of the blocks.

        `num_threads` are torch's by default.
        """
        num_threads = torch.get_num_threads() if num_threads is None else num_threads
        native = kernels.require_native()
        out, row_bytes = blocks.shape
        in_features = row_bytes // BLOCK_BYTES[packing] * GROUP
        kind = getattr(native, packing)
        data = torch.empty(native.packed_bytes(kind, in_features, out), dtype=torch.uint8)
        blocks = blocks.contiguous()
        address = 0 if order is None else order.data_ptr()
        native.pack(kind, blocks.data_ptr(), address, data.data_ptr(), in_features, out, num_threads)
        return cls(data, packing, (out, in_features))

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
            getattr(native, self.packing),
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
            getattr(kernels.require_native(), weight.packing),
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
