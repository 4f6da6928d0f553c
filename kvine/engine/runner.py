"""Turns a step into one model call: block tables into a ragged batch, hidden states into the logits that are wanted."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvine.attention.base import Batch, GroupBatch
from kvine.attention.cached import CachedAttention
from kvine.cache.manager import CacheManager
from kvine.cache.pool import KVPool
from kvine.engine.fused import FusedDecoder
from kvine.engine.scheduler import Scheduled
from kvine.models.decoder import Attend, Observer
from kvine.spans import Spans


class Model(Protocol):
    """What a runner asks of a decoder."""

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, observer: Observer | None = None) -> Tensor:
        """[N] → hidden states [N, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] → [M, vocabulary], fp32."""
        ...


class Runner:
    """Runs steps on a decoder and the cache's memory.

    Args:
        decoder: the model.
        attention: over the pools that `manager` hands out.
        manager: whose copies are made before anything is written.
        device: where the model is.
        fused: the same model for steps of single queries, where nobody observes.
    """

    def __init__(
        self,
        decoder: Model,
        attention: CachedAttention,
        manager: CacheManager,
        device: torch.device,
        fused: FusedDecoder | None = None,
    ) -> None:
        self.decoder = decoder
        self.attention = attention
        self.manager = manager
        self.device = device
        self.fused = fused
        self.lock = threading.RLock()  # held by whoever changes the cache or what is in it
        self.observer: Observer | None = None
        self.make_room: Callable[[], bool] = lambda: False  # has somebody idle let go of blocks, if there is anybody

    @torch.inference_mode()
    def run(self, step: Sequence[Scheduled], *, all_logits: bool = False) -> Tensor:
        """Computes a step whose blocks are reserved.

        Args:
            step: what to compute.
            all_logits: logits of every token rather than of those that are sampled.

        Returns:
            [M, vocabulary] fp32, in the order of `step`.
        """
        self.make_copies()
        if self.fused is not None and self.observer is None and self.fused.takes(step):
            return self.fused.run(step, all_logits=all_logits)
        batch = self.batch(step, all_logits=all_logits)
        hidden = self.decoder.forward(batch.input_ids, batch.positions, self.attention.step(batch), self.observer)
        return self.decoder.logits(hidden[batch.logits_index])

    def make_copies(self) -> None:
        """Makes the copies that copy on write has asked for since the last call."""
        for copy in self.manager.take_copies():
            pool = self.attention.pools[copy.shelf]
            assert isinstance(pool, KVPool), "a packed block is never written to"
            pool.copy([copy])

    def give_back(self) -> None:
        """Returns the memory of blocks that hold nothing to the system."""
        for shelf, pool in enumerate(self.attention.pools):
            pool.give_back(self.manager.take_freed(shelf))

    def batch(self, step: Sequence[Scheduled], *, all_logits: bool = False) -> Batch:
        """The ragged batch of a step."""
        ids: list[int] = []
        positions: list[int] = []
        starts = [0]
        lengths: list[int] = []
        wanted: list[int] = []
        pinned: list[Spans] = []
        for item in step:
            assert item.request.sequence is not None
            pinned.append(item.request.sequence.pinned)
            end = item.start + item.count
            ids += item.request.tokens(item.start, end)
            positions += range(item.start, end)
            starts.append(len(ids))
            lengths.append(end)
            if all_logits:
                wanted += range(starts[-2], starts[-1])
            elif item.samples:
                wanted.append(len(ids) - 1)
        groups = tuple(
            self._group(group, step, np.array(positions), starts) for group in range(len(self.attention.backends))
        )
        return Batch(
            self._tensor(ids),
            self._tensor(positions),
            starts,
            lengths,
            groups,
            self._tensor(wanted),
            pinned if any(pinned) else (),
        )

    def _group(self, group: int, step: Sequence[Scheduled], positions: np.ndarray, starts: list[int]) -> GroupBatch:
        if (shelf := self.attention.open_shelf.get(group)) is not None:
            return GroupBatch(self._tables(step, group), self._tensor([]), self._tables(step, shelf))
        size = self.manager.block_size
        tables = []
        slots = np.empty_like(positions)
        for r, item in enumerate(step):
            assert item.request.sequence is not None
            table = item.request.sequence.tables[group]
            rows = slice(starts[r], starts[r + 1])
            at = positions[rows]
            first = int(at[0]) // size
            written = np.array(table[first : int(at[-1]) // size + 1])
            slots[rows] = written[at // size - first] * size + at % size
            tables.append(table)
        return GroupBatch(tables, self._tensor(slots))

    @staticmethod
    def _tables(step: Sequence[Scheduled], shelf: int) -> list[list[int]]:
        tables = []
        for item in step:
            assert item.request.sequence is not None
            tables.append(item.request.sequence.tables[shelf])
        return tables

    def _tensor(self, values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.long).to(self.device)
