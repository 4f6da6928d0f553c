"""What a recording has that the textbook has not: the wrong rows, the wrong things stored, and where they begin."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvine.evidence.traps.bench import Recording, Row, Snapshot
from kvine.evidence.traps.textbook import Pass, Textbook

# Two right computations differ by chance; few rows show only part of it. See docs/traps.md for what was measured.
MARGIN = 16.0
LAST_PLACES = 8.0  # and never less than so many units in the last place of a layer's largest value


@dataclass(frozen=True)
class Bounds:
    """How far right computations may lie apart: for each layer, and for the logits; NaN counts as beyond."""

    outputs: list[float]
    keys: list[float]
    values: list[float]
    logits: float


def measure_bounds(book: Textbook, token_ids: Sequence[int]) -> Bounds:
    """Computes a text's beginnings, which other matrix products and sums make, and compares them with the whole."""
    whole = book.compute(token_ids)
    parts = [book.compute(token_ids[:length]) for length in {1, 2, 5, len(token_ids) // 2, len(token_ids) - 1}]
    eps = max(torch.finfo(book.model.dtype).eps, torch.finfo(book.storage).eps)

    def bound(of_whole: Tensor, of_parts: Sequence[Tensor]) -> float:
        measured = max(float((of_whole[: len(part)] - part).abs().max()) for part in of_parts)
        return max(MARGIN * measured, LAST_PLACES * eps * float(of_whole.abs().max()))

    def of_layers(name: str) -> list[float]:
        layers = range(book.config.num_layers)
        return [bound(getattr(whole, name)[n], [getattr(part, name)[n] for part in parts]) for n in layers]

    return Bounds(
        of_layers("outputs"),
        of_layers("stored_keys"),
        of_layers("stored_values"),
        bound(whole.logits, [part.logits for part in parts]),
    )


@dataclass(frozen=True)
class WrongStored:
    """A position of a sequence for which one layer holds other keys or values than it should."""

    snapshot: Snapshot
    index: int  # among the positions that the layer holds
    position: int
    key_is_wrong: bool
    value_is_wrong: bool


@dataclass(frozen=True)
class Symptoms:
    """What is wrong in the first layer in which anything is.

    Attributes:
        layer: that layer; None if all that is wrong are logits.
        stored: what it holds and should not; each position of a sequence once, when it was first seen.
        reads: rows whose attention is wrong there.
        logits: rows whose logits are wrong, in whichever layer that began.
    """

    layer: int | None
    stored: list[WrongStored]
    reads: list[Row]
    logits: list[Row]

    @property
    def any(self) -> bool:
        """Whether anything is wrong."""
        return bool(self.stored or self.reads or self.logits)

    @property
    def position(self) -> int | None:
        """The earliest wrong position, of the earliest step that shows it."""
        seen = [(w.snapshot.step, w.position) for w in self.stored] + [(r.step, r.position) for r in self.reads]
        seen = seen or [(r.step, r.position) for r in self.logits]
        return min(seen)[1] if seen else None


def find_symptoms(recording: Recording, passes: Sequence[Pass], bounds: Bounds) -> Symptoms:
    """Compares a recording with its texts' right answers; all of one dtype and device."""
    logits = [
        row
        for row in recording.rows
        if row.step < len(recording.logits)
        and _differs(recording.logits[row.step][row.index], passes[row.text].logits[row.position], bounds.logits)
    ]
    for layer in range(len(bounds.outputs)):
        reads = [
            row
            for row in recording.rows
            if row.step < len(recording.outputs)
            and _differs(
                recording.outputs[row.step][layer][row.index],
                passes[row.text].outputs[layer][row.position],
                bounds.outputs[layer],
            )
        ]
        stored = _wrong_stored(recording, passes, bounds, layer)
        if reads or stored:
            return Symptoms(layer, stored, reads, logits)
    return Symptoms(None, [], [], logits)


def _wrong_stored(recording: Recording, passes: Sequence[Pass], bounds: Bounds, layer: int) -> list[WrongStored]:
    found: dict[tuple[int, int], WrongStored] = {}
    for snapshot in recording.snapshots:
        held = snapshot.positions[layer]
        if not held:
            continue
        right = passes[snapshot.text]
        wrong = [
            _rows_that_differ(is_there[layer], should_be[layer][held], bound)
            for is_there, should_be, bound in (
                (snapshot.keys, right.stored_keys, bounds.keys[layer]),
                (snapshot.values, right.stored_values, bounds.values[layer]),
            )
        ]
        for index in (wrong[0] | wrong[1]).nonzero().flatten().tolist():
            where = (snapshot.text, held[index])
            found.setdefault(
                where, WrongStored(snapshot, index, held[index], bool(wrong[0][index]), bool(wrong[1][index]))
            )
    return list(found.values())


def _rows_that_differ(ours: Tensor, theirs: Tensor, bound: float) -> Tensor:
    """[N], true where any element of [N, H, D] is further away than rounding and the storage's last place allow."""
    last_place = theirs.double().abs() * torch.finfo(theirs.dtype).eps
    within = (ours.double() - theirs.double()).abs() <= bound + last_place
    return ~within.flatten(1).all(1)


def _differs(ours: Tensor, theirs: Tensor, bound: float) -> bool:
    return not bool(((ours.double() - theirs.double()).abs() <= bound).all())
