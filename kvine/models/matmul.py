"""How a product with a weight is computed: chosen once per model, for the dtype and the machine.

Few rows go to the compiled kernels, which read the weights faster than torch does; more go to torch. Where a CPU has no
matrix instructions for a low-precision dtype, torch takes time for each row in it: from a few rows on, fp32 with the
weight converted first is faster.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvine.kernels import Kernels, NativeLinear
from kvine.kernels.packed import NativeProduct, PackedLinear

# All layers of SmolLM2-135M, two AVX2 cores, milliseconds (least of 12 runs):
#   rows                            1    2    4    8   12   16   32
#   bf16, F.linear                 19   34   58  112  178  187  435
#   bf16, converted to fp32        41   56   56   71   88   90  106
#   fp32, F.linear                 57   81   93   76   80   81  131
#   fp32, weight times rows        58   42   42   71   73   75   93
# so that one row of fp32 is fastest as four equal ones.
_MAX_LOW_PRECISION_ROWS = 4
_MAX_TRANSPOSED_ROWS = 32
_ROWS_FOR_ONE = 4
# The same on one of these cores, beside other work (least of 6 runs):
#   rows                                1    2    4    8   16   32   48
#   bf16, `through_fp32`               31   51  120  214  212  251  318
#   bf16, kernels compiled for AVX2    14   14   26   46   83  142  195
#   fp32, `fp32_small_batches`         76   66   69   97  154  227  250
#   fp32, kernels compiled for AVX2    31   30   38   49   96  141  190
# and on both, with nothing beside it (median of 9):
#   rows                               32   48   64   96  128
#   bf16, `through_fp32`              112  186  284  380  363
#   bf16, kernels compiled for AVX2    83  126  200  314  360
#   fp32, `F.linear`                        134  170
#   fp32, kernels compiled for AVX2         132  180
# For fp16 only the first of the two was measured there. Two cores with AVX-512, its bf16 and its fp16, but no AMX
# (median of 9), where torch's bf16 goes by an instruction of half the speed:
#   rows                               16   32   48   64   96  128 1929
#   bf16, `F.linear`                   41   67   94  106  146  192 2500
#   bf16, `through_fp32`               49   59   81   94  110  134 1753
#   bf16, kernels                      20   37        69  103
#   fp16, `F.linear`                   34   47   58   71   92  113 1376
#   fp16, kernels                      23   43        82  122
#   fp32, `F.linear`                   38   47   58   72   91  111 1358
#   fp32, kernels                      30   45        76  112
_MAX_NATIVE_ROWS = {torch.float32: 48, torch.bfloat16: 96, torch.float16: 32}
# Not measured, and therefore few: with matrix units torch computes many rows in the time of one.
_MAX_NATIVE_ROWS_BESIDE_MATRIX_UNITS = 4
# Plain C++ keeps up with torch at a single row, and not even there in fp16, which takes many steps to widen.
_MAX_PORTABLE_ROWS = {torch.float32: 1, torch.bfloat16: 1, torch.float16: 0}
# A converted output head would take 4 bytes for each of its (up to 168 million) weights: it goes in pieces.
_MAX_CONVERTED_WEIGHTS = 1 << 23


# `x` [N, in] times `weight` [out, in] transposed, plus `bias` [out]: [N, out] in x's dtype.
Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# The same with a weight and a bias of its own: [N, in] -> [N, out].
Product = Callable[[Tensor], Tensor]
# Makes the second of a weight and its bias.
Bind = Callable[[Tensor, Tensor | None], Product]


def choose_product(dtype: torch.dtype, device: torch.device, native: Kernels | None) -> Bind:
    """The fastest product for weights of `dtype` on `device`, with `native` kernels where there are some."""
    if device.type != "cpu":
        return with_torch(F.linear)
    by_torch = choose_torch_matmul(dtype)
    if native is None:
        return with_torch(by_torch)
    return with_kernels(native, max_native_rows(native.name, dtype), by_torch)


def with_torch(matmul: Matmul) -> Bind:
    """Products by torch alone."""
    return lambda weight, bias: lambda x: matmul(x, weight, bias)


def with_kernels(native: Kernels, max_rows: int, by_torch: Matmul) -> Bind:
    """Compiled kernels up to `max_rows` rows, and `by_torch` for more and for whatever the kernels do not take."""

    def bind(weight: Tensor, bias: Tensor | None) -> Product:
        few = native.bind(weight, bias)
        return (
            with_torch(by_torch)(weight, bias) if few is None else SplitProduct(few, max_rows, by_torch, weight, bias)
        )

    return bind


@dataclass(frozen=True, slots=True)
class SplitProduct:
    """Up to `max_rows` rows by the kernels, if these take them, and otherwise by torch."""

    few: NativeLinear
    max_rows: int
    by_torch: Matmul
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        if 0 < x.shape[0] <= self.max_rows and self.few.takes(x):
            return self.few(x)
        return self.by_torch(x, self.weight, self.bias)


def native_product(product: Product) -> tuple[NativeProduct, int | None] | None:
    """The kernel behind a product, and up to how many rows it is the fastest, None for any; None for torch's."""
    if isinstance(product, SplitProduct):
        return product.few, product.max_rows
    return (product, None) if isinstance(product, PackedLinear) else None


def max_native_rows(name: str, dtype: torch.dtype) -> int:
    """Up to how many rows the kernels of this name are the faster ones."""
    if name == "portable":
        return _MAX_PORTABLE_ROWS[dtype]
    if has_matrix_units(dtype):
        return _MAX_NATIVE_ROWS_BESIDE_MATRIX_UNITS
    return _MAX_NATIVE_ROWS[dtype]


def choose_torch_matmul(dtype: torch.dtype) -> Matmul:
    """The fastest product for weights of `dtype` on the CPU, of those that torch offers."""
    if dtype == torch.float32:
        return fp32_small_batches if torch.backends.cpu.get_cpu_capability() == "AVX2" else F.linear
    if has_matrix_units(dtype) or (dtype == torch.float16 and _multiplies(dtype)):
        return F.linear
    return through_fp32


def has_matrix_units(dtype: torch.dtype) -> bool:
    """Does torch multiply matrices of bf16 or fp16 by units made for it: AMX on x86, whatever it uses elsewhere?"""
    if dtype == torch.float32 or not _multiplies(dtype):
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    amx = torch.cpu._is_amx_tile_supported if dtype == torch.bfloat16 else torch.cpu._is_amx_fp16_supported
    return bool(amx())


def _multiplies(dtype: torch.dtype) -> bool:
    """Does this CPU multiply bf16 or fp16 natively in any way, and does torch use it?"""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def fp32_small_batches(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """fp32; a few rows are multiplied from the weight's side, up to twice as fast on AVX2."""
    rows = x.shape[0]
    if rows > _MAX_TRANSPOSED_ROWS:
        return F.linear(x, weight, bias)
    columns = x.repeat(_ROWS_FOR_ONE, 1).T if rows == 1 else x.T
    out = torch.mm(weight, columns)[:, :rows].T.contiguous()
    return out if bias is None else out.add_(bias)


def through_fp32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """bf16 or fp16 without hardware for it: a few rows as they are, more in fp32, the result rounded back."""
    if x.shape[0] <= _MAX_LOW_PRECISION_ROWS:
        return F.linear(x, weight, bias)
    x32 = x.float()
    rows_at_once = max(1, _MAX_CONVERTED_WEIGHTS // weight.shape[1])
    parts = [fp32_small_batches(x32, part.float(), None) for part in torch.split(weight, rows_at_once)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return (out if bias is None else out.add_(bias)).to(x.dtype)
