"""Explanations of wrong keys and values: where did what is stored come from, and how was it changed?

A stored row is a vector of dozens of numbers. If it equals another known one within rounding, chance is no explanation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvine.evidence.traps.packing import Packing
from kvine.evidence.traps.scene import Scene
from kvine.evidence.traps.symptoms import WrongStored
from kvine.evidence.traps.textbook import STORED

MORE_POSITIONS = 64  # beyond its text's end, up to which a key's rotation is searched for
ROWS = 200
COARSE = 2.0**-4  # no codec worth the name is further off, as a share of the largest value


@dataclass(frozen=True)
class Origin:
    """What one wrong row turned out to be.

    Attributes:
        name: of the explanation.
        value: its number: a position, a shift.
        text: the text that a foreign row belongs to.
    """

    name: str
    value: float = 0
    text: int = -1


@dataclass(frozen=True)
class StoredRow:
    """A wrong row, [Hkv, D] each, in fp64, beside what should be there."""

    key: Tensor
    value: Tensor
    right_key: Tensor
    right_value: Tensor
    plain_key: Tensor  # not rotated
    raw_key: Tensor  # as stored, in the stored dtype
    raw_value: Tensor


def explain_stored(scene: Scene, wrong: Sequence[WrongStored], *, reads_are_right: bool) -> tuple[str, str] | None:
    """The kind of fault that explains all wrong rows, and what was seen; None if none does.

    Args:
        scene: the layer.
        wrong: what it holds and should not.
        reads_are_right: whether attention is right there all the same.
    """
    step = max(1, -(-len(wrong) // ROWS))
    items = list(wrong[::step])
    origins = [_origin(scene, item) for item in items]
    names = {origin.name for origin in origins} - {"unwritten"}
    given = all(item.position < scene.recording.hits[item.snapshot.text] for item in items)
    if names <= {"foreign"} or (given and names <= {"foreign", "moved", "rotated"}):
        return _by_relation(scene, items, origins)
    if "unknown" in names or len(names) > 1:
        return None
    name = names.pop()
    known = [(item, origin) for item, origin in zip(items, origins, strict=True) if origin.name == name]
    kind, said = _VERDICTS[name](scene, known)
    if kind == "position-off-by-one-everywhere" and not reads_are_right:
        return "position-wrong", f"{said}, and queries are not"
    return kind, said


def _origin(scene: Scene, item: WrongStored) -> Origin:
    row = _row(scene, item)
    if not row.key.any() and not row.value.any():
        return Origin("unwritten")
    if scene.book.packing is not None and item.position < scene.book.packing.num_full(
        item.snapshot.positions[0][-1] + 1
    ):
        return _scaled(scene, scene.book.packing, item, row) or Origin("unknown")
    for explain in (_rotated, _moved, _half_moved, _paired_otherwise, _reinterpreted, _altered, _turned, _rounded):
        origin = explain(scene, item, row)
        if origin is not None:
            return origin
    return Origin("unknown")


def _row(scene: Scene, item: WrongStored) -> StoredRow:
    layer, right = scene.layer, scene.passes[item.snapshot.text]
    raw_key, raw_value = item.snapshot.keys[layer][item.index], item.snapshot.values[layer][item.index]
    return StoredRow(
        raw_key.double(),
        raw_value.double(),
        right.stored_keys[layer][item.position].double(),
        right.stored_values[layer][item.position].double(),
        right.keys[layer][item.position],
        raw_key,
        raw_value,
    )


def _close(scene: Scene, ours: Tensor, theirs: Tensor, bounds: Sequence[float]) -> Tensor:
    """[...], whether rows [..., Hkv, D] agree within rounding and the storage's last place."""
    last_place = theirs.abs() * torch.finfo(scene.book.storage).eps
    return ((ours - theirs).abs() <= bounds[scene.layer] + last_place).flatten(-2).all(-1)


# -- origins -----------------------------------------------------------------------------------------------------------


def _scaled(scene: Scene, packing: Packing, item: WrongStored, row: StoredRow) -> Origin | None:
    """The right codes of a packed block, with the scales and minima of another block of the text."""
    own = scene.passes[item.snapshot.text]
    layer, size, at = scene.layer, packing.size, item.position
    for other in range(at % size, packing.num_full(len(own)), size):
        fits = other != at
        for ours, stored, bounds, keys in (
            (row.key, own.stored_keys, scene.bounds.keys, True),
            (row.value, own.stored_values, scene.bounds.values, False),
        ):
            least, step, codes = packing.grid(stored[layer], keys=keys)
            taken = least[other] + step[other] * codes[at]
            # Rounding may have counted one step more or less.
            fits = fits and bool(((ours - taken).abs() <= 1.01 * step[other] + bounds[layer]).all())
        if fits:
            return Origin("scaled", other // size - at // size)
    return None


def _moved(scene: Scene, item: WrongStored, row: StoredRow) -> Origin | None:
    """Another token's row, of this text or of another."""
    own = item.snapshot.text
    for text in (own, *(t for t in range(len(scene.passes)) if t != own)):
        there = scene.passes[text]
        same = _close(scene, row.key, there.stored_keys[scene.layer].double(), scene.bounds.keys)
        same &= _close(scene, row.value, there.stored_values[scene.layer].double(), scene.bounds.values)
        places = same.nonzero().flatten().tolist()
        if places:
            nearest = min(places, key=lambda p: abs(p - item.position))
            return Origin("moved", nearest - item.position) if text == own else Origin("foreign", nearest, text)
    return None


def _half_moved(scene: Scene, item: WrongStored, row: StoredRow) -> Origin | None:
    """The right key beside another token's value."""
    if item.key_is_wrong:
        return None
    values = scene.passes[item.snapshot.text].stored_values[scene.layer].double()
    places = _close(scene, row.value, values, scene.bounds.values).nonzero().flatten().tolist()
    if not places and row.value.any():
        return None
    return Origin("half moved")


def _rotated(scene: Scene, item: WrongStored, row: StoredRow) -> Origin | None:
    """The right key, rotated to another position."""
    if item.value_is_wrong:
        return None
    positions = torch.arange(len(scene.passes[item.snapshot.text]) + MORE_POSITIONS)
    turned = scene.book.rotate(scene.layer, row.plain_key.expand(len(positions), -1, -1), positions)
    fits = _close(scene, row.key, turned, scene.bounds.keys).nonzero().flatten().tolist()
    return Origin("rotated", min(fits, key=lambda p: abs(p - item.position))) if fits else None


def _paired_otherwise(scene: Scene, item: WrongStored, row: StoredRow) -> Origin | None:
    """The right angles, with dimensions 2i and 2i + 1 as a pair."""
    if item.value_is_wrong:
        return None
    width = 2 * len(scene.book.rules[scene.layer].frequencies)
    order = torch.cat((torch.arange(0, width, 2), torch.arange(1, width, 2), torch.arange(width, row.key.shape[-1])))
    turned = scene.book.rotate(scene.layer, row.plain_key[None][..., order], torch.tensor([item.position]))[0]
    back = torch.empty_like(turned)
    back[..., order] = turned
    return Origin("interleaved") if any(_close(scene, row.key, x, scene.bounds.keys) for x in (turned, back)) else None


def _reinterpreted(scene: Scene, item: WrongStored, row: StoredRow) -> Origin | None:
    """The right bits of another dtype of the same size."""
    for dtype in STORED.values():
        if dtype == row.raw_key.dtype or dtype.itemsize != row.raw_key.dtype.itemsize:
            continue
        eps = torch.finfo(dtype).eps
        pairs = ((row.raw_key, row.right_key), (row.raw_value, row.right_value))
        if all(bool(((raw.view(dtype).double() - x).abs() <= 2 * eps * x.abs().max()).all()) for raw, x in pairs):
            return Origin("bits")
    return None


def _altered(scene: Scene, item: WrongStored, row: StoredRow) -> Origin | None:
    """The right numbers in other heads, exchanged between K and V, or times a constant."""
    heads = len(row.key)
    orders = [torch.arange(heads).roll(shift) for shift in range(heads)] + [torch.arange(heads).flip(0)]
    for key, value in ((row.right_key, row.right_value), (row.right_value, row.right_key)):
        found = [
            any(_close(scene, ours, _factor(ours, theirs[order]) * theirs[order], bounds) for order in orders)
            for ours, theirs, bounds in ((row.key, key, scene.bounds.keys), (row.value, value, scene.bounds.values))
        ]
        if all(found):
            return Origin("altered")
    return None


def _factor(ours: Tensor, theirs: Tensor) -> float:
    return float((ours * theirs).sum() / theirs.square().sum().clamp(min=1e-30))


def _rounded(scene: Scene, item: WrongStored, row: StoredRow) -> Origin | None:
    """The right numbers with fewer bits."""
    for ours, theirs in ((row.key, row.right_key), (row.value, row.right_value)):
        if bool(((ours - theirs).abs() > COARSE * theirs.abs().max()).any()):
            return None
    return Origin("rounded")


def _turned(scene: Scene, item: WrongStored, row: StoredRow) -> Origin | None:
    """The right key, its pairs turned by angles that no position explains."""
    if item.value_is_wrong:
        return None
    half = len(scene.book.rules[scene.layer].frequencies)
    ours, theirs = (x[..., :half].square() + x[..., half : 2 * half].square() for x in (row.key, row.right_key))
    bound = scene.bounds.keys[scene.layer] * 4 * float(row.right_key.abs().max())
    return Origin("turned") if bool(((ours - theirs).abs() <= bound).all()) else None


# -- from origins to a kind --------------------------------------------------------------------------------------------

_Known = Sequence[tuple[WrongStored, Origin]]


def _rotation_verdict(scene: Scene, known: _Known) -> tuple[str, str]:
    positions = {int(origin.value) for _, origin in known}
    shifts = {int(origin.value) - item.position for item, origin in known}
    alone = {row.position for row in scene.recording.rows if row.end - row.first == 1}
    said = f"keys are rotated to positions {sorted(positions)[:8]}, their own are {[i.position for i, _ in known][:8]}"
    if len(known) > 1 and positions == {0}:
        return "position-stuck-at-0", said
    if len(known) > 1 and positions == {1}:
        return "position-stuck-at-1", said
    if shifts == {1}:
        decoded_only = all(item.position in alone for item, _ in known)
        return f"position-off-by-one-{'in-decode' if decoded_only else 'everywhere'}", said
    return "position-wrong", said


def _slot_verdict(scene: Scene, known: _Known) -> tuple[str, str]:
    shifts = {int(origin.value) for _, origin in known}
    said = f"the keys and values of a position are found {', '.join(f'{-s:+d}' for s in sorted(shifts))} places from it"
    return ("slot-off-by-one" if shifts in ({1}, {-1}) else "slot-wrong"), said


def _simple(kind: str, said: str) -> Callable[[Scene, _Known], tuple[str, str]]:
    return lambda scene, known: (kind, said)


_VERDICTS: dict[str, Callable[[Scene, _Known], tuple[str, str]]] = {
    "rotated": _rotation_verdict,
    "moved": _slot_verdict,
    "half moved": _simple("values-misaligned", "keys are right, and the values beside them are other tokens' or none"),
    "interleaved": _simple("rope-pairs-interleaved", "keys equal those rotated in pairs of neighbours"),
    "turned": _simple("rotation-wrong", "keys have the right lengths in every pair, and other angles"),
    "scaled": lambda scene, known: (
        "scales-of-another-block",
        f"codes are right, with the scales of the block {', '.join(sorted({f'{int(o.value):+d}' for _, o in known}))} "
        "from their own",
    ),
    "bits": _simple("bits-reinterpreted", "read as another dtype, the stored bits are right"),
    "altered": _simple("keys-or-values-altered", "what is stored is right but for a factor or an exchange"),
    "rounded": _simple("cache-narrower-than-intended", "what is stored is right in its first bits only"),
}


def _by_relation(scene: Scene, items: Sequence[WrongStored], origins: Sequence[Origin]) -> tuple[str, str] | None:
    """Rows of other texts, or none at all: what they mean depends on how the two sequences are related."""
    recording = scene.recording
    first = min(items, key=lambda item: (item.snapshot.step, item.position))
    origin = origins[items.index(first)]
    text, position = first.snapshot.text, first.position
    found = position < recording.hits[text]
    what = f"position {position} of text {text} " + (
        "was never written" if origin.name == "unwritten" else f"holds what belongs to text {origin.text}"
    )
    unwritten, earlier = origin.name == "unwritten", _was_right(scene, first)
    if scene.related(text, origin.text):
        return "shared-block-overwritten", f"{what}, another branch of the same text"
    if earlier:
        kind = "block-reused-while-held" if found or unwritten else "batch-rows-share-cache"
        return kind, f"{what}; an earlier step still had it right"
    if found:
        kind = "published-before-filled" if unwritten else "hash-collision-trusted"
        return kind, f"{what}; it came from the cache as a hit"
    if "foreign" in {o.name for o in origins}:
        return "batch-rows-share-cache", f"{what}, in the same batch"
    return "never-written", what


def _was_right(scene: Scene, item: WrongStored) -> bool:
    """Whether an earlier snapshot of the same text held the position, which was not wrong then."""
    return any(
        s.text == item.snapshot.text and s.step < item.snapshot.step and item.position in s.positions[scene.layer]
        for s in scene.recording.snapshots
    )
