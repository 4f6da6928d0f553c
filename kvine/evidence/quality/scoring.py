"""What a lossy cache costs on a text: every policy reads the same tokens beside the exact cache, chunk by chunk."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from kvine.config import CacheConfig, human_bytes, parse_bytes
from kvine.engine.build import DTYPE_NAMES, choose_backend
from kvine.engine.resources import free_memory
from kvine.errors import ConfigError, KvineError, RequestError
from kvine.evidence.progress import Progress, silent
from kvine.evidence.quality.mass import LostMass, sees_less
from kvine.evidence.quality.policies import Policy, Refused, with_exact
from kvine.evidence.quality.reader import CHUNK, Reader, memory_needed
from kvine.evidence.quality.scores import Tally, logprobs, losses
from kvine.evidence.quality.texts import LEAST_TOKENS, Stretch, beginning, stretches
from kvine.llm import LLM
from kvine.models.cache_specs import cache_specs
from kvine.models.packing import count_packings

DECODE_STEPS = 16


@dataclass(frozen=True)
class Scored:
    """What one policy has come to, on the same tokens as all others.

    Attributes:
        name: of the policy.
        cache: the policy.
        bytes: of K and V held at the end of the longest stretch; the cache's own count.
        peak_bytes: the most held, in the middle of a model call too.
        ms: median time of a decode step at the end of the first stretch; None if none was timed.
        tokens: scored.
        perplexity: of them.
        kl: mean Kullback-Leibler divergence of the exact cache's next-token distribution from this one, nats.
        top1: share of tokens whose likeliest successor is that of the exact cache.
        mass_lost: share of the exact run's attention weight on keys that this policy does not show.
        mass_lost_by_layer: the same for each layer.
        endless_perplexity: of the whole text read in one go, for policies without end where the text is longer than the
            model's context; else None.
        backends: that computed its attention, one for each layer group. Another backend than the exact cache's rounds
            otherwise, which in bf16 is a divergence too.
    """

    name: str
    cache: CacheConfig
    bytes: int
    peak_bytes: int
    ms: float | None
    tokens: int
    perplexity: float
    kl: float
    top1: float
    mass_lost: float
    mass_lost_by_layer: tuple[float, ...]
    endless_perplexity: float | None = None
    backends: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """Policies beside each other.

    Attributes:
        model, dtype, device: what computed.
        context: most tokens read from an empty cache.
        stride: how far apart stretches begin.
        text_tokens: of the text that was read.
        policies: the exact one first.
        refused: those that cannot be, and why.
        packings: how many weights were packed, by type.
    """

    model: str
    dtype: str
    device: str
    context: int
    stride: int
    text_tokens: int
    policies: tuple[Scored, ...]
    refused: tuple[Refused, ...] = ()
    packings: Mapping[str, int] = field(default_factory=dict)

    def increase(self, policy: Scored) -> float:
        """By what share a policy's perplexity lies above the exact cache's."""
        return policy.perplexity / self.policies[0].perplexity - 1


@dataclass
class _Run:
    """A policy under way."""

    policy: Policy
    reader: Reader
    tally: Tally


def evaluate(
    llm: LLM,
    policies: Sequence[Policy],
    ids: Sequence[int],
    *,
    context: int | None = None,
    stride: int | None = None,
    decode_steps: int = DECODE_STEPS,
    kv_memory: int | str | None = None,
    refused: Sequence[Refused] = (),
    on_refused: Callable[[Refused], None] = lambda refused: None,
    progress: Progress = silent,
) -> Evaluation:
    """Reads a text by each policy.

    The text is cut into stretches of `context` tokens, each read from an empty cache: in chunks, and the last tokens of
    the first stretch one by one, as a generation would. Policies are read side by side, as many as memory allows.

    Args:
        llm: the model; how its own cache is kept does not matter here.
        policies: to compare; the exact cache is always the first.
        ids: of the text, without what the model's texts begin with.
        context: most tokens of a stretch; by default the whole text, or the model's context where that is less.
        stride: how far apart stretches begin; by default they do not overlap.
        decode_steps: tokens that are read one by one and timed; 0: none.
        kv_memory: bytes of K and V that all caches may take together; by default half of the free memory.
        refused: policies refused before, for the record.
        on_refused: told of each policy that this model or memory refuses, before anything runs.
        progress: told of every chunk.

    Raises:
        RequestError: for numbers that are out of range.
        ConfigError: if memory is too small for the exact cache.
    """
    if len(ids) < LEAST_TOKENS:
        raise RequestError("The text is too short: it needs a token to read and one to score.")
    begin = beginning(llm.tokenizer)
    most = llm.model.config.max_context
    context = min(len(begin) + len(ids), most) if context is None else context
    if not 2 <= context <= most:
        raise RequestError(f"--context is {context:,}: give 2 to {most:,}, what the model can read.")
    if decode_steps < 0:
        raise RequestError(f"--decode-steps is {decode_steps:,}: give 0 or more.")
    stride = context - len(begin) if stride is None else stride
    parts = stretches(begin, ids, context, stride)
    longest = max(len(part.ids) for part in parts)
    room = _room(llm, kv_memory)
    chosen, unfit = _fitting(llm, with_exact(policies), longest, room)
    for one in unfit:
        on_refused(one)
    scored: list[Scored] = []
    for group in _groups(llm, chosen, longest, room):
        scored += _read_group(llm, group, parts, longest, decode_steps, progress)
    beyond = len(begin) + len(ids) > most
    return Evaluation(
        model=llm.source.name,
        dtype=DTYPE_NAMES[llm.model.dtype],
        device=str(llm.model.device),
        context=context,
        stride=stride,
        text_tokens=len(ids),
        policies=tuple(_beyond(llm, one, [*begin, *ids], progress) if beyond else one for one in scored),
        refused=(*refused, *unfit),
        packings=count_packings(llm.model.packings),
    )


def _room(llm: LLM, kv_memory: int | str | None) -> int:
    if kv_memory is not None:
        return parse_bytes(kv_memory)
    if llm.model.device.type == "cuda":
        return int(torch.cuda.mem_get_info(llm.model.device)[0]) // 2
    return free_memory() // 2


def _fitting(llm: LLM, policies: Sequence[Policy], length: int, room: int) -> tuple[list[Policy], list[Refused]]:
    """The policies that this model, its backend and the memory can serve beside the exact cache, and the others."""
    beside = memory_needed(llm.model, policies[0].cache, length)
    fitting: list[Policy] = []
    unfit: list[Refused] = []
    for policy in policies:
        try:
            needed = memory_needed(llm.model, policy.cache, length) + beside
            for spec in cache_specs(llm.model.config, policy.cache):
                choose_backend(llm.engine_config.backend, spec, llm.model.device)
            if needed > room:
                raise ConfigError(
                    f"Beside the exact cache it takes {human_bytes(needed)} of K and V for {length:,} tokens, and "
                    f"{human_bytes(room)} may be taken: lower --context or raise --kv-memory."
                )
        except KvineError as error:
            if not fitting:  # without the exact cache there is nothing to compare with
                raise
            unfit.append(Refused(policy.name, str(error)))
        else:
            fitting.append(policy)
    return fitting, unfit


def _groups(llm: LLM, policies: Sequence[Policy], length: int, room: int) -> Iterator[list[Policy]]:
    """Policies that fit the memory together, each time with room for the exact cache that they are compared with."""
    beside = memory_needed(llm.model, policies[0].cache, length)
    group: list[Policy] = []
    taken = beside
    for policy in policies:
        needed = memory_needed(llm.model, policy.cache, length)
        if group and taken + needed > room:
            yield group
            group, taken = [], beside
        group.append(policy)
        taken += needed
    yield group


@torch.inference_mode()
def _read_group(
    llm: LLM, policies: Sequence[Policy], parts: Sequence[Stretch], length: int, decode_steps: int, progress: Progress
) -> list[Scored]:
    total = sum(len(part.ids) for part in parts)
    what = "reading" if len(policies) == 1 else f"reading by {len(policies)} policies"
    progress(what, 0, total)
    done = 0
    with ExitStack() as stack:
        exact = stack.enter_context(Reader(llm, CacheConfig(), length))
        runs = [_Run(p, stack.enter_context(Reader(llm, p.cache, length)), Tally()) for p in policies]
        lost = torch.zeros(len(runs), llm.model.config.num_layers, dtype=torch.float64)
        rows = torch.zeros(llm.model.config.num_layers, dtype=torch.float64)
        limited = any(sees_less(run.reader.specs, exact.specs) for run in runs)
        for number, part in enumerate(parts):
            for reader in (exact, *(run.reader for run in runs)):
                reader.begin()
            watch = LostMass(exact.cache, [run.reader.specs for run in runs]) if limited else None
            timed = min(decode_steps, len(part.ids) - part.first) if number == 0 else 0
            for ids, first, one_by_one in _pieces(part, timed):
                _read_piece(exact, runs, ids, first, one_by_one, watch)
                done += len(ids) - 1
                progress(what, done, total)
            done += 1  # the last token is predicted, not read
            if watch is not None:
                lost, rows = lost + watch.lost, rows + watch.rows
        progress(what, total, total)
        shares = lost / rows.clamp(min=1)
        return [_scored(run, shares[index].tolist()) for index, run in enumerate(runs)]


def _pieces(part: Stretch, timed: int) -> Iterator[tuple[tuple[int, ...], int, bool]]:
    """Tokens to read with the one that follows, where scoring begins among them, and whether to read one by one."""
    end = len(part.ids) - 1
    edges = [*range(0, end - timed, CHUNK), *range(end - timed, end + 1)]
    for start, stop in pairwise(edges):
        # The token at start + i is scored by the logits at start + i - 1.
        yield part.ids[start : stop + 1], max(part.first - start - 1, 0), stop > end - timed


def _read_piece(
    exact: Reader, runs: Sequence[_Run], ids: Sequence[int], first: int, one_by_one: bool, watch: LostMass | None
) -> None:
    fed, targets = ids[:-1], ids[1 + first :]
    truth: Tensor = logprobs(exact.read(fed, observer=watch)[first:])
    for run in runs:
        logits = run.reader.step(fed[0]) if one_by_one else run.reader.read(fed)
        if targets:
            run.tally.add(logits[first:], truth, targets)


def _scored(run: _Run, by_layer: list[float]) -> Scored:
    return Scored(
        name=run.policy.name,
        cache=run.policy.cache,
        bytes=run.reader.end_bytes,
        peak_bytes=run.reader.peak_bytes,
        ms=run.reader.step_ms,
        tokens=run.tally.tokens,
        perplexity=run.tally.perplexity,
        kl=max(run.tally.kl, 0.0),  # sums of doubles end a hair below 0 where nothing differs
        top1=run.tally.top1,
        mass_lost=sum(by_layer) / len(by_layer),
        mass_lost_by_layer=tuple(by_layer),
        backends=run.reader.backends,
    )


@torch.inference_mode()
def _beyond(llm: LLM, one: Scored, ids: Sequence[int], progress: Progress) -> Scored:
    """The same with the perplexity of the whole text, where the policy has no end."""
    found: list[float] = []
    with Reader(llm, one.cache, len(ids)) as reader:
        if reader.max_context is not None:
            return one
        for start in range(0, len(ids) - 1, CHUNK):
            progress(f"{one.name} without end", start, len(ids))
            fed = ids[start : min(start + CHUNK, len(ids) - 1)]
            found += losses(reader.read(fed), ids[start + 1 : start + 1 + len(fed)])
    tally = Tally(tokens=len(found), loss=sum(found))
    return replace(one, endless_perplexity=tally.perplexity)
