"""The layer in which a fault first shows, with everything that a hypothesis may ask about it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvine.evidence.traps.bench import Recording, Row
from kvine.evidence.traps.symptoms import Bounds
from kvine.evidence.traps.textbook import Pass, Reading, Textbook

Candidates = Iterable[Reading]


@dataclass(frozen=True)
class Hypothesis:
    """One way in which attention may read wrongly.

    Attributes:
        kind: what it would be called.
        detail: what exactly is supposed, for people.
        readings: what a row would read; several where the hypothesis leaves it open which.
        may_be_right: whether a row may also read rightly, because the supposed fault need not touch it.
    """

    kind: str
    detail: str
    readings: Callable[["Scene", Row], Candidates]
    may_be_right: bool = False


@dataclass(frozen=True)
class Scene:
    """What an engine did in one layer, beside what the textbook has for it."""

    book: Textbook
    layer: int
    block_size: int
    recording: Recording
    passes: Sequence[Pass]
    bounds: Bounds

    def keys(self, text: int, positions: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """K and V of a text as they have to be stored, each [n, Hkv, D]."""
        index = torch.as_tensor(positions, dtype=torch.long)
        right = self.passes[text]
        return right.stored_keys[self.layer][index], right.stored_values[self.layer][index]

    def query(self, row: Row) -> Tensor:
        """[Hq, D], not rotated."""
        return self.passes[row.text].queries[self.layer][row.position]

    def right(self, row: Row) -> Reading:
        """What a row has to read."""
        k, v = self.keys(row.text, range(row.position + 1))
        if (packing := self.book.packing) is not None:
            kept, before = self.passes[row.text], row.position // packing.size * packing.size
            k = torch.cat((kept.kept_keys[self.layer][:before], k[before:]))
            v = torch.cat((kept.kept_values[self.layer][:before], v[before:]))
        return self.book.reading(self.layer, self.query(row), row.position, k, v)

    def actual(self, row: Row) -> Tensor:
        """The attention block's output for a row, [hidden]."""
        return self.recording.states[row.step]["attn_out", self.layer][row.index]

    def residual(self, row: Row, hypothesis: Hypothesis) -> float:
        """How far a hypothesis is from what a row has really computed, in bounds: at most 1 where it fits."""
        readings = list(hypothesis.readings(self, row))
        if hypothesis.may_be_right or not readings:
            readings.append(self.right(row))
        heads = torch.stack([self.book.attend(self.layer, reading) for reading in readings])
        out = self.book.block_output(self.layer, heads)
        distance = (out.double() - self.actual(row).double()).abs().amax(1).nan_to_num(nan=torch.inf)
        return float(distance.min()) / self.bounds.outputs[self.layer]

    def neighbours(self, row: Row) -> list[int]:
        """The other texts that the cache held in a row's step."""
        return [text for text in self.recording.lengths[row.step] if text != row.text]

    def related(self, one: int, other: int) -> bool:
        """Whether two texts come from one by forks and crops."""
        return bool(set(self._line(one)) & set(self._line(other)))

    def _line(self, text: int) -> Iterator[int]:
        here: int | None = text if text >= 0 else None
        while here is not None:
            yield here
            here = self.recording.parents[here]
