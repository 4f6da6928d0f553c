"""Compiled CPU kernels: torch's products read the weights far below the memory's speed where a step has few rows.

A thin face over `_native`, which may be missing: what is installed without a compiler runs on torch's products.
"""

import functools
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch  # before the extension, so that both share torch's OpenMP runtime and its threads
from torch import Tensor

from kvine.errors import ConfigError, KvineWarning

if TYPE_CHECKING:
    from types import ModuleType

    from kvine.kernels import _native

VARIABLE = "KVINE_KERNELS"
NEVER = 2**63 - 1  # a position that no query comes to
PREFILL_FIELDS = 7  # of a request in the plan of `Kernels.prefill`
INSTRUCTION_SETS = ("avx512vnni", "avx512", "avxvnni", "avx2", "portable")
REMEDY = "To have them, install a C++17 compiler (GCC or Clang) with OpenMP, and then Kvine again."


@dataclass(frozen=True, slots=True)
class PackedKind:
    """Full blocks that are packed (see `kvine.cache.layout`): how many there are, and for keys and values the bits of a
    number (0: rows as in an open block), whether scales are by channel, channels of a scale, and a head's bytes.
    """

    num_blocks: int
    keys: tuple[int, int, int, int]
    values: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """What one layer reads where full blocks are packed.

    Attributes:
        kind: of packing.
        keys, values: the packed blocks, uint8 [blocks, Hkv, bytes].
        new_keys, new_values: [N, Hkv, D], of the step's own tokens, as open blocks hold them.
    """

    kind: PackedKind
    keys: Tensor
    values: Tensor
    new_keys: Tensor
    new_values: Tensor

    def bound(self) -> "_native.PackedBlocks":
        """The same to the extension."""
        parts = (self.keys, self.values, self.new_keys, self.new_values)
        return require_native().PackedBlocks(  # type: ignore[no-any-return]
            self.kind.num_blocks, self.kind.keys, self.kind.values, *(part.data_ptr() for part in parts)
        )


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of one instruction set. A sum is one of fp32, rounded once, in an order that depends on the
    instruction set and on its length alone: not on other rows, nor on the number of threads.

    The arguments of `rms_norm` and `rotate` are addresses to the kernel: only what `takes` accepts may come there.
    """

    name: str
    path: "_native.Path"
    dtypes: dict[torch.dtype, int]
    activations: dict[str, int]

    def takes(self, x: Tensor) -> bool:
        """Whether the kernels can read this: a dense row-major tensor on the CPU, without gradients, in one of their
        dtypes. Whatever else there is, is left to torch.
        """
        return x.dtype in self.dtypes and is_plain(x)

    def bind(self, weight: Tensor, bias: Tensor | None = None) -> "NativeLinear | None":
        """The product with `weight` [out, in] transposed, plus `bias` [out] in the same dtype; None if one of them is
        not for the kernels.
        """
        fits = weight.dim() == 2 and self.takes(weight)
        if bias is not None:
            fits = fits and bias.dtype is weight.dtype and bias.shape == weight.shape[:1] and is_plain(bias)
        return NativeLinear(self, weight, bias) if fits else None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x` [..., D] over the root of its mean square, times `weight` [D] in fp32: x's shape and dtype."""
        y = torch.empty_like(x)
        width = weight.shape[0]
        self.path.rms_norm(
            self.dtypes[x.dtype],
            x.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            x.numel() // width,
            width,
            eps,
            torch.get_num_threads(),
        )
        return y

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` [N, H, D] turned by `cos` and `sin` [N, 1, R] in fp32, as `kvine.rope.rotate` does it: x's shape."""
        y = torch.empty_like(x)
        rows, heads, width = x.shape
        self.path.rotate(
            self.dtypes[x.dtype],
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            y.data_ptr(),
            rows,
            heads,
            width,
            cos.shape[-1],
            torch.get_num_threads(),
        )
        return y

    def gate(self, gated: Tensor, up: Tensor, activation: str) -> Tensor:
        """`gated` becomes f(gated) * up, of one shape and dtype; f is silu or gelu_tanh, and its result rounded."""
        self.path.gate(
            self.dtypes[gated.dtype],
            self.activations[activation],
            gated.data_ptr(),
            up.data_ptr(),
            gated.numel(),
            torch.get_num_threads(),
        )
        return gated

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Tensor,
        out: Tensor,
        *,
        num_requests: int,
        scale: float,
        q_sink: Tensor | None = None,
        softcap: float | None = None,
        packed: PackedBlocks | None = None,
    ) -> None:
        """Attention of one query for each request over its blocks, into that request's row of `out` [N, Hq, D].

        Args:
            q: [N, Hq, D].
            k: the keys of one layer, [blocks, Hkv, block_size, D], in any of the kernels' dtypes.
            v: its values.
            plan: int64, [num_requests, 8] and behind it the block tables: a request's row of q and out, the number of
                its keys, the first of them that its window reaches, where its table begins, how many first keys are
                read whatever the window, from which position on these are read as if from right before it (here of no
                use), and how many other runs of keys are read so, and where these lie behind the tables, each as its
                first key and its end.
            out: [N, Hq, D], in q's dtype.
            num_requests: how many rows are computed.
            scale: factor on the scores.
            q_sink: [N, Hq, D], what reads the sinks where that is not q.
            softcap: bound of the scores.
            packed: full blocks, where these are packed. Then a table names packed blocks, but for its last, which is
                one of k and v.

        Raises:
            IndexError: if a query sees a key in a block that there is not.
        """
        num_blocks, kv_heads, block_size, width = k.shape
        self.path.decode(
            (self.dtypes[q.dtype], self.dtypes[k.dtype], self.dtypes[v.dtype]),
            q.data_ptr(),
            0 if q_sink is None else q_sink.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            plan.data_ptr(),
            num_requests,
            kv_heads,
            q.shape[1] // kv_heads,
            width,
            block_size,
            num_blocks,
            scale,
            softcap or 0.0,
            None if packed is None else packed.bound(),
            torch.get_num_threads(),
        )

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Tensor,
        out: Tensor,
        *,
        num_requests: int,
        window: int | None,
        scale: float,
        q_sink: Tensor | None = None,
        softcap: float | None = None,
        packed: PackedBlocks | None = None,
    ) -> None:
        """Attention of any number of queries for each request: bit for bit what `decode` computes for each alone.

        The arguments are those of `decode`, but for:

            plan: int64, [num_requests, 7] and behind it the block tables: a request's first row of q and out, the
                number of its queries, the number of its keys up to the last query's, where its table begins, how many
                first keys are read whatever the window, and how many other runs of keys, and where.
            window: how many keys a query sees, its own included; None for all.
            packed: full blocks, where these are packed. Then a table names packed blocks, but for its last, which is
                not read, and one behind it: the block of k and v that holds the tokens before the first query in its
                own block, if there are any.

        Raises:
            IndexError: if a query sees a key in a block that there is not.
        """
        num_blocks, kv_heads, block_size, width = k.shape
        self.path.prefill(
            (self.dtypes[q.dtype], self.dtypes[k.dtype], self.dtypes[v.dtype]),
            q.data_ptr(),
            0 if q_sink is None else q_sink.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            plan.data_ptr(),
            num_requests,
            kv_heads,
            q.shape[1] // kv_heads,
            width,
            block_size,
            num_blocks,
            window or 0,
            scale,
            softcap or 0.0,
            None if packed is None else packed.bound(),
            torch.get_num_threads(),
        )


class NativeLinear:
    """A product whose weight and bias are checked once. See `Kernels.bind`."""

    __slots__ = ("_bias", "_dtype", "_in", "_out", "_weight", "bound")

    def __init__(self, native: Kernels, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias  # to keep alive what the kernel reads
        self._dtype = weight.dtype
        self._out, self._in = weight.shape
        bias_address = 0 if bias is None else bias.data_ptr()
        self.bound = native.path.linear(
            native.dtypes[weight.dtype], weight.data_ptr(), bias_address, self._in, self._out
        )

    def takes(self, x: Tensor) -> bool:
        """Whether this can multiply `x`: [N, in], dense, in the weight's dtype, on the CPU, without gradients."""
        return x.dtype is self._dtype and x.dim() == 2 and x.shape[1] == self._in and is_plain(x)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [N, in], which `takes` accepts -> [N, out], on torch's number of threads."""
        rows = x.shape[0]
        y = torch.empty((rows, self._out), dtype=self._dtype)
        self.bound(x.data_ptr(), y.data_ptr(), rows, torch.get_num_threads())
        return y


def available() -> tuple[str, ...]:
    """The instruction sets that this CPU runs, the fastest first; none where the kernels are not compiled."""
    native = _load_native()
    return () if native is None else tuple(path.name for path in native.paths())


def load(name: str) -> Kernels:
    """The kernels of one instruction set. Raises ConfigError if this is not one, or not one that runs here."""
    if name not in INSTRUCTION_SETS:
        raise ConfigError(f"Kernels {name!r} are unknown. Set {VARIABLE} to one of {', '.join(INSTRUCTION_SETS)}, off.")
    native = _load_native()
    if native is None:
        raise ConfigError(f"{name} kernels were asked for, but none are compiled. {REMEDY}")
    for path in native.paths():
        if path.name == name:
            return Kernels(name, path, dtype_codes(native), {"silu": native.SILU, "gelu_tanh": native.GELU_TANH})
    raise ConfigError(f"This CPU cannot run {name} kernels. Set {VARIABLE} to one of {', '.join(available())}, off.")


def chosen() -> Kernels | None:
    """What the environment variable KVINE_KERNELS names, otherwise the fastest that this CPU runs.

    None for torch's own products: as asked for with `off`, or because nothing is compiled, which a KvineWarning says
    once. Raises ConfigError for a name that is unknown or that cannot run here.
    """
    name = os.environ.get(VARIABLE, "")
    if name == "off":
        return None
    if name:
        return load(name)
    names = available()
    return load(names[0]) if names else None


def require_native() -> "ModuleType":
    """The extension itself. Raises ConfigError where it is not compiled."""
    native = _load_native()
    if native is None:
        raise ConfigError(f"Packed weights need the compiled kernels. {REMEDY}")
    return native


def dtype_codes(native: "ModuleType") -> dict[torch.dtype, int]:
    """The extension's names of the dtypes that it computes in."""
    return {torch.float32: native.FP32, torch.bfloat16: native.BF16, torch.float16: native.FP16}


def write_rows(k: Tensor, v: Tensor, rows: Tensor, keys: Tensor, values: Tensor) -> None:
    """Row i of `k` and `v` [N, D] becomes row `rows[i]` (int64) of `keys` and `values` [any, D], in their dtypes.

    The arguments are addresses to the extension: dense, on the CPU, in dtypes of the kernels. Raises IndexError, and
    has written nothing, for a row that there is not.
    """
    native = require_native()
    codes = dtype_codes(native)
    native.write(
        (codes[k.dtype], codes[keys.dtype], codes[values.dtype]),
        k.data_ptr(),
        v.data_ptr(),
        rows.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        rows.shape[0],
        k.shape[1],
        keys.shape[0],
    )


def cos_sin(frequencies: Tensor, scaling: float, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `positions` [N] times `frequencies` [R / 2], as `RotaryEmbedding.cos_sin` gives them.

    Both are addresses to the extension: dense, on the CPU, int64 and fp64.
    """
    cos, sin = (torch.empty((len(positions), 1, 2 * len(frequencies)), dtype=torch.float32) for _ in range(2))
    require_native().cos_sin(
        frequencies.data_ptr(),
        len(frequencies),
        scaling,
        positions.data_ptr(),
        len(positions),
        cos.data_ptr(),
        sin.data_ptr(),
    )
    return cos, sin


@functools.cache
def _load_native() -> "ModuleType | None":
    try:
        from kvine.kernels import _native
    except ImportError as error:
        missing = f"Kvine runs without its compiled kernels, on torch's slower products ({error}). {REMEDY}"
        warnings.warn(missing, KvineWarning, stacklevel=2)
        return None
    return _native


def is_plain(tensor: Tensor) -> bool:
    """Whether a kernel may read the tensor by its address: dense and row-major on the CPU, and without gradients."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_neg()
