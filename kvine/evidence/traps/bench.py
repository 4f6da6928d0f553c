"""Drives an engine's cache by hand, as a scheduler does, and records what it computes and what it has stored.

This is all that an examination ever sees of an engine: hidden states through the runner's observer, logits, and the
keys and values that it lends. What texts were meant is the bench's own book-keeping, not the engine's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvine.cache.manager import MISSING, CachedSequence
from kvine.engine.engine import EngineParts
from kvine.engine.request import Request
from kvine.engine.runner import Runner
from kvine.engine.scheduler import Scheduled
from kvine.sampling.params import SamplingParams

SEEN = frozenset({"embedding", "q", "k", "v", "attn_out", "final_norm"})


@dataclass(frozen=True)
class Row:
    """One token's way through the model.

    Attributes:
        text: number of the text it belongs to, in `Recording.texts`.
        position: of the token in that text, from 0.
        step: number of the model call.
        place: of its request in the batch.
        index: of its row in the batch.
        first, end: positions of its request in this call: first … end - 1.
    """

    text: int
    position: int
    step: int
    place: int
    index: int
    first: int
    end: int


@dataclass(frozen=True)
class Snapshot:
    """What one sequence's cache held after a step.

    Attributes:
        text: number of its text.
        step: number of the model call.
        positions: for each layer the positions that it still held.
        keys, values: for each layer, [held, Hkv, D], as stored.
    """

    text: int
    step: int
    positions: list[list[int]]
    keys: list[Tensor]
    values: list[Tensor]


@dataclass
class Recording:
    """Everything that one probe has shown of an engine.

    Attributes:
        texts: what was meant to be in each sequence; a crop begins a new text.
        parents: for each text the text that a crop or a fork has made it from.
        hits: for each text the tokens that its sequence found in the cache.
        rows: all tokens computed, in order.
        states: for each step what the observer saw of `SEEN`, by name and layer, [N, ...].
        logits: for each step, [N, vocabulary].
        snapshots: after each step, of every live sequence.
        lengths: for each step the texts that were alive and their lengths after it.
        wrong_lengths: texts whose sequences held more than they should: the length meant, and the length held.
        error: what ended the probe early.
    """

    texts: list[list[int]] = field(default_factory=list)
    parents: list[int | None] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    states: list[dict[tuple[str, int], Tensor]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    lengths: list[dict[int, int]] = field(default_factory=list)
    wrong_lengths: dict[int, tuple[int, int]] = field(default_factory=dict)
    error: Exception | None = None


@dataclass
class _Live:
    sequence: CachedSequence
    text: int
    tokens: list[int]  # meant, computed or not


class WrongLengthError(Exception):
    """A sequence holds another number of tokens than it was asked to."""


class Bench:
    """Sequences by name over one engine's parts.

    Args:
        parts: of the engine under examination.
        snapshots: whether to read everything stored after each step.
    """

    def __init__(self, parts: EngineParts, *, snapshots: bool = True) -> None:
        assert isinstance(parts.runner, Runner)
        self.runner = parts.runner
        self.manager = parts.manager
        self.recording = Recording()
        self._namespace = parts.namespace("trap lab")
        self._snapshots = snapshots
        self._live: dict[str, _Live] = {}
        self._states: dict[tuple[str, int], Tensor] = {}

    def open(self, name: str, tokens: Sequence[int]) -> int:
        """Begins a sequence that is to hold `tokens`; returns how many of them the cache has already."""
        sequence = self.manager.open(tokens, self._namespace)
        self._live[name] = _Live(sequence, self._new_text(tokens, None), list(tokens))
        self.recording.hits[-1] = sequence.num_tokens
        return sequence.num_tokens

    def append(self, name: str, *tokens: int) -> None:
        """More tokens that a sequence is to hold."""
        live = self._live[name]
        live.tokens += tokens
        self.recording.texts[live.text] = list(live.tokens)

    def feed(self, **counts: int) -> dict[str, Tensor]:
        """One model call: computes so many of each sequence's next tokens; returns the logits of each one's last."""
        step = []
        for name, count in counts.items():
            live = self._live[name]
            assert self.manager.reserve(live.sequence, count), "the bench's cache is too small"
            step.append(Scheduled(self._request(live), live.sequence.num_tokens, count))
        self._states = {}
        observed, self.runner.observer = self.runner.observer, self._observe
        try:
            logits = self.runner.run(step, all_logits=True)
        finally:
            self.runner.observer = observed
        self._record(list(counts), step, logits)
        ends = torch.tensor(list(counts.values())).cumsum(0) - 1
        return {name: logits[end].float() for name, end in zip(counts, ends.tolist(), strict=True)}

    def catch_up(self, name: str, chunk: int | None = None) -> Tensor:
        """Computes all that a sequence is to hold and does not yet, in chunks; returns the last logits."""
        live = self._live[name]
        logits = None
        while (left := len(live.tokens) - live.sequence.num_tokens) > 0:
            logits = self.feed(**{name: min(left, chunk or left)})[name]
        assert logits is not None, "there was nothing to compute"
        return logits

    def fork(self, name: str, twin: str) -> None:
        """A second sequence with the same past."""
        live = self._live[name]
        sequence = self.manager.fork(live.sequence)
        tokens = live.tokens[: sequence.num_tokens]
        self._live[twin] = _Live(sequence, self._new_text(tokens, live.text), tokens)
        self.recording.hits[-1] = self.recording.hits[live.text]

    def crop(self, name: str, num_tokens: int) -> None:
        """Cuts a sequence; what a window has already lost is left to be computed again.

        Raises:
            WrongLengthError: if the sequence keeps more than it was told.
        """
        live = self._live[name]
        self.manager.crop(live.sequence, num_tokens)
        hits, parent = self.recording.hits[live.text], live.text
        live.tokens = live.tokens[:num_tokens]
        live.text = self._new_text(live.tokens, parent)
        self.recording.hits[-1] = min(hits, live.sequence.num_tokens)
        self._check_length(live, most=num_tokens)

    def release(self, name: str) -> None:
        """Ends a sequence."""
        self.manager.release(self._live.pop(name).sequence)

    def close(self) -> None:
        """Ends all sequences."""
        for name in list(self._live):
            self.release(name)

    def _new_text(self, tokens: Sequence[int], parent: int | None) -> int:
        recording = self.recording
        recording.texts.append(list(tokens))
        recording.parents.append(parent)
        recording.hits.append(0)
        return len(recording.texts) - 1

    def _check_length(self, live: _Live, *, most: int) -> None:
        if live.sequence.num_tokens > most:
            self.recording.wrong_lengths[live.text] = (most, live.sequence.num_tokens)
            raise WrongLengthError(f"a sequence of {most} tokens holds {live.sequence.num_tokens}")

    @staticmethod
    def _request(live: _Live) -> Request:
        count = len(live.tokens)
        params = SamplingParams()
        request = Request(-1, live.tokens, params, seed=0, namespace=b"", limit=count, chunk=count, limit_detail="")
        request.sequence = live.sequence
        return request

    def _observe(self, name: str, layer: int, tensor: Tensor) -> None:
        if name in SEEN:
            self._states[name, layer] = tensor

    def _record(self, names: list[str], step: list[Scheduled], logits: Tensor) -> None:
        recording = self.recording
        number, index = len(recording.logits), 0
        for place, (name, item) in enumerate(zip(names, step, strict=True)):
            live = self._live[name]
            end = item.start + item.count
            for position in range(item.start, end):
                recording.rows.append(Row(live.text, position, number, place, index, item.start, end))
                index += 1
            self.manager.commit(live.sequence, live.tokens[item.start : end])
            self._check_length(live, most=end)
        recording.states.append(self._states)
        recording.logits.append(logits)
        recording.lengths.append({live.text: live.sequence.num_tokens for live in self._live.values()})
        if self._snapshots:
            for live in self._live.values():
                recording.snapshots.append(self._snapshot(live, number))

    def _snapshot(self, live: _Live, step: int) -> Snapshot:
        attention, size, length = self.runner.attention, self.manager.block_size, live.sequence.num_tokens
        snapshot = Snapshot(live.text, step, [], [], [])
        for place in attention.layers:
            tables = [table[: -(-length // size)] for table in live.sequence.tables]
            shelves = {place.group, attention.open_shelf.get(place.group, place.group)}  # packed: sealed ones, open one
            blocks = {b for shelf in shelves for b, block in enumerate(tables[shelf]) if block != MISSING}
            held = [p for p in range(length) if p // size in blocks]
            k, v = (x[:, :, : len(held)] for x in attention.read(place.group, place.index, tables))  # [1, Hkv, held, D]
            snapshot.positions.append(held)
            snapshot.keys.append(k[0].transpose(0, 1))
            snapshot.values.append(v[0].transpose(0, 1))
        return snapshot
