"""Which weights of a checkpoint are packed, and to what: decided by its header, before any weight is read."""

from collections import Counter
from collections.abc import Mapping

import torch

from kvine import kernels
from kvine.errors import ConfigError
from kvine.formats.tensor import TensorInfo
from kvine.kernels.packed import BLOCKS, GROUP, bytes_of

WEIGHTS = ("exact", "auto", "q8", "q4")
_ROUNDED_TO = {"q8": "Q8_0", "q4": "Q4_1"}
# In q4 too these have 8 bits: of all weights an error here is seen most, in every token and in every logit.
_EIGHT_BITS = ("embedding.weight", "head.weight")


def choose_packings(stored: Mapping[str, TensorInfo], weights: str, device: torch.device) -> dict[str, str]:
    """For each weight that is packed, by role, the type in GGUF's name; the others are exact.

    `stored` holds all tensors that the decoder takes. A weight whose type here is the one that it is stored in is kept,
    bit for bit; one of another type is rounded.

    * `exact` packs nothing;
    * `auto` keeps what a GGUF file has packed, on a CPU with compiled kernels, and rounds nothing;
    * `q8` rounds all others to Q8_0;
    * `q4` rounds to Q4_1 what takes more bits than that, but embedding and output head as q8 does.

    Norms and biases, and matrices whose rows are no multiple of 32, stay exact.

    Raises:
        ConfigError: for another mode, and for q8 and q4 where packed weights cannot be multiplied.
    """
    if weights not in WEIGHTS:
        raise ConfigError(f"weights {weights!r} is unknown: choose one of {', '.join(WEIGHTS)}.")
    if weights == "exact":
        return {}
    if device.type != "cpu" or kernels.chosen() is None:
        if weights == "auto":
            return {}
        raise ConfigError(
            f"Weights packed to {weights} need a CPU with Kvine's compiled kernels: choose exact, or device cpu and "
            f"kernels that are not off ({kernels.VARIABLE})."
        )
    matrices = {role: info for role, info in stored.items() if len(info.shape) == 2}
    if weights == "auto":
        return {role: info.type for role, info in matrices.items() if info.type in BLOCKS}
    return {
        role: packing
        for role, info in matrices.items()
        if (packing := _packing_of(info, _ROUNDED_TO["q8" if role in _EIGHT_BITS else weights])) is not None
    }


def _packing_of(info: TensorInfo, rounded: str) -> str | None:
    """The stored type if that takes no more than the rounded one; None if neither is possible."""
    if info.type in BLOCKS and _bits(info.type) <= _bits(rounded):
        return info.type
    return rounded if info.shape[1] % GROUP == 0 else None


def _bits(packing: str) -> float:
    """Of a weight, its part of scales and least values included."""
    shape = (16, 256)
    return bytes_of(packing, shape) * 8 / (shape[0] * shape[1])


def describe(stored: Mapping[str, TensorInfo], packings: Mapping[str, str], weights: str) -> str:
    """What has been decided, in words; nothing of exact weights."""
    if weights == "exact":
        return ""
    if weights == "auto":
        if not packings:
            return "no weight stays packed, which takes a quantized GGUF file, a CPU and compiled kernels"
        return f"{len(packings)} weights stay packed ({', '.join(sorted(set(packings.values())))})"
    counts = Counter(packings.values())
    said = f"{len(packings)} weights are packed"
    if packings:
        said += f" ({', '.join(f'{counts[packing]} {packing}' for packing in sorted(counts))})"
    kept = sum(stored[role].type == packing for role, packing in packings.items())
    if kept:
        said += f", {kept} of them as stored"
    exact = sum(len(info.shape) == 2 and role not in packings for role, info in stored.items())
    return said + (f"; {exact} stay exact, whose rows are no multiple of {GROUP}" if exact else "")
