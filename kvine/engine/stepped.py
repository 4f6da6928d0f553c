"""A cache stepped by hand: feed some tokens, get their logits, look inside, feed more."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from kvine.cache.manager import MISSING, CachedSequence, CacheManager
from kvine.config import EngineConfig
from kvine.engine.request import Request
from kvine.engine.runner import Runner
from kvine.engine.scheduler import Scheduled
from kvine.errors import ContextLengthError, RequestError
from kvine.sampling.params import SamplingParams


class SteppedCache:
    """One sequence's past in the engine's own cache, lent to the caller until `close`, or until it is forgotten.

    Args:
        runner: computes.
        config: how many tokens one model call may take.
        max_context: most tokens; None for no end.
        sequence: what it holds, of `runner`'s manager.
    """

    def __init__(
        self, runner: Runner, config: EngineConfig, max_context: int | None, sequence: CachedSequence | None = None
    ) -> None:
        self._runner = runner
        self._config = config
        self._max_context = max_context
        self._manager: CacheManager = runner.manager
        self._sequence = sequence or self._manager.open(())
        self._close = weakref.finalize(self, _free, runner, self._sequence)

    @property
    def runner(self) -> Runner:
        """Whose cache it is part of."""
        return self._runner

    def __len__(self) -> int:
        return self._sequence.num_tokens

    @property
    def tokens(self) -> list[int]:
        """The tokens whose K and V it holds."""
        return list(self._sequence.tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V in its blocks."""
        return self._manager.bytes_held(self._sequence)

    def extend(self, token_ids: Sequence[int], *, last: bool = False) -> Tensor:
        """Computes tokens after those held and keeps their K and V.

        Args:
            token_ids: at least one.
            last: logits of the last token only.

        Returns:
            [1, N, vocabulary] fp32, or [1, 1, vocabulary].

        Raises:
            RequestError: if there is nothing to compute, or the cache is closed.
            ContextLengthError: if the model's context or the cache has no room; nothing has changed then.
        """
        with self._runner.lock:
            return self._extend(self._held, token_ids, last)

    def _extend(self, sequence: CachedSequence, token_ids: Sequence[int], last: bool) -> Tensor:
        if not token_ids:
            raise RequestError("Give at least one token to compute.")
        held = len(self)
        total = held + len(token_ids)
        if self._max_context is not None and total > self._max_context:
            raise ContextLengthError(f"{total} tokens do not fit the model's context of {self._max_context}.")
        chunk = self._manager.max_chunk(total, self._config.max_step_tokens)
        if not chunk:
            raise ContextLengthError(f"The cache can never hold {total} tokens: raise kv_memory.")
        ids = [*self.tokens, *token_ids]
        request = Request(-1, ids, SamplingParams(), seed=0, namespace=b"", limit=total, chunk=chunk, limit_detail="")
        request.sequence = sequence
        logits = []
        try:
            for start in range(held, total, chunk):
                count = min(chunk, total - start)
                # Room for all of it before the first chunk is kept: a window lets go of what no crop could bring back.
                while not (self._manager.fits_now(sequence, total, chunk) and self._manager.reserve(sequence, count)):
                    if self._runner.make_room():
                        continue
                    raise ContextLengthError(f"The cache has no room for {total} tokens: raise kv_memory.")
                step = Scheduled(request, start, count)
                if not last or step.samples:
                    logits.append(self._runner.run([step], all_logits=not last))
                else:
                    self._runner.run([step])
                self._manager.commit(sequence, request.tokens(start, start + count))
        except BaseException:
            self._manager.crop(sequence, held)
            self._runner.make_copies()  # a block that was copied on write must be true before it is read again
            raise
        # Joining copies, and the logits of a long text are large: 379 MB for 1,929 tokens of SmolLM2.
        return (logits[0] if len(logits) == 1 else torch.cat(logits))[None]

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer as stored, each `[1, kv_heads, length, head_dim]`, keys rotated to their positions.

        `length` counts the positions that `positions(number)` lists: all, or what a window has left.
        """
        group, index, _ = self._place(number)
        k, v = self._runner.attention.read(group, index, self._held.tables)
        count = len(self.positions(number))
        return k[:, :, :count], v[:, :, :count]

    def positions(self, number: int) -> list[int]:
        """The positions whose K and V one layer still holds, ascending."""
        group, _, size = self._place(number)
        tables = [self._held.tables[group]]
        if (shelf := self._runner.attention.open_shelf.get(group)) is not None:
            tables.append(self._held.tables[shelf])
        return [p for p in range(len(self)) if any(table[p // size] != MISSING for table in tables)]

    def crop(self, num_tokens: int) -> int:
        """Forgets all but the first num_tokens tokens; returns how many are left, fewer where a window lost some.

        Raises:
            RequestError: if num_tokens is negative: it counts what stays, not what goes.
        """
        if num_tokens < 0:
            raise RequestError(f"crop takes the number of tokens that stay, 0 or more, not {num_tokens}.")
        with self._runner.lock:
            return self._manager.crop(self._held, num_tokens)

    def fork(self) -> "SteppedCache":
        """A second cache with the same past; blocks are shared until one of the two writes."""
        with self._runner.lock:
            return SteppedCache(self._runner, self._config, self._max_context, self._manager.fork(self._held))

    def close(self) -> None:
        """Frees what it holds."""
        self._close()

    @property
    def _held(self) -> CachedSequence:
        if not self._close.alive:
            raise RequestError("This cache is closed: begin a new one.")
        return self._sequence

    def _place(self, number: int) -> tuple[int, int, int]:
        layers = self._runner.attention.layers
        if not 0 <= number < len(layers):
            raise RequestError(f"The model has layers 0 to {len(layers) - 1}, and no layer {number}.")
        place = layers[number]
        return place.group, place.index, self._manager.block_size


def _free(runner: Runner, sequence: CachedSequence) -> None:
    with runner.lock:  # whoever drops a cache may not be the thread that is in mid-step
        runner.manager.release(sequence, keep_tail=False)
        runner.give_back()
