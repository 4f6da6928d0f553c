"""The ways of computing one text that `verify` compares, each held to the reference's text.

A path chooses greedily and is then given the token of the reference. Up to its first other choice that is plain greedy
generation; after it, the path still reads what the reference reads, so that every step can be compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvine.config import EngineConfig
from kvine.engine.cache_free import DenseRunner, cache_free_engine
from kvine.engine.engine import Engine, EngineParts
from kvine.errors import KvineError
from kvine.sampling.params import SamplingParams
from kvine.sampling.sampler import Sample, Sampler, SampleRow

Step = Callable[[int], None]  # called with the number of tokens generated so far


@dataclass(frozen=True)
class Record:
    """What a path computed: the token it chose at each step, and the logits it chose by, [n, vocabulary] fp32, CPU."""

    chosen: list[int]
    logits: Tensor


class HeldSampler(Sampler):
    """Samples as another sampler does, but gives one request the tokens of a text, and records what it chose itself.

    Args:
        sampler: the one that chooses.
        params: of the request to hold, told from its batch mates by being the same object.
        text: the tokens it is given; None lets it have its own.
        on_step: see `Step`.
    """

    def __init__(self, sampler: Sampler, params: SamplingParams, text: Sequence[int] | None, on_step: Step) -> None:
        super().__init__(sampler.vocab_size)
        self._sampler = sampler
        self._params = params
        self._text = text
        self._on_step = on_step
        self._chosen: list[int] = []
        self._logits: list[Tensor] = []

    @property
    def record(self) -> Record:
        """What has been recorded."""
        return Record(self._chosen, torch.stack(self._logits))

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sample | KvineError]:
        """See `Sampler.sample`."""
        outcomes = self._sampler.sample(logits, rows)
        for index, row in enumerate(rows):
            outcome = outcomes[index]
            if row.params is self._params and isinstance(outcome, Sample):
                self._chosen.append(outcome.token_id)
                self._logits.append(logits[index, : self.vocab_size].float().cpu().clone())
                self._on_step(len(self._chosen))
                if self._text is not None:
                    outcomes[index] = Sample(self._text[len(row.output_ids)])
        return outcomes


def run_cache_free(
    parts: EngineParts, dense: DenseRunner, prompt_ids: Sequence[int], new_tokens: int, on_step: Step
) -> Record:
    """Generates without a cache: every token computes the whole text anew. Its text is the reference."""
    params = _greedy(new_tokens)
    sampler = HeldSampler(parts.sampler, params, None, on_step)
    _run(cache_free_engine(replace(parts, sampler=sampler), dense), prompt_ids, params, [])
    return sampler.record


def run_cached(
    parts: EngineParts, config: EngineConfig, prompt_ids: Sequence[int], text: Sequence[int], on_step: Step
) -> Record:
    """Generates through the cache: the prompt at once, or in chunks of what one step takes, then token by token."""
    params = _greedy(len(text))
    sampler = HeldSampler(parts.sampler, params, text, on_step)
    _run(Engine(replace(parts, sampler=sampler), config), prompt_ids, params, [], salt="verify cached")
    return sampler.record


def run_in_company(
    parts: EngineParts, config: EngineConfig, prompt_ids: Sequence[int], text: Sequence[int], on_step: Step
) -> Record:
    """Generates through the cache in small chunks of odd length, in one batch with three other prompts.

    One of these is the first half of the prompt and comes first, so that its blocks are reused.
    """
    params = _greedy(len(text))
    sampler = HeldSampler(parts.sampler, params, text, on_step)
    chunk = max(5, len(prompt_ids) // 24) | 1
    engine = Engine(replace(parts, sampler=sampler), replace(config, max_step_tokens=chunk))
    others = [list(prompt_ids[: max(1, len(prompt_ids) // 2)]), list(reversed(prompt_ids)), list(prompt_ids[:1])]
    _run(engine, prompt_ids, params, others, salt="verify in company")
    return sampler.record


def _greedy(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=new_tokens, ignore_eos=True)


def _run(
    engine: Engine,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    others: Sequence[Sequence[int]],
    salt: str | None = None,
) -> None:
    """Runs one request among others to its end. Its salt keeps it from blocks that another path has computed."""
    held_apart = replace(params)  # equal, but another object
    ids = [engine.add(other, held_apart, salt=salt) for other in others[:1]]
    ids.append(engine.add(prompt_ids, params, salt=salt))
    ids += [engine.add(other, held_apart, salt=salt) for other in others[1:]]
    try:
        while engine.busy:
            for event in engine.step():
                if event.error is not None:
                    raise event.error
    finally:
        for request_id in ids:
            engine.abort(request_id)
