"""Takes a prompt through the cache token by token and watches: the last of the prompt as a decode step, then more."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvine.cache.spec import CacheSpec
from kvine.config import EngineConfig
from kvine.engine.build import DTYPE_NAMES
from kvine.engine.engine import EngineParts
from kvine.engine.runner import Runner
from kvine.engine.stepped import SteppedCache
from kvine.errors import ContextLengthError, RequestError
from kvine.explain.account import keys_seen, read, work
from kvine.explain.explanation import Candidate, DecodeStep, Explanation, LayerGroup, Token, check_view
from kvine.explain.observe import StepObserver, attention_weights
from kvine.hub import ModelSource
from kvine.models.load import LoadedModel
from kvine.models.packing import count_packings
from kvine.sampling.sampler import no_numbers
from kvine.text.tokenizer import Tokenizer


class Subject(Protocol):
    """What is explained: a model, its tokenizer, and an engine's parts; an `LLM` is one."""

    source: ModelSource
    model: LoadedModel
    tokenizer: Tokenizer
    parts: EngineParts
    engine_config: EngineConfig


def explain(
    subject: Subject,
    ids: Sequence[int],
    *,
    steps: int = 4,
    layer: int | None = None,
    head: int | None = None,
    top: int = 10,
) -> Explanation:
    """Explains a prompt, in a cache of its own that is given back at the end.

    Args:
        subject: what answers it.
        ids: of the prompt, at least one.
        steps: greedy decode steps after the prompt, fewer where the text ends.
        layer, head: the view of the attention weights that is shown; None: the mean over all.
        top: candidates for the next token.

    Raises:
        RequestError: for a layer, head or number that cannot be.
        ContextLengthError: if the text does not fit the model's context or the cache.
        StepError: if the model's logits are no numbers.
    """
    config, context = subject.model.config, subject.parts.max_context
    check_view(layer, head, config.num_layers, config.num_heads)
    _check_numbers(len(ids), steps, top, context)
    runner = subject.parts.runner
    assert isinstance(runner, Runner)
    cache = SteppedCache(runner, subject.engine_config, context)
    try:
        with torch.inference_mode():
            weights, logits = _read_prompt(runner, cache, ids)
            candidates = _candidates(subject, logits, top)
            groups, block_bytes = _groups(runner, cache, config.num_heads), cache.num_bytes
            taken = _decode(subject, runner, cache, candidates[0].token_id, steps)
    finally:
        cache.close()
    return Explanation(
        model=subject.source.name,
        dtype=DTYPE_NAMES[subject.model.dtype],
        device=str(subject.model.device),
        tokens=tuple(_token(subject.tokenizer, position, token_id) for position, token_id in enumerate(ids)),
        groups=groups,
        block_bytes=block_bytes,
        weights=weights.cpu(),
        visible=_visible(runner, len(ids)),
        layer=layer,
        head=head,
        candidates=candidates,
        steps=taken,
        ended=len(taken) < steps,
        packings=count_packings(subject.model.packings),
    )


def _check_numbers(length: int, steps: int, top: int, max_context: int | None) -> None:
    for name, number, least in (("steps", steps, 0), ("top", top, 1)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise RequestError(f"{name} is {number!r}: give a whole number, {least} or more.")
    if max_context is not None and length + steps > max_context:
        raise ContextLengthError(
            f"{length:,} tokens of prompt and {steps:,} decode steps do not fit the model's context of "
            f"{max_context:,}: shorten the prompt or take fewer steps."
        )


def _read_prompt(runner: Runner, cache: SteppedCache, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The last position's attention weights [layers, Hq, L] and its logits [vocabulary]."""
    if len(ids) > 1:
        cache.extend(ids[:-1], last=True)
    # Lent before the last token enters: a window may let go of what only that token still sees.
    layers = range(len(runner.attention.layers))
    past = [(cache.layer(layer)[0][0], cache.positions(layer)) for layer in layers]
    observer = StepObserver()
    logits = _step(runner, cache, ids[-1], observer)
    weights = [_weights(runner, cache, layer, *past[layer], observer) for layer in layers]
    return torch.stack(weights), logits


def _step(runner: Runner, cache: SteppedCache, token_id: int, observer: StepObserver) -> Tensor:
    """Logits [vocabulary] after one more token, with an observer on the model for as long as that takes."""
    before, runner.observer = runner.observer, observer
    try:
        return cache.extend([token_id], last=True)[0, 0]
    finally:
        runner.observer = before


def _weights(
    runner: Runner,
    cache: SteppedCache,
    layer: int,
    past: Tensor,
    past_positions: list[int],
    observer: StepObserver,
) -> Tensor:
    """[Hq, L] of the cache's last token, from the keys lent before it came and its own."""
    position, place = len(cache) - 1, runner.attention.layers[layer]
    own = cache.layer(layer)[0][0, :, -1:]
    if place.group in runner.attention.open_shelf:  # it was read exactly, though it may have filled its block since
        rotation = place.rope.cos_sin(torch.tensor([position], device=own.device))
        own = place.rope.rotate(observer.keys[layer][None], *rotation)[0][:, None].to(own.dtype)
    keys = torch.cat((past, own), dim=1)  # [Hkv, held, D]
    return attention_weights(
        runner.attention, layer, observer.queries[layer], keys, [*past_positions, position], position
    )


def _decode(subject: Subject, runner: Runner, cache: SteppedCache, token_id: int, steps: int) -> tuple[DecodeStep, ...]:
    """Greedy steps from a token that is not yet in the cache."""
    config, attention, item_bytes = subject.model.config, runner.attention, subject.model.dtype.itemsize
    taken: list[DecodeStep] = []
    keys_before = sum(keys_seen(attention, position) for position in range(len(cache)))
    while len(taken) < steps and token_id not in subject.parts.eos_ids:
        position, tokens = len(cache), len(cache) + 1
        observer = StepObserver()
        logits = _step(runner, cache, token_id, observer)
        keys = keys_seen(attention, position)
        keys_before += keys
        every = {name: number * tokens for name, number in observer.numbers.items()}
        taken.append(
            DecodeStep(
                token=_token(subject.tokenizer, position, token_id),
                computed=work(config, item_bytes, 1, observer.numbers, keys),
                read=read(attention, position),
                cache_free=work(config, item_bytes, tokens, every, keys_before),
                next=_candidates(subject, logits, 1)[0],
            )
        )
        token_id = taken[-1].next.token_id
    return tuple(taken)


def _candidates(subject: Subject, logits: Tensor, top: int) -> tuple[Candidate, ...]:
    """The most likely ids, the lowest first among equals; what cannot come at all is left out."""
    known = logits[: min(subject.tokenizer.vocab_size, len(logits))].double()
    if not bool(known.max().isfinite()):
        raise no_numbers(float(known.max()), str(subject.source.path))
    order = torch.sort(known, descending=True, stable=True).indices[:top].tolist()
    probabilities = known.softmax(-1)
    texts = subject.tokenizer.pieces(order)
    return tuple(
        Candidate(token_id, text, float(known[token_id]), float(probabilities[token_id]))
        for token_id, text in zip(order, texts, strict=True)
        if bool(known[token_id].isfinite())
    )


def _token(tokenizer: Tokenizer, position: int, token_id: int) -> Token:
    special = not tokenizer.token_bytes(token_id)
    return Token(position, token_id, tokenizer.pieces([token_id])[0], special)


def _groups(runner: Runner, cache: SteppedCache, num_heads: int) -> tuple[LayerGroup, ...]:
    groups = []
    for number in range(len(runner.attention.backends)):
        spec = runner.attention.pools[number].spec
        k, v = cache.layer(spec.layers[0])
        stored_as, num_bytes = DTYPE_NAMES[k.dtype], spec.num_layers * (k.nbytes + v.nbytes)
        if spec.packs:
            stored_as, num_bytes = _packed(runner, spec, k.shape[2], len(cache) % spec.block_size)
        groups.append(
            LayerGroup(
                layers=spec.layers,
                query_heads=num_heads,
                kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                window=spec.window,
                sink_tokens=spec.sink_tokens,
                kept=spec.kept,
                k_shape=tuple(k.shape),
                v_shape=tuple(v.shape),
                stored_as=stored_as,
                num_bytes=num_bytes,
            )
        )
    return tuple(groups)


def _packed(runner: Runner, spec: CacheSpec, held: int, begun: int) -> tuple[str, int]:
    """Codecs and bytes of a group with packed blocks that holds so many tokens, the last ones in a begun block."""
    pool = runner.attention.pools[runner.attention.open_shelf[runner.attention.layers[spec.layers[0]].group]]
    sealed = spec.key_bytes(DTYPE_NAMES[pool.k.dtype]) + spec.value_bytes(DTYPE_NAMES[pool.v.dtype])
    full = (held - begun) // spec.block_size * sealed
    opened = begun * spec.head_dim * (pool.k.element_size() + pool.v.element_size())
    names = dict.fromkeys((spec.key_codec, spec.value_codec))
    return "/".join(names), spec.num_layers * spec.num_kv_heads * (full + opened)


def _visible(runner: Runner, length: int) -> Tensor:
    """[layers, length]: what the last position sees."""
    attention = runner.attention
    at = torch.arange(length)
    return torch.stack([attention.pools[place.group].spec.visible(length - 1, at) for place in attention.layers])
