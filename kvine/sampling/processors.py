"""Logits processors: the steps between a model's logits and a draw, each a small function on one row.

Those that edit a row or pick its largest run in torch, where the logits are; probabilities are numpy's, float64 on one
thread, where a sum does not depend on how the work was split. `kvine.sampling.sampler` fixes the order.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvine.sampling.params import SamplingParams


def add_bias(logits: Tensor, bias: Mapping[int, float]) -> None:
    """Add `bias` to its ids in `logits` [V] float64, in place; -inf bans an id. Ids from V on are left out."""
    known = [(i, amount) for i, amount in bias.items() if i < len(logits)]
    ids = torch.tensor([i for i, _ in known], dtype=torch.int64, device=logits.device)
    logits[ids] += torch.tensor([amount for _, amount in known], dtype=logits.dtype, device=logits.device)


def add_penalties(logits: Tensor, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
    """Penalize tokens that occurred, in `logits` [V] float64, in place.

    The repetition penalty (arXiv:1909.05858) is for tokens of prompt and output: positive logits are divided by it,
    others multiplied. Then tokens of the output lose `frequency_penalty` per occurrence and `presence_penalty` once, as
    in OpenAI's API. `penalty_window` cuts prompt and output, one after the other, to their last n tokens first.
    """
    if params.penalty_window is not None:
        output_ids = output_ids[max(0, len(output_ids) - params.penalty_window) :]
        prompt_ids = prompt_ids[max(0, len(prompt_ids) - (params.penalty_window - len(output_ids))) :]
    if params.repetition_penalty != 1.0:
        ids, _ = _occurrences([*prompt_ids, *output_ids], logits)
        seen = logits[ids]
        logits[ids] = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = _occurrences(output_ids, logits)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty


def ban(logits: Tensor, ids: Collection[int]) -> None:
    """Make it impossible to choose these ids of `logits` [V], in place. Ids from V on are left out."""
    known = [i for i in ids if i < len(logits)]
    logits[torch.tensor(known, dtype=torch.int64, device=logits.device)] = -torch.inf


def most_likely(logits: Tensor, k: int) -> Tensor:
    """The ids of the k largest `logits` [V], unordered; of equals at the k-th place the lowest ids. -> [min(k, V)]"""
    if k >= len(logits):
        return torch.arange(len(logits), device=logits.device)
    values, ids = logits.topk(k + 1)
    if k == 0 or values[k] < values[k - 1]:
        return ids[:k]
    above = ids[values > values[k]]  # torch does not say which of equals `topk` takes
    tied = (logits == values[k]).nonzero().squeeze(1)
    return torch.cat((above, tied[: k - len(above)]))


def nucleus(scores: NDArray[np.float64], weights: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """Where the smallest set of most likely tokens is whose probability reaches `top_p` (arXiv:1904.09751).

    At least one token is kept, and of equally likely ones those that come first.

    Args:
        scores: Log-probabilities but for a constant, the largest being 0. [N]
        weights: `exp(scores)`. [N]
        top_p: 0 to 1.

    Returns:
        Indices, rising.
    """
    total = weights.sum()
    # All that lies below this weighs less than half of 1 - top_p together, so it is outside and need not be sorted.
    near = scores[weights >= (1.0 - top_p) * total / (2 * len(weights))]
    ranked = np.sort(near)[::-1]
    mass = np.cumsum(np.exp(ranked))
    count = min(int(np.searchsorted(mass, top_p * total)), len(ranked) - 1) + 1
    edge = ranked[count - 1]
    kept = scores > edge
    kept[np.flatnonzero(scores == edge)[: count - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def draw(weights: NDArray[np.float64], uniform: float) -> int:
    """The index that `uniform`, in [0, 1), falls on when the weights [N], not all 0, are laid end to end."""
    ends = np.cumsum(weights)
    # `uniform` is at most 1 - 2**-53; a float times that rounds to less than the float, so some end is always beyond.
    return int(np.searchsorted(ends, uniform * ends[-1], side="right"))


def _occurrences(ids: Sequence[int], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each different id below V and how often it occurs, beside `logits` [V]."""
    unique, counts = np.unique(np.array(ids, dtype=np.int64), return_counts=True)
    known = unique < len(logits)
    return torch.from_numpy(unique[known]).to(logits.device), torch.from_numpy(counts[known]).to(logits.device)
