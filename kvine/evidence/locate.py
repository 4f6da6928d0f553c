"""Where a path first leaves the oracle: model call, layer, tensor and position, found by comparing hidden states.

That a logit is wrong says little about why. The first tensor that is wrong says nearly all of it.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvine.cache.pool import KVPool
from kvine.cache.sequence import MISSING
from kvine.engine.cache_free import DenseRunner
from kvine.engine.engine import EngineParts
from kvine.engine.runner import Runner
from kvine.engine.scheduler import Scheduled
from kvine.evidence.exact_products import with_exact_products
from kvine.evidence.row_split import split_logits
from kvine.rope import rotate

# Runs a path on the parts it is given, held to the text of the trace (see `paths.HeldSampler`).
Drive = Callable[[EngineParts], object]

MARGIN = 8.0  # twice that of logits: rows of few elements show less of their noise
LAST_PLACES = 4.0  # units in the last place that may always differ


@dataclass(frozen=True)
class Location:
    """The first tensor of a path that rounding does not explain.

    Attributes:
        step: which model call of the path, from 0.
        layer: of the tensor; -1 before the first layer and after the last.
        tensor: as `Decoder.forward` names it to an observer; `cached_k` and `cached_v`: what the cache held at this
            position, keys rotated, when the layer had attended; or `logits`.
        position: in the text, from 0; the lowest of this tensor.
        difference: the largest of an element at this position.
        bound: what rounding explains there.
    """

    step: int
    layer: int
    tensor: str
    position: int
    difference: float
    bound: float


class StateTrace:
    """What the oracle computes at every position of a text, and how far another order of sums moves it.

    Memory: all named tensors of the whole text, 0.6 MB a token for SmolLM2-135M in fp32. Meant for short texts.

    Args:
        dense: the cache-free path.
        token_ids: the whole text that paths will be held to.
        num_last: positions at its end whose logits are compared; in the control each is a row of its own.
        dtype: the model's compute dtype.
    """

    @torch.inference_mode()
    def __init__(self, dense: DenseRunner, token_ids: Sequence[int], num_last: int, dtype: torch.dtype) -> None:
        self.token_ids = tuple(token_ids)
        self.dtype = dtype
        self._first_logits = len(self.token_ids) - num_last
        self._states: dict[tuple[str, int], Tensor] = {}  # [N, width]
        self._shares: dict[tuple[str, int], float] = {}
        self._layers = dense.attention.layers
        everywhere = slice(0, len(self.token_ids))
        ids = torch.tensor(self.token_ids, device=dense.device)
        positions = torch.arange(len(ids), device=dense.device)
        hidden = dense.decoder.forward(
            ids,
            positions,
            dense.attention,
            lambda name, layer, tensor: self._keep(everywhere, name, layer, tensor),
        )
        self._states["logits", -1] = dense.decoder.logits(hidden[self._first_logits :])
        control = split_logits(dense, self.token_ids, num_last, dtype, self._measure)
        self._widen("logits", -1, slice(0, num_last), control.to(hidden.device))
        if (exact := with_exact_products(dense)) is not None:
            hidden = exact.decoder.forward(ids, positions, exact.attention, partial(self._measure, everywhere))
            self._widen("logits", -1, slice(0, num_last), exact.decoder.logits(hidden[self._first_logits :]))

    def first_wrong(self, name: str, layer: int, rows: Tensor, positions: Sequence[int]) -> Location | None:
        """The lowest of `positions` at which a path's rows [n, ...] differ by more than rounding; None if none does."""
        first = self._first_logits if name == "logits" else 0
        compared = [i for i, position in enumerate(positions) if position >= first]
        if not compared:
            return None
        at = torch.tensor([positions[i] - first for i in compared], device=rows.device)
        ours = self._states[name, layer][at]
        differences, scales = _compare(ours, rows[compared])
        eps = torch.finfo(rows.dtype).eps if name.startswith("cached") else 0.0  # perhaps stored more coarsely
        share = max(MARGIN * self._shares.get((name, layer), 0.0), LAST_PLACES * max(eps, torch.finfo(self.dtype).eps))
        bounds = share * scales
        wrong = [i for i in range(len(compared)) if not differences[i] <= bounds[i]]
        if not wrong:
            return None
        lowest = min(wrong, key=lambda i: positions[compared[i]])
        return Location(0, layer, name, positions[compared[lowest]], float(differences[lowest]), float(bounds[lowest]))

    def _keep(self, rows: slice, name: str, layer: int, tensor: Tensor) -> None:
        for stored, values in self._named(rows, name, layer, tensor):
            self._states[stored, layer] = values

    def _measure(self, rows: slice, name: str, layer: int, tensor: Tensor) -> None:
        for stored, values in self._named(rows, name, layer, tensor):
            self._widen(stored, layer, rows, values)

    def _named(self, rows: slice, name: str, layer: int, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """The tensor, and what a cache ought to keep of it."""
        yield name, tensor.flatten(1)
        if name == "k":
            positions = torch.arange(rows.start, rows.stop, device=tensor.device)
            yield "cached_k", rotate(tensor, *self._layers[layer].rope.cos_sin(positions)).flatten(1)
        elif name == "v":
            yield "cached_v", tensor.flatten(1)

    def _widen(self, name: str, layer: int, rows: slice, control: Tensor) -> None:
        differences, scales = _compare(self._states[name, layer][rows], control)
        share = float((differences / scales).max())
        self._shares[name, layer] = max(self._shares.get((name, layer), 0.0), share)


def locate(trace: StateTrace, parts: EngineParts, drive: Drive) -> Location | None:
    """Runs a path once more under observation, and names the first tensor that is wrong.

    First means: in the earliest model call; in it, in the order of computation (embedding; of each layer attn_norm, q,
    k, v, cached_k, cached_v, attn_out, attn_residual, mlp_out, layer_out; final_norm; logits); in the tensor, at the
    lowest position. Every row is compared whose request has read the beginning of the trace's text and nothing else,
    batch mates and forks too; a model call that pads or reorders its rows is judged by its cache and its logits.

    Args:
        trace: of the text that the path is held to.
        parts: of the engine under test.
        drive: runs the path, to its end or to an error. What earlier runs left in the cache is forgotten first.

    Returns:
        None if all of it is within rounding.
    """
    assert isinstance(parts.runner, Runner)
    parts.manager.clear()
    watched = WatchedRunner(parts.runner, trace)
    with contextlib.suppress(Exception):  # what was seen until then counts
        drive(replace(parts, runner=watched))
    return watched.found


class WatchedRunner(Runner):
    """Runs steps by another runner, and compares what it computes with a trace until something is wrong."""

    def __init__(self, inner: Runner, trace: StateTrace) -> None:
        super().__init__(inner.decoder, inner.attention, inner.manager, inner.device)
        self.found: Location | None = None
        self._inner = inner
        self._trace = trace
        self._calls = 0
        self._num_rows = 0
        self._followed: list[tuple[int, Scheduled]] = []  # first row, and what is computed from there on

    def run(self, step: Sequence[Scheduled], *, all_logits: bool = False) -> Tensor:
        """See `Runner.run`."""
        starts = [0]
        for item in step:
            starts.append(starts[-1] + item.count)
        self._num_rows = starts[-1]
        self._followed = [(row, item) for row, item in zip(starts, step, strict=False) if self._follows(item)]
        self._inner.observer = self._observe
        try:
            logits = self._inner.run(step, all_logits=all_logits)
        finally:
            self._inner.observer = self.observer
        self._compare_logits(step, starts, logits, all_logits)
        self._calls += 1
        return logits

    def make_copies(self) -> None:
        """See `Runner.make_copies`."""
        self._inner.make_copies()

    def give_back(self) -> None:
        """See `Runner.give_back`."""
        self._inner.give_back()

    def _follows(self, item: Scheduled) -> bool:
        end = item.start + item.count
        return tuple(item.request.tokens(0, end)) == self._trace.token_ids[:end]

    def _observe(self, name: str, layer: int, tensor: Tensor) -> None:
        if name == "attn_out":  # the layer's keys and values are written now, and have been read
            self._compare_cache(layer)
        if len(tensor) == self._num_rows:
            rows = [row + i for row, item in self._followed for i in range(item.count)]
            positions = [item.start + i for _, item in self._followed for i in range(item.count)]
            self._compare(name, layer, tensor[rows], positions)

    def _compare_cache(self, layer: int) -> None:
        place, size = self.attention.layers[layer], self.manager.block_size
        pool = self.attention.pools[place.group]
        if not isinstance(pool, KVPool):
            return  # what packing loses is in what the layers above see
        held: list[int] = []
        keys, values = [], []
        for _, item in self._followed:
            assert item.request.sequence is not None
            end = item.start + item.count
            table = item.request.sequence.tables[place.group][: -(-end // size)]
            live = [block for block, number in enumerate(table) if number != MISSING]
            positions = [p for block in live for p in range(block * size, min((block + 1) * size, end))]
            k, v = pool.read(place.index, [table[b] for b in live], len(positions))
            held += positions
            keys.append(k[0].transpose(0, 1).flatten(1))  # [1, H, L, D] → [L, H × D]
            values.append(v[0].transpose(0, 1).flatten(1))
        if held:
            self._compare("cached_k", layer, torch.cat(keys), held)
            self._compare("cached_v", layer, torch.cat(values), held)

    def _compare_logits(self, step: Sequence[Scheduled], starts: list[int], logits: Tensor, all_logits: bool) -> None:
        followed = {row for row, _ in self._followed}
        rows: list[int] = []
        positions: list[int] = []
        next_row = 0
        for start, item in zip(starts, step, strict=False):
            wanted = range(item.start if all_logits else item.start + item.count - 1, item.start + item.count)
            if not all_logits and not item.samples:
                continue
            if start in followed:
                rows += range(next_row, next_row + len(wanted))
                positions += wanted
            next_row += len(wanted)
        if len(logits) == next_row:
            self._compare("logits", -1, logits[rows], positions)

    def _compare(self, name: str, layer: int, rows: Tensor, positions: list[int]) -> None:
        if self.found is None and positions:
            wrong = self._trace.first_wrong(name, layer, rows.flatten(1), positions)
            self.found = None if wrong is None else replace(wrong, step=self._calls)


def _compare(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the largest difference of an element, NaN counting as infinite, and our largest element; [n] each.

    Rounding is judged against a row's own size: positions that hold most of the attention are hundreds of times larger
    than others, and a bound of theirs would hide what is wrong elsewhere.
    """
    ours, theirs = ours.double(), theirs.to(ours.device).double()
    differences = (ours - theirs).abs().nan_to_num(nan=math.inf, posinf=math.inf).amax(1)
    sizes = ours.abs().amax(1)
    return differences, sizes.clamp(min=max(float(sizes.max()) * 1e-9, torch.finfo(torch.float32).tiny))
