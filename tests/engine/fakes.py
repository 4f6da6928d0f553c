"""A model whose logits name exactly which (position, token) pairs it attended to, and an engine over it.

Everything between the requests and the arithmetic is real: scheduler, manager, pools, block tables, slots. Only the
decoder and the attention backend are replaced, by integer hashing that floating point holds exactly. A key that is
missing, doubled, stale, in the wrong place or of another request changes the next token.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kvine.attention.base import Batch
from kvine.attention.cached import AttentionLayer, CachedAttention
from kvine.cache.hashing import HashFunction, digest, namespace_key
from kvine.cache.manager import CacheManager
from kvine.cache.pool import KVPool, LayerKV
from kvine.cache.spec import CacheSpec
from kvine.config import EngineConfig
from kvine.engine.engine import Engine, EngineParts
from kvine.engine.request import Event
from kvine.engine.runner import Runner
from kvine.engine.scheduler import Scheduled
from kvine.sampling.params import SamplingParams
from kvine.sampling.sampler import Sample, Sampler, SampleRow

PRIME = 65_521  # states stay below it, so that fp32 holds them exactly
VOCAB = 24
EOS = 23
CPU = torch.device("cpu")


@dataclass(frozen=True)
class View:
    """What one layer's queries see, said independently of `CacheSpec`: a set, spelled out."""

    window: int | None = None
    sinks: int = 0

    def keys(self, q: int) -> list[int]:
        if self.window is None:
            return list(range(q + 1))
        return [k for k in range(q + 1) if k > q - self.window or k < self.sinks]


WINDOWED_AND_FULL = (View(window=6), View())


class NoRotation:
    """Keys are hashed by position, so nothing needs to be rotated."""

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones(len(positions), 1, 2), torch.zeros(len(positions), 1, 2)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x


def mixed(states: np.ndarray, positions: np.ndarray, query_position: int) -> int:
    """Order-free hash of a set of (position, state) pairs as a query sees them."""
    terms = (states * 31 + positions * 4_099 + 17) % PRIME
    return int((terms * (terms + query_position + 1) % PRIME).sum() % PRIME)


def next_states(states: np.ndarray, attended: np.ndarray, layer: int) -> np.ndarray:
    return (states * 7 + attended * (layer + 3) + 11) % PRIME


def logits_of(states: np.ndarray) -> np.ndarray:
    """[M] → [M, VOCAB], all different within a row, so that the arg-max is not a matter of order."""
    ids = np.arange(VOCAB)
    return ((states[:, None] * (ids * 2 + 1) + ids * 37) % 9_973 + ids / 64) / 2_000


class HashBackend:
    """Sums over what a query sees, and insists that each key lies where its position says."""

    name = "hash"

    def __init__(self, view: View) -> None:
        self.view = view

    def unsupported(self, spec: CacheSpec, device: torch.device) -> str | None:
        return None

    def plan(self, batch: Batch, group: int, spec: CacheSpec) -> tuple[Batch, int, int]:
        return batch, group, spec.block_size

    def attend(self, q: Tensor, kv: LayerKV, plan: tuple[Batch, int, int], **_: object) -> Tensor:
        batch, group, size = plan
        stored = kv.k[:, 0].numpy()  # [blocks, block_size, 2]
        out = torch.zeros_like(q)
        for r, length in enumerate(batch.context_len):
            first, end = batch.query_start[r], batch.query_start[r + 1]
            table = batch.groups[group].block_tables[r]
            for row in range(first, end):
                position = length - (end - row)
                keys = np.array(self.view.keys(position))
                blocks = np.array([table[k // size] for k in keys])
                assert (blocks >= 0).all(), "a visible block was let go"
                read = stored[blocks, keys % size]
                assert (read[:, 1] == keys).all(), f"query {position} read keys of positions {read[:, 1]}"
                out[row, 0, 0] = mixed(read[:, 0].astype(np.int64), keys, position)
        return out


@dataclass
class HashModel:
    """The decoder: each layer's state depends on all that the layers below attended to."""

    num_layers: int
    rows_of_logits: list[int] = field(default_factory=list)
    fail_at_layer: int | None = None  # raises there once, after the layers below have written
    error: BaseException = field(default_factory=lambda: RuntimeError("the model broke"))

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Callable[..., Tensor], observer: object = None
    ) -> Tensor:
        states = input_ids.numpy() + 1
        for layer in range(self.num_layers):
            if self.fail_at_layer == layer:
                self.fail_at_layer = None
                raise self.error
            heads = torch.from_numpy(np.stack([states, positions.numpy()], axis=-1)).float()[:, None]  # [N, 1, 2]
            attended = attend(layer, heads, heads, heads)[:, 0, 0].numpy().astype(np.int64)
            states = next_states(states, attended, layer)
        if self.fail_at_layer == self.num_layers:
            self.fail_at_layer = None
            raise self.error
        return torch.from_numpy(states)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        self.rows_of_logits.append(len(hidden))
        return torch.from_numpy(logits_of(hidden[:, 0].numpy())).float()


@lru_cache(maxsize=100_000)
def cache_free_logits(tokens: tuple[int, ...], views: tuple[View, ...]) -> tuple[float, ...]:
    """Logits after `tokens`, computed anew and without any part of the engine."""
    states = np.array(tokens, dtype=np.int64) + 1
    for layer, view in enumerate(views):
        attended = np.array(
            [mixed(states[keys], keys, q) for q in range(len(tokens)) for keys in [np.array(view.keys(q))]]
        )
        states = next_states(states, attended, layer)
    return tuple(np.float32(logits_of(states[-1:])[0]).tolist())


def cache_free_output(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int = 0,
    views: tuple[View, ...] = WINDOWED_AND_FULL,
    eos: Collection[int] = (EOS,),
    limit: int | None = None,
    index: int = 0,
) -> tuple[list[int], str]:
    """What a request must generate, and why it ends: a loop over the model's function, written apart."""
    output: list[int] = []
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    if params.max_tokens == 0:
        return [], "length"
    while True:
        logits = torch.tensor([cache_free_logits((*prompt, *output), views)])
        banned = ends if len(output) < params.min_tokens else ()
        [sample] = Sampler(VOCAB).sample(logits, [SampleRow(params, prompt, list(output), seed, index, banned)])
        assert isinstance(sample, Sample)
        output.append(sample.token_id)
        if sample.token_id in ends:
            return output, "stop"
        if params.max_tokens is not None and len(output) == params.max_tokens:
            return output, "length"
        if limit is not None and len(prompt) + len(output) == limit:
            return output, "context"


class ScriptedModel:
    """Says given tokens: after n tokens of output, `script[n]`; knows nothing of what it attends to."""

    def __init__(self, script: Sequence[int], prompt_length: int, vocab: int = VOCAB) -> None:
        self.script = list(script)
        self.prompt_length = prompt_length
        self.vocab = vocab

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Callable[..., Tensor], observer: object = None
    ) -> Tensor:
        heads = torch.stack([input_ids, positions], dim=-1).float()[:, None]
        attend(0, heads, heads, heads)
        return positions[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.zeros(len(hidden), self.vocab)
        for row, position in enumerate(hidden[:, 0].tolist()):
            step = position + 1 - self.prompt_length
            logits[row, self.script[min(max(step, 0), len(self.script) - 1)]] = 8.0
        return logits


def specs_of(views: Sequence[View], block_size: int) -> tuple[CacheSpec, ...]:
    """A group for each layer. 16 bytes a token: one head of two numbers, K and V."""
    return tuple(
        CacheSpec((n,), 1, 2, block_size, view.window, view.sinks if view.window else 0) for n, view in enumerate(views)
    )


def fake_parts(
    model: object | None = None,
    *,
    views: tuple[View, ...] = WINDOWED_AND_FULL,
    blocks: int = 1_000,
    block_size: int = 4,
    prefix_caching: bool = True,
    eos: Collection[int] = (EOS,),
    max_context: int | None = None,
    vocab_size: int = VOCAB,
    hash_function: HashFunction = digest,
) -> EngineParts:
    """The parts of an engine over a fake model. `blocks` counts over both groups."""
    specs = specs_of(views, block_size)
    budget = blocks * specs[0].bytes_per_block("fp32")
    manager = CacheManager(specs, budget, prefix_caching=prefix_caching, hash_function=hash_function)
    pools = [KVPool(spec, pool.capacity, torch.float32, CPU) for spec, pool in zip(specs, manager.pools, strict=True)]
    attention = CachedAttention(
        [AttentionLayer(n, 0, NoRotation()) for n in range(len(views))],  # type: ignore[arg-type]
        pools,
        [HashBackend(view) for view in views],
        scale=1.0,
    )
    return EngineParts(
        manager,
        Runner(model or HashModel(len(views)), attention, manager, CPU),  # type: ignore[arg-type]
        Sampler(vocab_size),
        frozenset(eos),
        vocab_size,
        max_context,
        lambda salt, pinned=(): namespace_key(b"fake", "fp32", [s.keeping(pinned) for s in specs], salt=salt),
    )


def fake_engine(*, budget: int = 2_048, max_running: int = 256, **options: object) -> Engine:
    """An engine over `fake_parts`; `budget` is its tokens in a step."""
    return Engine(fake_parts(**options), EngineConfig(max_step_tokens=budget, max_running=max_running))  # type: ignore[arg-type]


def model_of(engine: Engine) -> HashModel:
    model = engine.parts.runner.decoder  # type: ignore[attr-defined]
    assert isinstance(model, HashModel)
    return model


@dataclass
class Outcome:
    """What a request's events came to."""

    tokens: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def last(self) -> Event:
        return self.events[-1]

    @property
    def reason(self) -> str | None:
        return self.last.finish_reason

    @property
    def cached(self) -> int:
        return self.last.cached_tokens


def collect(events: Sequence[Event], outcomes: dict[int, Outcome]) -> None:
    """Files events by request; a request that has ended must stay silent."""
    for event in events:
        outcome = outcomes.setdefault(event.request_id, Outcome())
        assert not outcome.events or outcome.reason is None, f"request {event.request_id} spoke after its end"
        outcome.events.append(event)
        if event.sample is not None:
            outcome.tokens.append(event.sample.token_id)


def drain(engine: Engine, outcomes: dict[int, Outcome] | None = None, *, bound: int = 2_000) -> dict[int, Outcome]:
    """Steps until nothing is left, and checks the cache after each step."""
    outcomes = {} if outcomes is None else outcomes
    for _ in range(bound):
        if not engine.busy:
            return outcomes
        collect(engine.step(), outcomes)
        engine.manager.check()
    raise AssertionError(f"the engine still has work after {bound} steps")


def serve(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Outcome]:
    """Requests side by side, to their end."""
    ids = [engine.add(prompt, params) for prompt in prompts]
    outcomes = drain(engine)
    return [outcomes[i] for i in ids]


def nothing_held(engine: Engine) -> None:
    """The pool's law after draining: every block is free or cached, and forgetting what is cached frees all."""
    manager = engine.manager
    manager.check()
    assert manager.bytes_referenced == 0
    assert all(pool.num_free + len(pool.cached) == pool.capacity for pool in manager.pools)


class BreakingRunner:
    """Breaks before the given calls (counted from 0) reach the real runner."""

    def __init__(self, inner: Runner, calls: Collection[int]) -> None:
        self.inner = inner
        self.calls = calls
        self.count = -1

    def run(self, step: Sequence[Scheduled]) -> Tensor:
        self.count += 1
        if self.count in self.calls:
            raise RuntimeError("the runner broke")
        return self.inner.run(step)

    def give_back(self) -> None:
        self.inner.give_back()


def with_runner(engine: Engine, calls: Collection[int]) -> Engine:
    """The same engine, whose calls with these numbers fail."""
    inner = engine.parts.runner
    assert isinstance(inner, Runner)
    return Engine(replace(engine.parts, runner=BreakingRunner(inner, calls)), engine.config)
