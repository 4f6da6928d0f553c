from typing import final

FP32: int
BF16: int
FP16: int
Q8_0: int
Q4_0: int
Q4_1: int
Q5_0: int
Q5_1: int
Q4_K: int
Q5_K: int
Q6_K: int
SILU: int
GELU_TANH: int

@final
class Path:
    """The kernels in one instruction set. Tensors are row-major, at these addresses."""

    @property
    def name(self) -> str: ...
    def linear(self, dtype: int, weight: int, bias: int, in_features: int, out_features: int, /) -> Product:
        """The product with a weight [out, in] that stays where it is; bias may be 0."""

    def packed_linear(
        self, dtype: int, packing: int, weight: int, bias: int, in_features: int, out_features: int, /
    ) -> Product:
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
        scale: float,
        softcap: float,
        packed: PackedBlocks | None,
        num_threads: int,
        /,
    ) -> None:
        """Attention of one query for each request; dtypes of q, k and v; q_sink and softcap may be 0.

        The plan is int64, see `Kernels.decode`. Raises IndexError for a block that there is not.
        """

    def prefill(
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
        window: int,
        scale: float,
        softcap: float,
        packed: PackedBlocks | None,
        num_threads: int,
        /,
    ) -> None:
        """The same for any number of queries of each request; a window of 0 is none.

        The plan is int64, see `Kernels.prefill`. Raises IndexError for a block that there is not.
        """

    def stack(
        self,
        dtype: int,
        sizes: tuple[int, int, int, int],
        eps: float,
        scale: float,
        softcap: float,
        activation: int,
        embedding: Product,
        embedding_scale: float,
        final_norm: int,
        head: Product,
        /,
    ) -> Stack:
        """A decoder without layers; sizes are those of a hidden state, of heads, of KV heads, and of one head."""

@final
class PackedBlocks:
    """How full blocks are packed, and where one layer's lie."""

    def __init__(
        self,
        num_blocks: int,
        keys: tuple[int, int, int, int],
        values: tuple[int, int, int, int],
        sealed_keys: int,
        sealed_values: int,
        new_keys: int,
        new_values: int,
        /,
    ) -> None:
        """For keys and values: bits, whether by channel, channels that share a scale, and bytes of a head."""

@final
class Product:
    """A product with one weight, exact or packed; with a packed one, the other factor is rounded to 8 bits."""

    def __call__(self, x: int, y: int, rows: int, num_threads: int, /) -> None:
        """y = x Wᵀ + bias."""

@final
class Stack:
    """A decoder for steps in which each request has one query."""

    def add_kind(
        self,
        frequencies: int,
        count: int,
        scaling: float,
        block_size: int,
        num_blocks: int,
        dtypes: tuple[int, int],
        group: int,
        /,
    ) -> None:
        """What layers have in common: `count` fp64 frequencies and the scaling of their cosines; dtypes of K and V."""

    def pack_kind(self, num_blocks: int, keys: tuple[int, int, int, int], values: tuple[int, int, int, int], /) -> None:
        """How the last kind packs full blocks: bits, by channel or not, channels of a scale, bytes of a head."""

    def add_layer(
        self,
        norms: tuple[int, ...],
        products: tuple[Product, ...],
        keys: int,
        values: int,
        sealed_keys: int,
        sealed_values: int,
        kind: int,
        /,
    ) -> None:
        """Norms of attention, q, k, after attention, MLP and after it, 0 for none; q, k, v, o, gate, up, down.

        Raises IndexError for a kind that there is not.
        """

    def run(self, plan: int, rows: int, num_wanted: int, groups: list[int], logits: int, num_threads: int, /) -> None:
        """Logits of the wanted rows, fp32.

        The plan is int64: the tokens, the wanted rows, and where `groups` say, each group's plan of `Path.decode`.
        Raises IndexError for a token, a row, a group or a block that there is not.
        """

def cos_sin(frequencies: int, count: int, scaling: float, positions: int, rows: int, cos: int, sin: int, /) -> None:
    """Cosines and sines in fp32, [rows, 2 * count], of int64 positions times fp64 frequencies."""

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

def round_and_pack(
    packing: int, dtype: int, weight: int, packed: int, in_features: int, out_features: int, num_threads: int, /
) -> None:
    """A weight [out, in] of a dtype, rounded to Q8_0 or Q4_1, in the kernels' order."""

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
