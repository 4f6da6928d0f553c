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
INSTRUCTION_SETS = ("avx512", "avx2", "portable")
REMEDY = "To have them, install a C++17 compiler (GCC or Clang) with OpenMP, and then Kvine again."


@dataclass(frozen=True, slots=True)
class Kernels:
    """The products of one instruction set. Each element is summed in fp32 in an order that depends on the instruction
    set and on the number of inputs alone: not on other rows, nor on the number of threads. It is rounded once.
    """

    name: str
    path: "_native.Path"
    dtypes: dict[torch.dtype, int]

    def takes(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether `linear` can compute this: dense row-major matrices of one dtype on the CPU that fit each other,
        without gradients. Whatever else there is, is left to torch.
        """
        return (
            x.dtype is weight.dtype
            and x.dtype in self.dtypes
            and x.dim() == weight.dim() == 2
            and x.shape[1] == weight.shape[1]
            and _is_plain(x)
            and _is_plain(weight)
            and (bias is None or (bias.dtype is x.dtype and bias.shape == weight.shape[:1] and _is_plain(bias)))
        )

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x` [N, in] times `weight` [out, in] transposed, plus `bias` [out]: [N, out], on torch's number of threads.

        The arguments are addresses to the kernel: only what `takes` accepts may come here.
        """
        rows, features = x.shape
        out_features = weight.shape[0]
        y = x.new_empty((rows, out_features))
        self.path.linear(
            self.dtypes[x.dtype],
            x.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            rows,
            features,
            out_features,
            torch.get_num_threads(),
        )
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
    dtypes = {torch.float32: native.FP32, torch.bfloat16: native.BF16, torch.float16: native.FP16}
    for path in native.paths():
        if path.name == name:
            return Kernels(name, path, dtypes)
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


@functools.cache
def _load_native() -> "ModuleType | None":
    try:
        from kvine.kernels import _native
    except ImportError as error:
        missing = f"Kvine runs without its compiled kernels, on torch's slower products ({error}). {REMEDY}"
        warnings.warn(missing, KvineWarning, stacklevel=2)
        return None
    return _native


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_neg()
