"""What a packed codec keeps of full blocks, for the textbook: written apart from the engine's codec."""

import torch
from torch import Tensor

from kvine.config import CacheConfig, is_packed
from kvine.evidence.cells.quantizer import grid

_SLACK = 2.0**-9  # of a step: least value and step are fp16, and rounded outwards


class Packing:
    """The full blocks of a text.

    Args:
        cache: with a packed codec for keys and for values.
    """

    def __init__(self, cache: CacheConfig) -> None:
        self.size = cache.block_size
        self._keys, self._values = cache.codecs
        assert is_packed(self._keys) and is_packed(self._values), "the lab packs both or neither"

    def num_full(self, num_tokens: int) -> int:
        """Tokens in full blocks."""
        return num_tokens // self.size * self.size

    def grid(self, exact: Tensor, *, keys: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Least value, step and number of steps of all that is full of exact `[N, H, D]`; each `[full, H, D]`."""
        full = self.num_full(len(exact))
        blocks = exact[:full].reshape(-1, self.size, *exact.shape[1:]).transpose(1, 2)  # [blocks, H, T, D]
        codec = self._keys if keys else self._values
        three = grid(blocks, codec, by_channel=keys and not codec.endswith("-token"))
        return tuple(x.transpose(1, 2).flatten(0, 1) for x in three)  # type: ignore[return-value]

    def within(self, stored: Tensor, exact: Tensor, bound: float, *, keys: bool) -> Tensor:
        """[full, H, D], whether what is stored of full blocks is as near to `exact` as a right codec keeps it.

        Which of two steps a number goes to may be up to rounding, and then both are right.
        """
        _, step, _ = self.grid(exact, keys=keys)
        full = len(step)
        return (stored[:full].double() - exact[:full].double()).abs() <= step * (0.5 + _SLACK) + bound

    def kept(self, exact: Tensor, held: Tensor | None, bound: float, *, keys: bool) -> Tensor:
        """`[N, H, D]` as later blocks read it: what the engine holds, if a right codec can have kept that.

        Args:
            exact: `[N, H, D]`.
            held: the same as the engine holds it; NaN where that is not known.
            bound: what rounding may do to exact numbers.
            keys: or values.
        """
        least, step, codes = self.grid(exact, keys=keys)
        full = len(step)
        right = (least + step * codes).to(torch.float32)
        if held is not None and full:
            right = torch.where(self.within(held, exact, bound, keys=keys), held[:full].float(), right)
        return torch.cat((right, exact[full:].float()))
