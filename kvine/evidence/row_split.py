"""The cache-free computation cut into rows in another way: a second right answer, to measure rounding by.

A fault of the cache cannot hide in it, because no cache, block or backend takes part.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from kvine.attention.dense import DenseAttention
from kvine.engine.cache_free import DenseRunner

Witness = Callable[[slice, str, int, Tensor], None]  # positions of the rows, then what an `Observer` is told

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


@torch.inference_mode()
def whole_logits(dense: DenseRunner, token_ids: Sequence[int], num_last: int) -> Tensor:
    """Logits of a text's last positions, [num_last, vocabulary] fp32 on the CPU, the whole text in one call."""
    ids = torch.tensor(token_ids, device=dense.device)
    hidden = dense.decoder.forward(ids, torch.arange(len(ids), device=dense.device), dense.attention)
    return dense.decoder.logits(hidden[-num_last:]).cpu()


@torch.inference_mode()
def split_logits(
    dense: DenseRunner,
    token_ids: Sequence[int],
    num_last: int,
    dtype: torch.dtype,
    witness: Witness | None = None,
) -> Tensor:
    """Logits of a text's last positions, [num_last, vocabulary] fp32 on the CPU, without a cache.

    Each of these positions goes through the layers as a single row, as a decode step does, and what precedes them in
    two parts; the parts meet in attention, which is that of the cache-free oracle in the next wider precision.

    Args:
        dense: the cache-free path.
        token_ids: the whole text.
        num_last: positions wanted, from the end.
        dtype: the model's compute dtype.
        witness: told of every named tensor of every part.
    """
    head = len(token_ids) - num_last
    sizes = [size for size in (head // 2, head - head // 2, *[1] * num_last) if size]
    ids = torch.tensor(token_ids, device=dense.device)
    positions = torch.arange(len(ids), device=dense.device)
    meeting = _Meeting(dense.attention, len(sizes), WIDER[dtype])

    @torch.inference_mode()  # a mode of the calling thread
    def compute(part: int) -> Tensor:
        rows = slice(sum(sizes[:part]), sum(sizes[: part + 1]))
        with meeting.turn_of(part):
            hidden = dense.decoder.forward(
                ids[rows],
                positions[rows],
                lambda layer, q, k, v: meeting.attend(part, layer, q, k, v),
                None if witness is None else lambda name, layer, tensor: witness(rows, name, layer, tensor),
            )
            return dense.decoder.logits(hidden).cpu() if part >= len(sizes) - num_last else hidden

    with ThreadPoolExecutor(len(sizes)) as threads:
        parts = list(threads.map(compute, range(len(sizes))))
    return torch.cat(parts[-num_last:])


class _Meeting:
    """Where the parts of a text wait for each other, once a layer. They compute in turn, never two at a time."""

    def __init__(self, attention: DenseAttention, num_parts: int, wider: torch.dtype) -> None:
        self._attention = attention
        self._num_parts = num_parts
        self._wider = wider
        self._given: list[tuple[Tensor, Tensor, Tensor]] = []
        self._out: Sequence[Tensor] = ()
        self._turn = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @contextmanager
    def turn_of(self, part: int) -> Iterator[None]:
        """Waits for a part's first turn, and hands on its last."""
        self._wait_for(part)
        try:
            yield
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            self._hand_on()

    def attend(self, part: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`attend` of one part: gives its rows, lets the others give theirs, and returns its rows of the result."""
        self._given.append((q, k, v))
        if part == self._num_parts - 1:  # all rows are there
            whole = [torch.cat(rows).to(self._wider) for rows in zip(*self._given, strict=True)]  # q, k, v: [N, H, D]
            out = self._attention(layer, *whole).to(q.dtype)
            self._out = torch.split(out, [len(given[0]) for given in self._given])
            self._given = []
        self._hand_on()
        self._wait_for(part)
        return self._out[part]

    def _wait_for(self, part: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._turn == part)
        if self._error is not None:
            raise RuntimeError("another part of this text failed") from self._error

    def _hand_on(self) -> None:
        with self._changed:
            self._turn = (self._turn + 1) % self._num_parts
            self._changed.notify_all()
