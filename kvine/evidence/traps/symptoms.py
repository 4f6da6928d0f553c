"""What a recording has that the textbook has not: the wrong rows, the wrong things stored, and where they begin.

Each layer is judged by what it was given, so that neither rounding nor a fault of an earlier layer counts against it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvine.evidence.traps.bench import Recording, Row, Snapshot
from kvine.evidence.traps.textbook import Held, Pass, Textbook

# Two right computations differ by chance; few rows show only part of it. See docs/traps.md for what was measured.
MARGIN = 16.0
LAST_PLACES = 16.0  # and never less than so many units in the last place of a layer's largest value


@dataclass(frozen=True)
class Bounds:
    """How far right computations of one layer may lie apart, for each layer; NaN counts as beyond."""

    outputs: list[float]
    keys: list[float]
    values: list[float]
    logits: float


@torch.inference_mode()
def measure_bounds(book: Textbook, token_ids: Sequence[int]) -> Bounds:
    """Compares the textbook's fp64 with the same in the model's own dtype, and whole products with single rows."""
    given = book.inputs(token_ids)
    exact, plain = book.judge(given), book.judge(given, book.model.dtype)
    eps = max(torch.finfo(book.model.dtype).eps, torch.finfo(book.storage).eps)

    def last_places(x: Tensor) -> float:
        return LAST_PLACES * eps * float(x.abs().max())

    outputs = []
    for layer, (ours, theirs) in enumerate(zip(exact.outputs, plain.outputs, strict=True)):
        heads = torch.randn(8, book.config.num_heads, book.config.head_dim, generator=torch.Generator().manual_seed(0))
        at_once = book.block_output(layer, heads)
        singly = torch.cat([book.block_output(layer, row[None]) for row in heads])
        measured = max(float((ours - theirs).abs().max()), float((at_once - singly).abs().max()))
        if book.model.packings:
            measured = max(measured, float((at_once - book.block_output(layer, heads, exact=True)).abs().max()))
        outputs.append(max(MARGIN * measured, last_places(ours)))
    return Bounds(
        outputs,
        [last_places(k) for k in exact.stored_keys],
        [last_places(v) for v in exact.stored_values],
        last_places(book.model.decoder.logits(book.model.decoder.final_norm(exact.outputs[-1]))),
    )


def own_passes(book: Textbook, recording: Recording, bounds: Bounds) -> list[Pass]:
    """For each text what its layers should have made of what they were given.

    A position that no step has computed for the same beginning of a text, because something else was found for it in
    the cache, is computed by the textbook.
    """
    computed = {tuple(recording.texts[row.text][: row.position + 1]): row for row in recording.rows}
    passes = []
    for text, tokens in enumerate(recording.texts):
        ends = [row.position + 1 for row in recording.rows if row.text == text]
        ends += [s.positions[0][-1] + 1 for s in recording.snapshots if s.text == text and s.positions[0]]
        tokens = tokens[: max([*ends, recording.hits[text], 1])]
        rows = [computed.get(tuple(tokens[: position + 1])) for position in range(len(tokens))]
        whole = book.inputs(tokens) if None in rows else None

        def state(row: Row | None, position: int, layer: int, name: int, whole: object = whole) -> Tensor:
            if row is not None:
                return recording.states[row.step]["qkv"[name], layer][row.index]
            assert isinstance(whole, list)
            other: Tensor = whole[layer][name][position]
            return other

        given = [
            tuple(torch.stack([state(row, p, layer, name) for p, row in enumerate(rows)]) for name in range(3))
            for layer in range(book.config.num_layers)
        ]
        held = None if book.packing is None else _held(book, recording, text, given, bounds)
        passes.append(book.judge(given, held=held))  # type: ignore[arg-type]
    return passes


def _held(
    book: Textbook, recording: Recording, text: int, given: Sequence[tuple[Tensor, ...]], bounds: Bounds
) -> list[Held]:
    """What an engine held of a text's packed blocks when it was first seen, for each layer."""
    assert book.packing is not None
    found: list[Held] = []
    for layer, (_, k, v) in enumerate(given):
        keys, values = torch.full_like(k, torch.nan, dtype=torch.float32), torch.full_like(v, torch.nan).float()
        for snapshot in (s for s in recording.snapshots if s.text == text):
            held = torch.tensor(snapshot.positions[layer], dtype=torch.long)
            full = book.packing.num_full(len(k) if not len(held) else int(held[-1]) + 1)
            for into, there in ((keys, snapshot.keys[layer]), (values, snapshot.values[layer])):
                sealed = (held < full) & into[held].isnan().flatten(1).all(1)
                into[held[sealed]] = there[sealed].float()
        found.append((keys, values, bounds.keys[layer], bounds.values[layer]))
    return found


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
        layer: that layer; None if what is wrong comes before the first or after the last.
        fed: rows that began with another token than theirs.
        stored: what the layer holds and should not; each position of a sequence once, when it was first seen.
        reads: rows whose attention is wrong there.
        logits: rows whose logits are not those of their own last hidden state.
    """

    layer: int | None
    fed: list[Row]
    stored: list[WrongStored]
    reads: list[Row]
    logits: list[Row]

    @property
    def any(self) -> bool:
        """Whether anything is wrong."""
        return bool(self.fed or self.stored or self.reads or self.logits)

    @property
    def position(self) -> int | None:
        """The earliest wrong position, of the earliest step that shows it."""
        seen = [(w.snapshot.step, w.position) for w in self.stored]
        seen += [(r.step, r.position) for r in self.fed or self.reads]
        seen = seen or [(r.step, r.position) for r in self.logits]
        return min(seen)[1] if seen else None


@torch.inference_mode()
def find_symptoms(book: Textbook, recording: Recording, passes: Sequence[Pass], bounds: Bounds) -> Symptoms:
    """Compares a recording with what should have come of it."""
    rows = recording.rows
    decoder = book.model.decoder
    if not rows:
        return Symptoms(None, [], [], [], [])
    tokens = torch.tensor([recording.texts[row.text][row.position] for row in rows])
    fed = _differing(rows, _gather(recording, "embedding", -1), decoder.embedding(tokens), bounds.logits * 0)
    if fed:
        return Symptoms(None, fed, [], [], [])
    for layer in range(book.config.num_layers):
        right = torch.stack([passes[row.text].outputs[layer][row.position] for row in rows])
        reads = _differing(rows, _gather(recording, "attn_out", layer), right, bounds.outputs[layer])
        stored = _wrong_stored(book, recording, passes, bounds, layer)
        if reads or stored:
            return Symptoms(layer, [], stored, reads, [])
    last = decoder.logits(_gather(recording, "final_norm", -1))
    logits = torch.stack([recording.logits[row.step][row.index] for row in rows])
    return Symptoms(None, [], [], [], _differing(rows, logits, last, bounds.logits))


@torch.inference_mode()
def layers_reading_wrongly(
    book: Textbook, recording: Recording, passes: Sequence[Pass], bounds: Bounds, rows: Sequence[Row]
) -> list[int]:
    """The layers whose attention is wrong for any of these rows, each judged by the q, k and v that it was given."""
    wrong = []
    for layer in range(book.config.num_layers):
        ours = torch.stack([recording.states[row.step]["attn_out", layer][row.index] for row in rows])
        right = torch.stack([passes[row.text].outputs[layer][row.position] for row in rows])
        if _differing(rows, ours, right, bounds.outputs[layer]):
            wrong.append(layer)
    return wrong


def _gather(recording: Recording, name: str, layer: int) -> Tensor:
    return torch.stack([recording.states[row.step][name, layer][row.index] for row in recording.rows])


def _differing(rows: Sequence[Row], ours: Tensor, theirs: Tensor, bound: float) -> list[Row]:
    within = ((ours.double() - theirs.double()).abs() <= bound).flatten(1).all(1)
    return [row for row, right in zip(rows, within.tolist(), strict=True) if not right]


def _wrong_stored(
    book: Textbook, recording: Recording, passes: Sequence[Pass], bounds: Bounds, layer: int
) -> list[WrongStored]:
    found: dict[tuple[int, int], WrongStored] = {}
    for snapshot in recording.snapshots:
        held = snapshot.positions[layer]
        if not held:
            continue
        right = passes[snapshot.text]
        wrong = []
        for is_there, should_be, kept, bound in (
            (snapshot.keys, right.stored_keys, right.kept_keys, bounds.keys[layer]),
            (snapshot.values, right.stored_values, right.kept_values, bounds.values[layer]),
        ):
            should = should_be[layer]
            if book.packing is not None:  # full blocks hold what was kept of them, the last one is exact
                full = book.packing.num_full(held[-1] + 1)
                should = torch.cat((kept[layer][:full], should[full:].float()))
            wrong.append(_rows_that_differ(is_there[layer], should[held], bound))
        for index in (wrong[0] | wrong[1]).nonzero().flatten().tolist():
            found.setdefault(
                (snapshot.text, held[index]),
                WrongStored(snapshot, index, held[index], bool(wrong[0][index]), bool(wrong[1][index])),
            )
    return list(found.values())


def _rows_that_differ(ours: Tensor, theirs: Tensor, bound: float) -> Tensor:
    """[N], true where any element of [N, H, D] is further away than rounding and the storage's last place allow."""
    last_place = theirs.double().abs() * torch.finfo(theirs.dtype).eps
    within = (ours.double() - theirs.double()).abs() <= bound + last_place
    return ~within.flatten(1).all(1)
