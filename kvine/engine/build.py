"""Puts an engine together from a loaded model and the user's options."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from kvine import kernels
from kvine.attention.base import Backend
from kvine.attention.cached import AttentionLayer, CachedAttention
from kvine.attention.dense import BlockLoss, DenseAttention, DenseLayer
from kvine.attention.native import NativeBackend
from kvine.attention.reference import ReferenceBackend
from kvine.attention.sdpa import SdpaBackend
from kvine.cache.block_bytes import PoolBytes
from kvine.cache.disk_folder import disk_store
from kvine.cache.hashing import namespace_key
from kvine.cache.manager import CacheManager
from kvine.cache.packed_pool import PackedPool
from kvine.cache.pool import KVPool
from kvine.cache.shelf import SealedShelf, shelves_of
from kvine.cache.spec import CacheSpec
from kvine.cache.tier import StoreTier
from kvine.config import CacheConfig, EngineConfig, parse_bytes
from kvine.engine.engine import Engine, EngineParts
from kvine.engine.fused import FusedDecoder
from kvine.engine.resources import free_memory
from kvine.engine.runner import Runner
from kvine.errors import ConfigError
from kvine.models.cache_specs import cache_specs
from kvine.models.load import LoadedModel
from kvine.rope import RotaryEmbedding
from kvine.sampling.sampler import Sampler

BACKENDS: dict[str, type[Backend]] = {"native": NativeBackend, "sdpa": SdpaBackend, "reference": ReferenceBackend}
CONTEXTS_BY_DEFAULT = 4
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def build_engine(config: EngineConfig, parts: EngineParts) -> Engine:
    """An engine from its parts; see `standard_parts` for the usual ones."""
    return Engine(parts, config)


def standard_parts(
    model: LoadedModel,
    cache: CacheConfig,
    config: EngineConfig,
    *,
    vocab_size: int,
    eos_ids: Collection[int],
) -> EngineParts:
    """The parts of an engine over a model.

    Args:
        model: the loaded model.
        cache: how the past is kept.
        config: how requests share the model.
        vocab_size: ids that the tokenizer knows; no other is ever sampled.
        eos_ids: ids that end a text beside those of the model's own config.

    Raises:
        ConfigError: if the cache's memory is too small for even one block, or a backend cannot serve the model.
    """
    specs = cache_specs(model.config, cache)
    dtype = DTYPE_NAMES[model.dtype]
    budget, capacities = _memory(specs, dtype, cache, model)
    manager = CacheManager(specs, budget, dtype=dtype, prefix_caching=cache.prefix_caching, capacities=capacities)
    native = kernels.chosen() if model.device.type == "cpu" else None
    pools = [
        PackedPool(shelf.spec, pool.capacity, model.dtype, model.device)
        if isinstance(shelf, SealedShelf)
        else KVPool(shelf.stored, pool.capacity, model.dtype, model.device, native=native is not None)
        for shelf, pool in zip(manager.shelves, manager.pools, strict=True)
    ]
    group_of = {layer: (g, i) for g, spec in enumerate(specs) for i, layer in enumerate(spec.layers)}
    ropes = {layer.rope: RotaryEmbedding(layer.rope, model.device, native=native) for layer in model.config.layers}
    attention = CachedAttention(
        [AttentionLayer(*group_of[n], ropes[layer.rope]) for n, layer in enumerate(model.config.layers)],
        pools,
        [choose_backend(config.backend, spec, model.device) for spec in specs],
        scale=model.config.attention_scale,
        softcap=model.config.attention_softcap,
    )
    if cache.cache_dir is not None:
        label = f"{model.path.name}, {dtype}, K/V {cache.kv_dtype}"
        label += "" if cache.window is None else f", window {cache.window}"
        manager.tier = StoreTier(manager, PoolBytes(pools), disk_store(cache.cache_dir, cache.cache_size), label)
    endless = all(spec.window is not None for spec in specs) and cache.sink_rule == "in_cache"
    return EngineParts(
        manager,
        Runner(model.decoder, attention, manager, model.device, FusedDecoder.bind(model.decoder, attention, native)),
        Sampler(min(vocab_size, model.config.vocab_size), str(model.path)),
        frozenset(eos_ids) | frozenset(model.config.eos_token_ids),
        model.config.vocab_size,
        None if endless else model.config.max_context,
        lambda salt, pinned=(): namespace_key(
            model.fingerprint, dtype, [spec.keeping(pinned) for spec in specs], salt=salt
        ),
    )


def dense_attention(
    model: LoadedModel,
    cache: CacheConfig,
    *,
    keep: Callable[[Tensor], Tensor] | None = None,
    loss: BlockLoss | None = None,
) -> DenseAttention:
    """The cache-free oracle of an engine with these options: it sees exactly what the cached one may see.

    It computes with exact keys and values whatever `cache.kv_dtype`, unless `keep` or `loss` says what becomes of them.
    """
    ropes = {layer.rope: RotaryEmbedding(layer.rope, model.device) for layer in model.config.layers}
    layers: dict[int, DenseLayer] = {}
    for spec in cache_specs(model.config, cache):
        for number in spec.layers:
            rope = ropes[model.config.layers[number].rope]
            in_cache = spec.sink_rule == "in_cache"
            layers[number] = DenseLayer(rope, spec.window, spec.sink_tokens, in_cache, spec.kept, spec.trained)
    return DenseAttention(
        [layers[number] for number in range(model.config.num_layers)],
        scale=model.config.attention_scale,
        softcap=model.config.attention_softcap,
        keep=keep,
        loss=loss,
    )


def choose_backend(name: str, spec: CacheSpec, device: torch.device) -> Backend:
    """The backend called `name`, or with `auto` the first that can serve a spec.

    Raises:
        ConfigError: if the named one cannot, with its reason.
    """
    for known, backend_class in BACKENDS.items():
        backend = backend_class()
        reason = backend.unsupported(spec, device)
        if name in ("auto", known):
            if reason is None:
                return backend
            if name == known:
                raise ConfigError(f"The {name} backend cannot serve this cache: {reason}")
    raise ConfigError(f"No attention backend called {name!r} can serve this cache.")


def usable_backends(specs: Sequence[CacheSpec], device: torch.device) -> tuple[str, ...]:
    """The backends that can serve all of these, in the order in which `auto` prefers them."""
    return tuple(
        name
        for name, backend_class in BACKENDS.items()
        if all(backend_class().unsupported(spec, device) is None for spec in specs)
    )


def _memory(
    specs: Sequence[CacheSpec], dtype: str, cache: CacheConfig, model: LoadedModel
) -> tuple[int, list[int] | None]:
    """Budget in bytes, and on devices where memory is taken at once the fixed number of blocks of each group."""
    shelves = shelves_of(specs)
    sizes = [shelf.bytes_per_block(dtype) for shelf in shelves]
    context = model.config.max_context
    whole = [shelf.max_live_blocks(context, context) * size for shelf, size in zip(shelves, sizes, strict=True)]
    if cache.kv_memory is not None:
        budget = parse_bytes(cache.kv_memory)
    else:
        free = torch.cuda.mem_get_info(model.device)[0] if model.device.type == "cuda" else free_memory()
        budget = max(min(free // 4, CONTEXTS_BY_DEFAULT * sum(whole)), sum(sizes))
    if budget < sum(sizes):
        raise ConfigError(
            f"A cache of {budget:,} bytes holds no block: one of {cache.block_size} tokens takes {sum(sizes):,} bytes. "
            "Raise kv_memory or lower block_size."
        )
    if model.device.type == "cpu":
        return budget, None
    return budget, [max(1, budget * share // sum(whole) // size) for share, size in zip(whole, sizes, strict=True)]
