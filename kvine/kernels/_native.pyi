from typing import final

FP32: int
BF16: int
FP16: int

@final
class Path:
    """The products in one instruction set."""

    @property
    def name(self) -> str: ...
    def linear(
        self,
        dtype: int,
        x: int,
        weight: int,
        bias: int,
        y: int,
        rows: int,
        in_features: int,
        out_features: int,
        num_threads: int,
        /,
    ) -> None:
        """y = x Wᵀ + bias, of row-major matrices at these addresses; bias may be 0."""

def paths() -> list[Path]:
    """What this CPU runs, the fastest first."""
