"""Hypotheses about wrong reading: each says what a query would read, and the textbook computes what would come of it.

The one that reproduces what the engine has really computed, row by row and within rounding, is what happened.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvine.evidence.traps.bench import Row
from kvine.evidence.traps.scene import Candidates, Hypothesis, Scene
from kvine.evidence.traps.textbook import Reading

_Readings = Callable[[Scene, Row], Candidates]
_Place = Callable[[Scene, Row], int]
RECTANGLES = (64, 128, 256, 512, 1024, 2048)  # widths to which batches are commonly padded
TOLERANCE = 16.0  # bounds that a hypothesis may be off, where the symptom is as many times larger
ROWS = 32  # that a hypothesis has to reproduce; more would only take longer


def explain_reads(scene: Scene, wrong: Sequence[Row]) -> Hypothesis | None:
    """The first hypothesis that reproduces all wrong rows, and leaves right those that are.

    Right rows count as far as they were computed in the same way, several at once or one by one: a fault may concern
    only one of the two.
    """
    singles = {row.end - row.first == 1 for row in wrong}
    is_wrong = set(wrong)
    right = [row for row in scene.recording.rows if row not in is_wrong and (row.end - row.first == 1) in singles]
    rows = [*_spread(wrong, ROWS), *_spread(right, ROWS)]
    symptom = max(scene.residual(row, _RIGHT) for row in _spread(wrong, ROWS))
    enough = max(
        1.0, min(TOLERANCE, symptom / TOLERANCE)
    )  # other sums round otherwise: only a clear fault may use that
    best: tuple[float, Hypothesis] | None = None
    for hypothesis in _hypotheses(scene, wrong):
        worst = 0.0
        for row in rows:
            worst = max(worst, scene.residual(row, hypothesis))
            if worst > enough:
                break
        if worst <= enough and (
            best is None or worst < best[0] / 4
        ):  # an earlier one gives way only to a much closer one
            best = worst, hypothesis
    return None if best is None else best[1]


_RIGHT = Hypothesis("", "what has to be read", lambda scene, row: [scene.right(row)])


def _spread(rows: Sequence[Row], count: int) -> list[Row]:
    step = max(1, -(-len(rows) // count))
    return list(rows[::step])


def _hypotheses(scene: Scene, wrong: Sequence[Row]) -> Iterator[Hypothesis]:
    yield from _of_masks(scene)
    yield from _of_windows(scene)
    yield from _of_heads(scene)
    yield from _of_positions()
    yield from _of_sequences()
    yield from _of_padding(scene)
    yield from _of_blocks()
    yield from _of_scores(scene, wrong)


def _changed(reading: Reading, **changes: object) -> Reading:
    return Reading(**{**vars(reading), **changes})


# -- what is visible ---------------------------------------------------------------------------------------------------


def _seen(scene: Scene, row: Row) -> Tensor:
    return torch.tensor(scene.book.rules[scene.layer].visible(row.position))


def _of_masks(scene: Scene) -> Iterator[Hypothesis]:
    def own_step(scene: Scene, row: Row) -> Candidates:
        yield scene.right(row).keep(_seen(scene, row) >= row.first)

    def only_itself(scene: Scene, row: Row) -> Candidates:
        yield scene.right(row).keep(_seen(scene, row) == row.position)

    def all_but_itself(scene: Scene, row: Row) -> Candidates:
        if row.position:
            yield scene.right(row).keep(_seen(scene, row) < row.position)

    def whole_step(scene: Scene, row: Row) -> Candidates:
        k, v = scene.keys(row.text, torch.cat((_seen(scene, row), torch.arange(row.position + 1, row.end))))
        yield scene.right(row).with_keys(k, v)

    def rolled_back(scene: Scene, row: Row) -> Candidates:
        k, v = scene.keys(row.text, _seen(scene, row))
        for old, length in _earlier_lives(scene, row):
            block_end = -(-row.end // scene.block_size) * scene.block_size
            for end in {min(length, block_end), length}:
                old_k, old_v = scene.keys(old, range(row.end, end))
                yield scene.right(row).with_keys(torch.cat((k, old_k)), torch.cat((v, old_v)))
                # A copy of the block holds only what was left, and zeros after it.
                zeros = torch.zeros_like(old_k)
                yield scene.right(row).with_keys(torch.cat((k, zeros)), torch.cat((v, zeros)))

    yield Hypothesis("mask-without-history", "each step sees only itself", own_step)
    yield Hypothesis("mask-without-history", "each token sees only itself", only_itself)
    yield Hypothesis("own-token-not-seen", "all but the query's own token", all_but_itself)
    yield Hypothesis("future-tokens-seen", "all tokens of its step", whole_step)
    yield Hypothesis("rolled-back-token-returns", "what was cropped stays visible", rolled_back, may_be_right=True)


def _earlier_lives(scene: Scene, row: Row) -> Iterator[tuple[int, int]]:
    """The texts that crops have made a row's text from, and how long they were."""
    text = scene.recording.parents[row.text]
    while text is not None:
        yield text, len(scene.recording.texts[text])
        text = scene.recording.parents[text]


def _of_windows(scene: Scene) -> Iterator[Hypothesis]:
    rule = scene.book.rules[scene.layer]
    if rule.window is None:
        return
    for change, kind in ((-1, "window-one-short"), (1, "window-one-long"), (-2, "window-wrong"), (2, "window-wrong")):
        readings = _other_window(rule.window + change)
        yield Hypothesis(kind, f"a window of {rule.window + change}", readings, may_be_right=True)
    yield Hypothesis("window-wrong", "no window at all", _other_window(1 << 40))

    def sinks_in_place(scene: Scene, row: Row) -> Candidates:
        yield _changed(scene.right(row), sink_position=row.position)

    def no_sinks(scene: Scene, row: Row) -> Candidates:
        first = row.position + 1 - (rule.window or 0)
        yield scene.right(row).keep(_seen(scene, row) >= first)

    def sinks_beside(shift: int) -> _Readings:
        def readings(scene: Scene, row: Row) -> Candidates:
            right = scene.right(row)
            yield _changed(right, sink_position=right.sink_position + shift)

        return readings

    if rule.moves_sinks:
        for shift in (1, -1):
            detail = f"sinks are read from {shift:+d} beside the query's place in the cache"
            yield Hypothesis("sinks-off-by-one", detail, sinks_beside(shift), may_be_right=True)
    yield Hypothesis("sinks-not-moved", "sinks are read from the query's own position", sinks_in_place)
    yield Hypothesis("sinks-forgotten", "only the window is read", no_sinks)


def _other_window(window: int) -> _Readings:
    def readings(scene: Scene, row: Row) -> Candidates:
        rule = scene.book.rules[scene.layer]
        first = max(0, row.position + 1 - window)
        seen = torch.tensor([*range(min(rule.sinks, first)), *range(first, row.position + 1)], dtype=torch.long)
        k, v = scene.keys(row.text, seen)
        right = scene.right(row).with_keys(k, v, seen < rule.sinks)
        yield right
        if rule.moves_sinks:
            yield _changed(right, sink_position=min(row.position, rule.sinks + window - 1))

    return readings


# -- who is read -------------------------------------------------------------------------------------------------------


def _of_heads(scene: Scene) -> Iterator[Hypothesis]:
    config = scene.book.config
    query_heads = torch.arange(config.num_heads)
    maps = {
        "kv-heads-tiled": query_heads % config.num_kv_heads,
        "head-map-wrong": scene.book.heads.flip(0),
    }
    right = scene.book.heads
    for kind, heads in maps.items():
        if not torch.equal(heads, right):
            yield Hypothesis(kind, f"KV heads {heads.tolist()}", _other_heads(heads))
    for head in range(config.num_kv_heads if config.num_kv_heads > 1 else 0):
        yield Hypothesis("head-map-wrong", f"all read KV head {head}", _other_heads(torch.full_like(right, head)))
    for shift in range(1, config.num_kv_heads):
        heads = (right + shift) % config.num_kv_heads
        yield Hypothesis("head-map-wrong", f"KV heads {heads.tolist()}", _other_heads(heads))


def _other_heads(heads: Tensor) -> _Readings:
    def readings(scene: Scene, row: Row) -> Candidates:
        yield _changed(scene.right(row), heads=heads)

    return readings


def _of_positions() -> Iterator[Hypothesis]:
    def at(name: str, place: _Place) -> Hypothesis:
        def readings(scene: Scene, row: Row) -> Candidates:
            where = place(scene, row)
            yield _changed(scene.right(row), position=where, sink_position=where)

        return Hypothesis("query-position-wrong", name, readings)

    yield at("queries at position 0", lambda scene, row: 0)
    yield at("queries at position 1", lambda scene, row: 1)
    for shift in (-2, -1, 1, 2):
        yield at(f"queries {shift:+d} from their position", lambda scene, row, shift=shift: row.position + shift)  # type: ignore[misc]
    yield at("queries counted from the start of their step", lambda scene, row: row.position - row.first)
    yield at("queries counted from the start of their block", lambda scene, row: row.position % scene.block_size)


def _of_sequences() -> Iterator[Hypothesis]:
    def past_of(texts: Callable[[Scene, Row], Sequence[int]]) -> _Readings:
        """The past of another text as far as it goes, then the query's own."""
        return lambda scene, row: (_borrowed(scene, row, text) for text in texts(scene, row))

    def branches(scene: Scene, row: Row) -> list[int]:
        return [text for text in scene.neighbours(row) if scene.related(text, row.text)]

    yield Hypothesis("stale-fork-table", "the past of another branch", past_of(branches), may_be_right=True)
    yield Hypothesis("reads-another-sequence", "the past of a neighbour", past_of(Scene.neighbours), may_be_right=True)


def _borrowed(scene: Scene, row: Row, text: int) -> Reading:
    seen = _seen(scene, row)
    borrowed = seen[seen < scene.recording.lengths[row.step][text]]
    own_k, own_v = scene.keys(row.text, seen[len(borrowed) :])
    k, v = scene.keys(text, borrowed)
    return scene.right(row).with_keys(torch.cat((k, own_k)), torch.cat((v, own_v)))


def _of_padding(scene: Scene) -> Iterator[Hypothesis]:
    def padded(width: int | None, first: bool) -> _Readings:
        def readings(scene: Scene, row: Row) -> Candidates:
            right = scene.right(row)
            longest = max(scene.recording.lengths[row.step].values())
            target = longest if width is None else -(-longest // width) * width
            count = max(0, target - row.end)
            for position in {0, _first_held(scene, row)} if first else {0}:
                keys, values = scene.keys(row.text, [position] * count)
                if not first:
                    keys, values = torch.zeros_like(keys), torch.zeros_like(values)
                yield right.with_keys(torch.cat((right.keys, keys)), torch.cat((right.values, values)))

        return readings

    for width in (None, scene.block_size, *RECTANGLES):
        name = "the longest text" if width is None else f"a multiple of {width}"
        yield Hypothesis("padding-attended", f"empty places up to {name}", padded(width, first=False))
        yield Hypothesis("left-padding-attended", f"first tokens up to {name}", padded(width, first=True))


def _first_held(scene: Scene, row: Row) -> int:
    """The first position whose block a window has not let go of when a row's step began."""
    window = scene.book.rules[scene.layer].window
    return 0 if window is None else max(0, (row.first - window + 1) // scene.block_size * scene.block_size)


def _of_blocks() -> Iterator[Hypothesis]:
    def without_a_block(scene: Scene, row: Row) -> Candidates:
        blocks = _seen(scene, row) // scene.block_size
        for block in range(row.position // scene.block_size + 1):
            if bool((blocks != block).any()):
                yield scene.right(row).keep(blocks != block)

    def without_a_token(scene: Scene, row: Row) -> Candidates:
        seen = _seen(scene, row)
        for position in range(row.position):
            yield scene.right(row).keep(seen != position)

    def exchanged_blocks(scene: Scene, row: Row) -> Candidates:
        seen, size = _seen(scene, row), scene.block_size
        last = row.position // size
        for wrong in range(last + 1):  # its own too, of which it reads as much as it should
            for instead in range(last):
                if wrong != instead:
                    moved = torch.where(seen // size == wrong, seen + (instead - wrong) * size, seen)
                    k, v = scene.keys(row.text, moved)
                    yield scene.right(row).with_keys(k, v)

    yield Hypothesis("history-partly-missing", "a block is not read", without_a_block, may_be_right=True)
    yield Hypothesis("history-partly-missing", "a token is not read", without_a_token, may_be_right=True)
    yield Hypothesis("block-table-wrong", "a block in the place of another", exchanged_blocks, may_be_right=True)


# -- how scores and values are computed --------------------------------------------------------------------------------


def _of_scores(scene: Scene, wrong: Sequence[Row]) -> Iterator[Hypothesis]:
    def shifted_values(shift: int) -> _Readings:
        def readings(scene: Scene, row: Row) -> Candidates:
            right = scene.right(row)
            yield _changed(right, values=right.values.roll(shift, 0))

        return readings

    def scaled(scale: float) -> _Readings:
        return lambda scene, row: [_changed(scene.right(row), scale=scale)]

    right = scene.book.config.attention_scale
    if right != 1:
        yield Hypothesis("scale-missing", "scores without a scale", scaled(1.0))
    for shift in (1, -1):
        yield Hypothesis("values-misaligned", f"values {shift:+d} beside their keys", shifted_values(shift))
    if scene.book.config.attention_softcap is not None:
        yield Hypothesis(
            "softcap-missing", "no soft cap", lambda scene, row: [_changed(scene.right(row), softcap=None)]
        )
    scale = _fitted_scale(scene, wrong)
    yield Hypothesis("scale-wrong", f"scores times {scale / right:.4g} of what they should be", scaled(scale))


def _fitted_scale(scene: Scene, wrong: Sequence[Row]) -> float:
    """The scale that comes closest to what the row with the longest past has computed, by golden section."""
    row = max(wrong, key=lambda r: r.position)
    right = scene.right(row)

    def distance(factor: float) -> float:
        changed = _changed(right, scale=right.scale * factor)
        out = scene.book.block_output(scene.layer, scene.book.attend(scene.layer, changed)[None])[0]
        return float((out.double() - scene.actual(row).double()).square().sum())

    grid = [2 ** (step / 4) for step in range(-16, 17)]
    centre = min(range(len(grid)), key=lambda i: distance(grid[i]))
    low, high = grid[max(0, centre - 1)], grid[min(len(grid) - 1, centre + 1)]
    for _ in range(40):
        third = (high - low) / 3
        if distance(low + third) < distance(high - third):
            high -= third
        else:
            low += third
    return right.scale * (low + high) / 2
