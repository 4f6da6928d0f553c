from typing import final

FP32: int
BF16: int
FP16: int
Q8_0: int
Q4_0: int
Q4_1: int
SILU: int
GELU_TANH: int

@final
class Path:
    """The kernels in one instruction set. Tensors are row-major, at these addresses."""

    @property
    def name(self) -> str: ...
    def linear(self, dtype: int, weight: int, bias: int, in_features: int, out_features: int, /) -> Linear:
        """The product with a weight [out, in] that stays where it is; bias may be 0."""

    def packed_linear(
        self, dtype: int, packing: int, weight: int, bias: int, in_features: int, out_features: int, /
    ) -> PackedLinear:
        """The same with a packed weight; the dtype is that of x, y and the bias."""

    def rms_norm(
        self, dtype: int, x: int, weight: int, y: int, rows: int, width: int, eps: float, num_threads: int, /
    ) -> None:
        """y = x / sqrt(mean(x²) + eps) * weight, row by row; the weight is fp32."""

    def rotate(
        self,
        dtype: int,
        x: int,
        cos: int,
        sin: int,
        y: int,
        rows: int,
        heads: int,
        width: int,
        rotary: int,
        num_threads: int,
        /,
    ) -> None:
        """y = x turned, [rows, heads, width]; cos and sin are fp32, [rows, rotary]."""

    def gate(self, dtype: int, activation: int, gated: int, up: int, count: int, num_threads: int, /) -> None:
        """gated = f(gated) * up, number by number; f(gated) is rounded first."""

    def decode(
        self,
        dtypes: tuple[int, int, int],
        q: int,
        q_sink: int,
        k: int,
        v: int,
        y: int,
        plan: int,
        num_requests: int,
        kv_heads: int,
        group: int,
        width: int,
        block_size: int,
        num_blocks: int,
        sinks: int,
        scale: float,
        softcap: float,
        num_threads: int,
        /,
    ) -> None:
        """Attention of one query for each request; dtypes of q, k and v; q_sink and softcap may be 0.

        The plan is int64: for each request its row, the number of keys, the first in its window, and where among the
        block tables, which follow, its own begins. Raises IndexError for a block that there is not.
        """

@final
class Linear:
    """A product with one weight."""

    def __call__(self, x: int, y: int, rows: int, num_threads: int, /) -> None:
        """y = x Wᵀ + bias."""

@final
class PackedLinear:
    """A product with one packed weight, whose other factor is rounded to 8 bits in groups of 32."""

    def __call__(self, x: int, y: int, rows: int, num_threads: int, /) -> None:
        """y = x Wᵀ + bias."""

def write(
    dtypes: tuple[int, int, int],
    k: int,
    v: int,
    rows: int,
    k_to: int,
    v_to: int,
    count: int,
    width: int,
    num_rows: int,
    /,
) -> None:
    """Row i of k and of v to row rows[i] (int64) of k_to and v_to; dtypes of k and v, of k_to, of v_to.

    Raises IndexError, and has written nothing, if one of them is beyond num_rows.
    """

def pack(
    packing: int, blocks: int, order: int, packed: int, in_features: int, out_features: int, num_threads: int, /
) -> None:
    """GGUF's blocks in the kernels' order; row i is row order[i] of the blocks, an int64, or row i if order is 0."""

def packed_bytes(packing: int, in_features: int, out_features: int, /) -> int:
    """What a packed weight takes."""

def unpack_rows(
    packing: int,
    packed: int,
    in_features: int,
    out_features: int,
    ids: int,
    count: int,
    dtype: int,
    rows: int,
    num_threads: int,
    /,
) -> None:
    """Rows with these int64 numbers, [count, in]. Raises IndexError if there is no such row."""

def fetch_all(data: int, size: int, streams: int, num_threads: int, /) -> int:
    """Fetches `size` bytes from memory, each thread in so many places at once; a number made of what was read."""

def paths() -> list[Path]:
    """What this CPU runs, the fastest first."""
