"""Weights that a config.json calls packed: in how many bits, and which of them.

A config names the method, seldom the whole layout, so what is assumed beyond it is said in the plan.
"""

from dataclasses import dataclass

from kvine.models.fields import Fields

MXFP4_BITS = 4.25  # 4-bit floats in groups of 32 that share an 8-bit exponent (OCP Microscaling Formats 1.0)
MOST_BITS = 16  # a wider number is not packed


@dataclass(frozen=True)
class Packing:
    """How a `quantization_config` packs.

    Attributes:
        method: its name.
        bits: of each packed number; None where the config does not say.
        experts_only: whether the experts alone are packed, or the matrices of every layer.
    """

    method: str
    bits: float | None
    experts_only: bool = False

    def assumptions(self, dtype: str, of_all: bool) -> tuple[str, ...]:
        """What counting goes by that the config does not say, in sentences; `of_all`: no part of them is known."""
        if self.bits is None:
            return (
                f"The config does not say in how many bits {self.method} packs: the weights are counted in {dtype}, "
                "more than they take. A folder with the checkpoint's index says what is stored.",
            )
        if of_all:
            return (f"All parameters are assumed to be in {self.bits:g} bits; the scales of packing are not counted.",)
        if self.experts_only:
            return ()
        return (
            f"It is assumed that {self.method} packs the matrices of all layers in {self.bits:g} bits and leaves the "
            f"rest in {dtype}; its scales are not counted.",
        )


def packing_of(fields: Fields) -> Packing | None:
    """The packing that a model's config describes; None if it describes none.

    Raises:
        ModelLoadError: for a number of bits that none can be.
    """
    described = fields.nested("quantization_config")
    if described is None:
        return None
    method = described.text("quant_method", "its quantization")
    if method == "mxfp4":
        return Packing(method, MXFP4_BITS, experts_only=True)
    if described.get("bits") is not None:
        bits = described.number("bits")
        if bits > MOST_BITS:
            raise described.error("bits", f"must be at most {MOST_BITS}, not {bits:g}")
        return Packing(method, bits)
    if method == "fp8" or described.get("load_in_8bit") is True:
        return Packing(method, 8)
    return Packing(method, 4 if described.get("load_in_4bit") is True else None)
