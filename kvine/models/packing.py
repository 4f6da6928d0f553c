"""Which weights of a checkpoint are packed, to what, and why: decided by its header, before any weight is read.

Loads no torch: the planner asks too, and counts by the same bytes.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvine.errors import ConfigError
from kvine.formats.tensor import TensorInfo

WEIGHTS = ("auto", "exact", "packed", "q8", "q4")
GROUP = 32
# What the kernels hold of a row: so many weights in so many bytes. They hold rows in tiles of 16.
_ROW_BYTES = {
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 148),
    "Q5_K": (256, 180),
    "Q6_K": (256, 210),
}
_TILE = 16
_ROUNDED_TO = {"q8": "Q8_0", "q4": "Q4_1"}
# In q4 too these have 8 bits: of all weights an error here is seen most, in every token and in every logit.
_EIGHT_BITS = ("embedding.weight", "head.weight")


@dataclass(frozen=True)
class Packings:
    """What has been decided.

    Attributes:
        types: of each weight that is packed, by role, the type in GGUF's name; the others are exact.
        reason: in words; empty where nothing was to be decided.
    """

    types: Mapping[str, str]
    reason: str


def choose_packings(
    stored: Mapping[str, TensorInfo], weights: str, *, is_fp32: bool, device: str, has_kernels: bool
) -> Packings:
    """Which weights are packed.

    A weight whose type here is the one that it is stored in is kept, bit for bit; one of another type is rounded.

    * `auto` is `packed` where that can be and the compute dtype is not fp32, in which a model has the tokens of its
      exact weights; otherwise it is `exact`;
    * `exact` packs nothing;
    * `packed` keeps what a GGUF file has packed, and rounds nothing;
    * `q8` rounds all others to Q8_0;
    * `q4` rounds to Q4_1 what takes more bits than that, but embedding and output head as q8 does.

    Norms and biases, and matrices whose rows are no multiple of 32, stay exact.

    Args:
        stored: all tensors that the decoder takes, by role.
        weights: one of these.
        is_fp32: whether that is the compute dtype.
        device: its kind.
        has_kernels: whether a CPU would compute with compiled kernels.

    Raises:
        ConfigError: for another mode, and for packed, q8 and q4 where packed weights cannot be multiplied.
    """
    check_weights(weights)
    matrices = {role: info for role, info in stored.items() if len(info.shape) == 2}
    kept = {role: info.type for role, info in matrices.items() if info.type in _ROW_BYTES}
    if weights == "exact":
        return _decoded(kept, "as asked")
    if weights == "auto" and is_fp32:
        return _decoded(kept, "as auto does in fp32")
    if device != "cpu" or not has_kernels:
        if weights == "auto":
            return _decoded(kept, "for there are no kernels to multiply them packed")
        what = "that stay packed" if weights == "packed" else f"packed to {weights}"
        raise ConfigError(
            f"Weights {what} need a CPU with Kvine's compiled kernels: choose exact, or device cpu and "
            "kernels that are not off (KVINE_KERNELS)."
        )
    if weights in _ROUNDED_TO:
        return _rounded(matrices, weights)
    if not kept:
        return Packings({}, "no weight is packed in this checkpoint" if weights == "packed" else "")
    return Packings(kept, f"{len(kept)} weights stay packed ({', '.join(sorted(set(kept.values())))})")


def check_weights(weights: str) -> None:
    """Raises ConfigError for what is no way to keep weights."""
    if weights not in WEIGHTS:
        raise ConfigError(f"weights {weights!r} is unknown: choose one of {', '.join(WEIGHTS)}.")


def packed_bytes(packing: str, shape: tuple[int, ...]) -> int:
    """What a weight [out, in] takes in memory, `PackedWeight.nbytes`."""
    out, width = shape
    weights, size = _ROW_BYTES[packing]
    return -(-out // _TILE) * _TILE * (width // weights) * size


def packed_row_bytes(packing: str, width: int) -> int:
    """What a row of such a weight takes."""
    return packed_bytes(packing, (_TILE, width)) // _TILE


def count_packings(packings: Mapping[str, str]) -> dict[str, int]:
    """How many weights there are of each type."""
    return dict(sorted(Counter(packings.values()).items()))


def computes_in(dtype: str, packings: Mapping[str, int]) -> str:
    """What a model computes in, and what its weights are packed in: `packings` are numbers of them, by type."""
    return f"{dtype} ({', '.join(packings)} weights)" if packings else dtype


def _decoded(packed: Mapping[str, str], why: str) -> Packings:
    types = ", ".join(count_packings(packed))
    return Packings({}, f"{len(packed)} weights are decoded ({types}), {why}" if packed else "")


def _rounded(matrices: Mapping[str, TensorInfo], weights: str) -> Packings:
    packings = {
        role: packing
        for role, info in matrices.items()
        if (packing := _packing_of(info, _ROUNDED_TO["q8" if role in _EIGHT_BITS else weights])) is not None
    }
    said = f"{len(packings)} weights are packed"
    if packings:
        said += f" ({', '.join(f'{count} {packing}' for packing, count in count_packings(packings).items())})"
    if kept := sum(matrices[role].type == packing for role, packing in packings.items()):
        said += f", {kept} of them as stored"
    if exact := len(matrices) - len(packings):
        said += f"; {exact} stay exact, whose rows are no multiple of {GROUP}"
    return Packings(packings, said)


def _packing_of(info: TensorInfo, rounded: str) -> str | None:
    """The stored type if that takes no more than the rounded one; None if neither is possible."""
    if info.type in _ROW_BYTES and _bits(info.type) <= _bits(rounded):
        return info.type
    return rounded if info.shape[1] % GROUP == 0 else None


def _bits(packing: str) -> float:
    """Of a weight, its part of scales and least values included."""
    weights, size = _ROW_BYTES[packing]
    return size * 8 / weights
