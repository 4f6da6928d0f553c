"""Generation without a cache: the same engine, with a cache that forgets at once and a runner that recomputes it all.

It is the oracle that users can compare with, and shows what a cache saves.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvine.attention.dense import DenseAttention
from kvine.cache.manager import CachedSequence, CacheManager
from kvine.config import EngineConfig
from kvine.engine.engine import Engine, EngineParts
from kvine.engine.runner import Model
from kvine.engine.scheduler import Scheduled
from kvine.models.decoder import Observer
from kvine.spans import Spans

NO_LIMIT = 1 << 62


class ForgetfulManager(CacheManager):
    """Holds nothing, so that every step finds all of a request's tokens still to compute."""

    def reserve(self, sequence: CachedSequence, num_new: int) -> bool:
        """There is always room for nothing."""
        return True

    def commit(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Forgets the tokens."""

    def fits_ever(
        self, num_tokens: int, chunk: int, num_sequences: int = 1, num_shared: int = 0, pinned: Spans = ()
    ) -> bool:
        """Nothing fits anywhere."""
        return True

    def fits_now(
        self, sequence: CachedSequence, num_tokens: int, chunk: int, num_sequences: int = 1, num_shared: int = 0
    ) -> bool:
        """Nothing fits anywhere."""
        return True


class DenseRunner:
    """Computes whole texts, one after the other.

    Args:
        decoder: the model.
        attention: the cache-free oracle.
        device: where the model is.
        all_logits: whether to compute the logits of every position, as a plain textbook loop does, and use the last.
    """

    def __init__(
        self, decoder: Model, attention: DenseAttention, device: torch.device, *, all_logits: bool = False
    ) -> None:
        self.decoder = decoder
        self.attention = attention
        self.device = device
        self.all_logits = all_logits
        self.observer: Observer | None = None

    def run(self, step: Sequence[Scheduled]) -> Tensor:
        """Logits of each request's last token, [M, vocabulary]."""
        texts = [(item.request.tokens(0, item.start + item.count), item.request.owner.pinned) for item in step]
        return torch.stack([self.logits(text, pinned, last=not self.all_logits)[-1] for text, pinned in texts])

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], pinned: Spans = (), *, last: bool = False) -> Tensor:
        """Logits of every position of one text, [N, vocabulary], or of its last one, [1, vocabulary].

        What is `pinned` stays visible whatever the windows.
        """
        ids = torch.tensor(token_ids, device=self.device)
        attention = self.attention.pinning(pinned) if pinned else self.attention
        hidden = self.decoder.forward(ids, torch.arange(len(ids), device=self.device), attention, self.observer)
        return self.decoder.logits(hidden[-1:] if last else hidden)

    def give_back(self) -> None:
        """Nothing is held."""


def cache_free_engine(parts: EngineParts, runner: DenseRunner) -> Engine:
    """An engine like the one `parts` make, but without a cache."""
    manager = ForgetfulManager(
        parts.manager.specs, budget=0, prefix_caching=False, capacities=[0] * len(parts.manager.shelves)
    )
    return Engine(replace(parts, manager=manager, runner=runner), EngineConfig(max_step_tokens=NO_LIMIT, max_running=1))
