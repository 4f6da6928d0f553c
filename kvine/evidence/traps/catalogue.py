"""All traps: which part is wrong, what its user sees, and the code that is right instead.

The wrong code is shown from the parts themselves, the right code from the engine's own files; tests hold both to it.
"""

import difflib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvine.cache.spec import CacheSpec
from kvine.engine.engine import EngineParts
from kvine.errors import ConfigError
from kvine.evidence.traps import attention_faults as attention
from kvine.evidence.traps import cache_faults as cache
from kvine.evidence.traps.kinds import KINDS
from kvine.evidence.traps.seams import (
    Fault,
    with_backend,
    with_batch,
    with_manager,
    with_packed,
    with_pool,
    with_specs,
    with_step,
)
from kvine.models.config import ModelConfig


@dataclass(frozen=True)
class Trap:
    """One classic mistake.

    Attributes:
        name: of the fault, and the kind that an examination has to find.
        fault: puts it into an engine.
        wrong: the code that is wrong, taken from the part that has it.
        right: the engine's code for the same.
        file: that has the right code.
        symptom: what somebody sees who has the fault and does not know it.
        story: how its sample text is made, a key of `stories.STORIES`.
        unsuitable: why a model cannot have the fault; None if it can.
    """

    name: str
    fault: Fault
    wrong: str
    right: str
    file: str
    symptom: str
    story: str
    unsuitable: Callable[[ModelConfig], str | None]


def find_traps(name: str) -> list[Trap]:
    """The trap called `name`, or `all` of them. Raises ConfigError for a name that there is not."""
    if name == "all":
        return list(TRAPS.values())
    if name in TRAPS:
        return [TRAPS[name]]
    if name in KINDS:
        raise ConfigError(f"{name} is a kind of fault that no trap builds in: `kvine traps {name}` says where to look.")
    near = difflib.get_close_matches(name, [*TRAPS, *KINDS], n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(f"There is no trap named {name!r}.{hint} `kvine traps` lists them, and `all` takes every one.")


def _source(part: Callable[..., object]) -> str:
    """A part's code without its docstring."""
    lines = textwrap.dedent(inspect.getsource(part)).rstrip().splitlines()
    return "\n".join(line for line in lines if not line.strip().startswith('"""'))


def _any_model(config: ModelConfig) -> str | None:
    return None


def _needs_groups(config: ModelConfig) -> str | None:
    if 1 < config.num_kv_heads < config.num_heads:
        return None
    return f"with {config.num_heads} query heads and {config.num_kv_heads} KV heads, tiling and repeating are the same"


def _needs_scale(config: ModelConfig) -> str | None:
    return None if config.attention_scale != 1 else "its attention scale is 1"


def _stale_tables(parts: EngineParts) -> EngineParts:
    return with_batch(attention.StaleTables())(parts)  # each engine has tables of its own to remember


def _stale_last_layer(parts: EngineParts) -> EngineParts:
    stale = attention.StaleTables()
    return with_step(lambda whole, batch: attention.LastLayerStale(whole, batch, stale))(parts)


def _one_short(spec: CacheSpec) -> CacheSpec:
    return spec if spec.window is None else replace(spec, window=spec.window - 1)


def _one_long(spec: CacheSpec) -> CacheSpec:
    return spec if spec.window is None else replace(spec, window=spec.window + 1)


def _trap(
    name: str,
    fault: Fault,
    wrong: Callable[..., object],
    file: str,
    right: str,
    symptom: str,
    *,
    story: str = "plain",
    unsuitable: Callable[[ModelConfig], str | None] = _any_model,
) -> Trap:
    right = textwrap.dedent(right).strip("\n")
    return Trap(name, fault, _source(wrong), right, file, symptom, story, unsuitable)


_POSITIONS = ("kvine/engine/runner.py", "positions += range(item.start, end)")
_SLOTS = ("kvine/engine/runner.py", "slots[rows] = written[at // size - first] * size + at % size")
_VISIBLE = (
    "kvine/cache/spec.py",
    """
    causal = k_pos <= q_pos
    if self.window is None:
        return causal
    seen = (q_pos - k_pos < self.window) | (k_pos < self.sink_tokens)
    for first, end in self.kept:
        seen = seen | ((k_pos >= first) & (k_pos < end))
    return causal & seen
    """,
)
_RAGGED = (
    "kvine/attention/reference.py",
    """
    for r, length in enumerate(batch.context_len):
        spec = batch.spec_of(r, plan.spec)
        rows = slice(batch.query_start[r], batch.query_start[r + 1])
        table = batch.groups[plan.group].block_tables[r][: spec.num_blocks(length)]
    """,
)
_STORED = (
    "kvine/cache/pool.py",
    "self.k = self._reserve(shape, storage_dtype(spec.key_codec, compute), device)",
)

_LIST = (
    _trap(
        "position-stuck-at-0",
        with_step(attention.StuckAt0),
        attention.StuckAt0.__init__,
        *_POSITIONS,
        "The first token is right. Then the text repeats itself or wanders off: every new token believes to stand at "
        "the beginning.",
    ),
    _trap(
        "position-stuck-at-1",
        with_step(attention.StuckAt1),
        attention.StuckAt1.__init__,
        *_POSITIONS,
        "As with 0: the first token is right, and the more is generated, the less the text holds together.",
    ),
    _trap(
        "position-off-by-one-in-decode",
        with_step(attention.LateInDecode),
        attention.LateInDecode.__init__,
        *_POSITIONS,
        "Between prompt and answer one position is left out. The text reads well and is another one: short tests pass.",
    ),
    _trap(
        "position-off-by-one-everywhere",
        with_step(attention.LateEverywhere),
        attention.LateEverywhere.__init__,
        *_POSITIONS,
        "Nothing: rotary embeddings see distances only. It breaks when keys meet those of another program, in a saved "
        "session or a shared store, and at the last position of the context.",
    ),
    _trap(
        "slot-off-by-one",
        with_batch(attention.next_slot),
        attention.next_slot,
        *_SLOTS,
        "The prompt is read well. From the first new token on, each one is missing from its own past, and an empty "
        "place stands there instead.",
    ),
    _trap(
        "mask-without-history",
        with_backend(attention.OwnStepOnly),
        attention.OwnStepOnly.visible,
        *_VISIBLE,
        "The first token is right. After it the model knows nothing but the token it has just read.",
    ),
    _trap(
        "own-token-not-seen",
        with_backend(attention.OwnTokenHidden),
        attention.OwnTokenHidden.visible,
        *_VISIBLE,
        "Words are repeated, or left half done: the model reads everything but the token before the next one.",
    ),
    _trap(
        "future-tokens-seen",
        with_backend(attention.NotCausal),
        attention.NotCausal.visible,
        *_VISIBLE,
        "Decoding is right, reading the prompt is not: the text depends on the size of the chunks.",
    ),
    _trap(
        "batch-rows-share-cache",
        with_batch(attention.first_rows_table),
        attention.first_rows_table,
        *_RAGGED,
        "Alone every request is right. Together they speak of each other's subjects.",
        story="batch",
    ),
    _trap(
        "padding-attended",
        with_backend(attention.RightPadded),
        attention.RightPadded.gather,
        *_RAGGED,
        "The shorter a text is in its batch, the weaker its attention: empty places take their share of the weights.",
        story="rectangle",
    ),
    _trap(
        "left-padding-attended",
        with_backend(attention.LeftPadded),
        attention.LeftPadded.gather,
        *_RAGGED,
        "Short texts in a batch answer as if they began with hundreds of copies of their first token.",
        story="rectangle",
    ),
    _trap(
        "stale-fork-table",
        _stale_tables,
        attention.StaleTables.__call__,
        *_RAGGED,
        "Beam search scores one branch and continues another: greedy text is right, beams read as if cut together.",
        story="beams",
    ),
    _trap(
        "stale-beam-reorder",
        _stale_last_layer,
        attention.LastLayerStale.__call__,
        "kvine/engine/lines.py",
        "line.sequence = manager.fork(sequence) if beam.parent in taken else sequence",
        "Greedy text is right, and so are beams as long as each keeps its place. After a switch one layer reads what "
        "another beam has said: the text stays fluent, and no beam's score is that of its text any more.",
        story="beams",
    ),
    _trap(
        "cache-wider-than-model",
        with_pool(cache.in_fp32),
        cache.in_fp32,
        *_STORED,
        "The text is right. The cache takes twice the memory that was planned, and holds half as many tokens.",
        story="bytes",
    ),
    _trap(
        "cache-narrower-than-intended",
        with_pool(lambda pool: cache.rebuilt(pool, cache.NarrowPool)),
        cache.NarrowPool.write,
        *_STORED,
        "Nothing in most texts. Now and then a near-tie goes the other way, and logits never quite agree with another "
        "program's.",
    ),
    _trap(
        "bits-reinterpreted",
        with_pool(lambda pool: cache.rebuilt(pool, cache.ReinterpretedPool)),
        cache.ReinterpretedPool.write,
        "kvine/cache/codec.py",
        "stored = values.to(dtype)",
        "Noise from the first token on, or NaN: sign and exponent lie in other places.",
        story="bits",
    ),
    _trap(
        "scales-of-another-block",
        with_packed(cache.with_neighbours_scales),
        cache.NeighboursScales.unsealed,
        "kvine/cache/packed_pool.py",
        'self._parts["key"].decode(stored.k.index_select(0, blocks)),',
        "The first block and the open one are right, so short texts are. Then the text drifts: each key and value has "
        "the right shape and another block's size, as if the codec were poor.",
        story="packed",
    ),
    _trap(
        "cache-on-another-device",
        with_pool(cache.elsewhere),
        cache.elsewhere,
        *_STORED,
        "An error on the first model call, or, where a program copies silently, a step many times as slow.",
        story="error",
    ),
    _trap(
        "kv-heads-tiled",
        with_backend(attention.Tiled),
        attention.Tiled.spread,
        "kvine/attention/dense.py",
        "k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)",
        "Nonsense from the first token on, with the right shapes everywhere; only where query heads share KV heads.",
        unsuitable=_needs_groups,
    ),
    _trap(
        "window-one-short",
        with_specs(_one_short),
        _one_short,
        *_VISIBLE,
        "Short texts are right. Beyond the window it is another text, and nobody thinks of the window.",
        story="window",
    ),
    _trap(
        "window-one-long",
        with_specs(_one_long),
        _one_long,
        *_VISIBLE,
        "Short texts are right. Beyond the window it is another text, and nobody thinks of the window.",
        story="window",
    ),
    _trap(
        "published-before-filled",
        with_manager(cache.PublishedEarly),
        cache.PublishedEarly._publish_all,
        "kvine/cache/manager.py",
        """
        sequence.tokens.extend(tokens)
        assert self.specs[0].num_blocks(sequence.num_tokens) <= len(sequence.tables[0]), "committed more than reserved"
        self._let_die(sequence, range(len(self.specs), len(self.shelves)), before)  # what is sealed lies elsewhere
        if self.prefix_caching:
            while len(sequence.path) <= sequence.num_tokens // self.block_size:
                self._publish_next(sequence)
        """,
        "Two equal prompts at nearly the same time: the first is right, the second reads blocks of zeros.",
        story="early",
    ),
    _trap(
        "hash-collision-trusted",
        with_manager(cache.TrustingManager),
        cache.TrustingIndex.child,
        "kvine/cache/prefix.py",
        """
        for node in self._by_key.get(block_key(parent.key, tokens, self._hash), ()):
            if node.parent is parent and node.tokens == tokens:
                return node
        """,
        "Hardly ever anything. Then one request answers to the prompt of another, and it cannot be repeated.",
        story="lookalike",
    ),
    _trap(
        "rolled-back-token-returns",
        with_backend(attention.LongestEver),
        attention.LongestEver.gather,
        "kvine/attention/reference.py",
        """
        k_pos = torch.arange(length, device=q.device)
        visible = spec.visible(batch.positions[rows, None], k_pos)  # [n, L]
        """,
        "After an edit or a rejected draft, the text goes on as if what was taken back still stood there.",
        story="rollback",
    ),
    _trap(
        "shared-block-overwritten",
        with_manager(cache.SharedWithoutCopy),
        cache._AlwaysWritable.writable,
        "kvine/cache/blocks.py",
        "return self.references[block] == 1 and block not in self.node_of",
        "A branch is right until another one writes; then it has the other's words in its past.",
        story="branches",
    ),
    _trap(
        "rope-pairs-interleaved",
        with_step(attention.InterleavedPairs),
        attention.InterleavedPairs.__call__,
        "kvine/rope.py",
        "return torch.addcmul(x32 * cos, x32.roll(rotary // 2, -1), sin).to(x.dtype)",
        "Fluent beginnings that lose themselves: order is garbled, words are not.",
    ),
    _trap(
        "sinks-not-moved",
        with_backend(attention.SinksInPlace),
        attention.SinksInPlace.attend,
        "kvine/attention/cached.py",
        "q_sink = rotate(q, *self._rotation(place, moved=True))",
        "Past the window it is another text, if a fluent one. Past the model's context it falls apart: the sinks are "
        "further away than any distance that it was trained on.",
        story="sinks",
    ),
    _trap(
        "sinks-off-by-one",
        with_step(attention.SinksOneFurther),
        attention.SinksOneFurther.__init__,
        "kvine/attention/cached.py",
        "last = [NEVER if limit is None else limit - 1 for limit in limits]",
        "Nothing in the first window of tokens. After it the text is fluent and another one, and no limit is ever met: "
        "each query stands one place further from the sinks than it was counted to.",
        story="sinks",
    ),
    _trap(
        "sinks-forgotten",
        with_backend(attention.SinksForgotten),
        attention.SinksForgotten.plan,
        *_VISIBLE,
        "The text collapses as soon as the window leaves the first token behind.",
        story="sinks",
    ),
    _trap(
        "scale-missing",
        with_backend(attention.Unscaled),
        attention.Unscaled.attend,
        "kvine/attention/reference.py",
        'scores = torch.einsum("nhgd,hld->hgnl", queries, k) * scale',
        "Each query reads one single token, the best match, and forgets the others: text in loops.",
        unsuitable=_needs_scale,
    ),
)
TRAPS: Mapping[str, Trap] = MappingProxyType({trap.name: trap for trap in _LIST})
