"""The sampler: a batch of logits in, one token or one error for each row out.

The only place that says in which order the options of a request apply.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvine.errors import KvineError, RequestError, StepError
from kvine.sampling import processors
from kvine.sampling.noise import uniform
from kvine.sampling.params import SamplingParams

PART = 16_384  # logits; torch splits work from 32,768 elements on


@dataclass(frozen=True)
class SampleRow:
    """What the sampler must know of the sequence that a row of logits belongs to.

    Attributes:
        params: The request's parameters.
        prompt_ids: Its prompt.
        output_ids: What it has generated; their number is the position that keys the noise.
        seed: `params.seed`, or what `fresh_seed` gave the request when it came.
        sample_index: Which of the request's samples this is, from 0.
        banned_ids: Ids that must not be chosen now: EOS and stop ids while `min_tokens` is not reached.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    seed: int
    sample_index: int = 0
    banned_ids: Collection[int] = ()


@dataclass(frozen=True)
class Sample:
    """A chosen token.

    Attributes:
        token_id: Its id.
        logprob: Its natural log-probability in the model's own distribution; None unless asked for.
        top_logprobs: The most likely ids with theirs, most likely first, the lowest id first among equals.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses one token per row. A row's outcome depends on that row alone: not on its place, nor on its batch mates.

    For each row, in this order:

    1. ids from `vocab_size` on, which only the model's padded vocabulary has, are cut off;
    2. `logit_bias` is added;
    3. `repetition_penalty`, then `presence_penalty` and `frequency_penalty` (`processors.add_penalties`);
    4. `banned_ids` are ruled out;
    5. a greedy row takes the arg-max, the lowest id among equals, and is done;
    6. `temperature` divides the logits;
    7. `top_k`, 8. `top_p`, 9. `min_p` each narrow what the one before left; equals at the edge go by the lowest id;
    10. one keyed uniform number (`noise.uniform`) is looked up in the cumulative float64 probabilities, by rising id.

    Log-probabilities are of the model's own distribution: after step 1, before all others.

    Args:
        vocab_size: ids from this one on are never sampled.
        model: its file or folder, for the errors of logits that are no numbers.
    """

    def __init__(self, vocab_size: int, model: str = "the model") -> None:
        self.vocab_size = vocab_size
        self.model = model

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sample | KvineError]:
        """Choose a token for each row.

        Args:
            logits: [M, V], V at least `vocab_size`, float32 (narrower floats are widened), on any device. Not changed.
            rows: M of them.

        Returns:
            For each row a `Sample`, or the error that ends its request, which leaves the other rows as they are:
            a `StepError` where the model's logits hold NaN or +inf or only -inf, a `RequestError` where the request's
            own bias and bans leave no token.
        """
        if logits.ndim != 2 or len(logits) != len(rows) or logits.shape[1] < self.vocab_size:
            raise ValueError(f"logits {tuple(logits.shape)} do not fit {len(rows)} rows of {self.vocab_size} ids")
        if not rows:
            return []
        logits = logits.detach()[:, : self.vocab_size].float()
        outcomes: list[Sample | KvineError] = []
        for index, (row, (best, peak)) in enumerate(zip(rows, _peaks(logits), strict=True)):
            if not math.isfinite(peak):
                outcomes.append(no_numbers(peak, self.model))
            else:
                outcomes.append(self._sample_row(logits[index], row, best))
        return outcomes

    def _sample_row(self, logits: Tensor, row: SampleRow, best: int) -> Sample | RequestError:
        """One row's outcome. `logits` [vocab_size] are the model's own, `best` is their arg-max."""
        params = row.params
        edited = logits
        if params.edits_logits or row.banned_ids:
            edited = _edited(logits, row)
            best, peak = _peaks(edited.unsqueeze(0))[0]
            if peak == -math.inf:
                return RequestError("No token is left to choose: logit_bias and min_tokens together ban all of them.")
        token_id = best if params.greedy else _drawn(edited, row)
        if params.logprobs is None:
            return Sample(token_id)
        logprob, top_logprobs = _logprobs(logits, token_id, params.logprobs)
        return Sample(token_id, logprob, top_logprobs)


def no_numbers(peak: float, model: str) -> StepError:
    """The error of logits whose maximum is `peak`, which is not finite; `model` is the file or folder they are of."""
    return StepError(
        f"The logits of {model} have no finite maximum, but {peak}: its weights are damaged, or too large for this "
        "dtype. Fetch or convert it again, or compute in fp32."
    )


def _peaks(logits: Tensor) -> list[tuple[int, float]]:
    """Arg-max (the lowest id among equals) and maximum of each row of `logits` [M, V]; NaN where a row holds one."""
    if not logits.is_cpu:
        return _device_peaks(logits)
    array = logits.numpy()  # its arg-max is vectorized; torch's, over rows, costs 20 times as much at V = 49,152
    ids = array.argmax(axis=-1)
    return list(zip(ids.tolist(), array[np.arange(len(array)), ids].tolist(), strict=True))


def _device_peaks(logits: Tensor) -> list[tuple[int, float]]:
    """`_peaks` in one transfer from the device; ids are exact in float64."""
    ids = logits.argmax(dim=-1, keepdim=True)
    both = torch.cat((ids.double(), logits.gather(1, ids).double()), dim=1)
    return [(int(token_id), peak) for token_id, peak in both.tolist()]


def _edited(logits: Tensor, row: SampleRow) -> Tensor:
    """`logits` [V] after bias, penalties and bans, in float64: a finite bias of any size stays finite."""
    edited = logits.double()
    if row.params.logit_bias:
        processors.add_bias(edited, row.params.logit_bias)
    processors.add_penalties(edited, row.params, row.prompt_ids, row.output_ids)
    if row.banned_ids:
        processors.ban(edited, row.banned_ids)
    return edited.clamp_(max=torch.finfo(edited.dtype).max)


def _drawn(logits: Tensor, row: SampleRow) -> int:
    """The token drawn from `logits` [V], whose maximum is finite."""
    params = row.params
    ids: NDArray[np.intp] | None = None  # None: all of them
    if 0 < params.top_k < len(logits):
        kept = processors.most_likely(logits, params.top_k).sort().values
        ids, logits = kept.cpu().numpy(), logits[kept]
    scores = logits.cpu().numpy().astype(np.float64)
    with np.errstate(over="ignore"):  # differences past float64 become -inf, as they should
        scores -= scores.max()
        scores /= params.temperature
    weights = np.exp(scores)  # the largest is 1
    if params.top_p < 1.0:
        kept_by_p = processors.nucleus(scores, weights, params.top_p)
        ids = kept_by_p if ids is None else ids[kept_by_p]
        scores, weights = scores[kept_by_p], weights[kept_by_p]
    if params.min_p > 0.0:
        weights = np.where(scores >= math.log(params.min_p), weights, 0.0)
    index = processors.draw(weights, uniform(row.seed, row.sample_index, len(row.output_ids)))
    return index if ids is None else int(ids[index])


def _logprobs(logits: Tensor, token_id: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log-probability of the token and of the `count` most likely ones, from the model's own `logits` [V]."""
    total = _log_sum_exp(logits)
    ids = processors.most_likely(logits, count)
    pairs = zip(ids.tolist(), logits[ids].tolist(), strict=True)
    top = sorted(((i, logit - total) for i, logit in pairs), key=lambda pair: (-pair[1], pair[0]))
    return float(logits[token_id]) - total, tuple(top)


def _log_sum_exp(logits: Tensor) -> float:
    """Natural logarithm of the sum of `exp(logits)` [V], whose maximum is finite; on any number of threads the same.

    torch's own splits the sum among its threads, and so its last bits depend on how many there are. Here torch computes
    the powers, in parts that are too short to be split and stay in the CPU's cache, and numpy adds them up.
    """
    logits = logits.cpu()
    peak = float(logits.max())
    parts = (logits[start : start + PART] for start in range(0, len(logits), PART))
    return peak + math.log(math.fsum(part.double().sub_(peak).exp_().numpy().sum() for part in parts))
