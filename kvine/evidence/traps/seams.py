"""How a test engine gets one wrong part: the healthy parts, taken apart and put together again around another one."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvine.attention.base import Backend, Batch
from kvine.attention.cached import CachedAttention, StepAttention
from kvine.cache.manager import CacheManager
from kvine.cache.packed_pool import PackedPool
from kvine.cache.pool import KVPool, LayerKV
from kvine.cache.sequence import MISSING
from kvine.cache.shelf import SealedShelf
from kvine.cache.spec import CacheSpec
from kvine.config import CacheConfig, EngineConfig
from kvine.engine.build import standard_parts
from kvine.engine.engine import EngineParts
from kvine.engine.runner import Runner
from kvine.models.load import LoadedModel

Fault = Callable[[EngineParts], EngineParts]


def healthy(model: LoadedModel, cache: CacheConfig) -> EngineParts:
    """The engine as it is."""
    return standard_parts(model, cache, EngineConfig(), vocab_size=model.config.vocab_size, eos_ids=())


def broken(fault: Fault) -> Callable[[LoadedModel, CacheConfig], EngineParts]:
    """Builds engines with a fault."""
    return lambda model, cache: fault(healthy(model, cache))


def with_attention(change: Callable[[CachedAttention], CachedAttention]) -> Fault:
    """The same engine with another attention in its runner."""

    def apply(parts: EngineParts) -> EngineParts:
        runner = runner_of(parts)
        other = type(runner)(runner.decoder, change(runner.attention), runner.manager, runner.device)
        return replace(parts, runner=other)

    return apply


def with_backend(backend: Callable[[Backend], Backend]) -> Fault:
    """The same engine with other backends, each made from the one in whose place it comes."""

    def change(whole: CachedAttention) -> CachedAttention:
        backends = [backend(own) for own in whole.backends]
        return CachedAttention(whole.layers, whole.pools, backends, scale=whole.scale, softcap=whole.softcap)

    return with_attention(change)


def with_step(step: Callable[[CachedAttention, Batch], StepAttention]) -> Fault:
    """The same engine with another `attend`."""

    class Attention(CachedAttention):
        def step(self, batch: Batch) -> StepAttention:
            return step(self, batch)

    return with_attention(
        lambda whole: Attention(whole.layers, whole.pools, whole.backends, scale=whole.scale, softcap=whole.softcap)
    )


def with_batch(change: Callable[[CachedAttention, Batch], Batch]) -> Fault:
    """The same engine whose attention is handed another batch than the one that runs."""

    class Attention(CachedAttention):
        def step(self, batch: Batch) -> StepAttention:
            return super().step(change(self, batch))

    return with_attention(
        lambda whole: Attention(whole.layers, whole.pools, whole.backends, scale=whole.scale, softcap=whole.softcap)
    )


def with_pool(make: Callable[[KVPool], KVPool]) -> Fault:
    """The same engine over other memory."""

    def change(whole: CachedAttention) -> CachedAttention:
        pools = [make(pool) if isinstance(pool, KVPool) else pool for pool in whole.pools]
        return CachedAttention(whole.layers, pools, whole.backends, scale=whole.scale, softcap=whole.softcap)

    return with_attention(change)


def with_packed(make: Callable[[PackedPool], PackedPool]) -> Fault:
    """The same engine over other memory of packed blocks, where it has any."""

    def change(whole: CachedAttention) -> CachedAttention:
        pools = [make(pool) if isinstance(pool, PackedPool) else pool for pool in whole.pools]
        return CachedAttention(whole.layers, pools, whole.backends, scale=whole.scale, softcap=whole.softcap)

    return with_attention(change)


def with_manager(make: type[CacheManager]) -> Fault:
    """The same engine with another manager of its blocks."""
    return with_specs(lambda spec: spec, make)


def with_specs(change: Callable[[CacheSpec], CacheSpec], make: type[CacheManager] = CacheManager) -> Fault:
    """The same engine that keeps and sees other tokens."""

    def apply(parts: EngineParts) -> EngineParts:
        runner, old = runner_of(parts), parts.manager
        dtype = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[compute_dtype(runner)]
        whole = runner.attention
        manager = make(
            [change(pool.spec) for pool in whole.pools[: len(whole.backends)]],
            old.budget,
            dtype=dtype,
            prefix_caching=old.prefix_caching,
            capacities=[pool.capacity for pool in old.pools],
        )
        pools = [
            (PackedPool if isinstance(shelf, SealedShelf) else KVPool)(
                shelf.stored, pool.capacity, compute_dtype(runner), runner.device
            )
            for shelf, pool in zip(manager.shelves, old.pools, strict=True)
        ]
        attention = CachedAttention(whole.layers, pools, whole.backends, scale=whole.scale, softcap=whole.softcap)
        return replace(parts, manager=manager, runner=Runner(runner.decoder, attention, manager, runner.device))

    return apply


def runner_of(parts: EngineParts) -> Runner:
    """The runner of an engine with a cache."""
    assert isinstance(parts.runner, Runner)
    return parts.runner


def compute_dtype(runner: Runner) -> torch.dtype:
    """What the model computes in."""
    dtype: torch.dtype = runner.decoder.embedding.dtype  # type: ignore[attr-defined]
    return dtype


def decoded(batch: Batch) -> Tensor:
    """[N], true for tokens that are alone in their request's step."""
    counts = torch.tensor(batch.query_start).diff()  # [R]
    return (counts == 1).repeat_interleave(counts)


class OpenBackend:
    """Attention as in `kvine.attention.reference`, cut where faults are put in: keys, mask and heads.

    Args:
        own: the backend in whose place it comes.
    """

    name = "open"

    def __init__(self, own: Backend) -> None:
        self._own = own

    def unsupported(self, spec: CacheSpec, device: torch.device) -> str | None:
        """Serves everything."""
        return None

    def plan(self, batch: Batch, group: int, spec: CacheSpec) -> tuple[Batch, int, CacheSpec]:
        """Keeps the step as it is."""
        return batch, group, spec

    def attend(
        self,
        q: Tensor,
        kv: LayerKV,
        plan: tuple[Batch, int, CacheSpec],
        *,
        scale: float,
        q_sink: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See `Backend.attend`."""
        batch, group, spec = plan
        out = torch.empty_like(q)
        for r, length in enumerate(batch.context_len):
            rows = slice(batch.query_start[r], batch.query_start[r + 1])
            k, v, k_pos = self.gather(kv, batch.groups[group].block_tables[r], length, batch, spec)  # [Hkv, L, D], [L]
            visible = self.visible(spec, torch.arange(length - (rows.stop - rows.start), length), k_pos)  # [n, L]
            k, v = self.spread(k, q.shape[1]), self.spread(v, q.shape[1])  # [Hq, L, D]
            scores = torch.einsum("nhd,hld->hnl", q[rows].float(), k) * scale
            if q_sink is not None:
                sinks = torch.einsum("nhd,hld->hnl", q_sink[rows].float(), k) * scale
                scores = torch.where((k_pos >= 0) & (k_pos < spec.sink_tokens), sinks, scores)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            out[rows] = torch.einsum("hnl,hld->nhd", weights, v).to(q.dtype)
        return out

    def gather(
        self, kv: LayerKV, table: Sequence[int], length: int, batch: Batch, spec: CacheSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """K and V of a request, [Hkv, L, D] in fp32, and the position of each."""
        blocks = table[: spec.num_blocks(length)]
        index = torch.tensor([max(block, 0) for block in blocks])
        k, v = (x[index].float().transpose(0, 1).flatten(1, 2)[:, :length] for x in (kv.k, kv.v))
        held = torch.tensor([block != MISSING for block in blocks])
        positions = torch.arange(length)
        kept = held[positions // spec.block_size]
        return k[:, kept], v[:, kept], positions[kept]

    def visible(self, spec: CacheSpec, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """[n, L], which query sees which key."""
        seen: Tensor = spec.visible(q_pos[:, None], k_pos)
        return seen

    def spread(self, x: Tensor, num_heads: int) -> Tensor:
        """KV heads over query heads: [Hkv, L, D] → [Hq, L, D]."""
        return x.repeat_interleave(num_heads // x.shape[0], dim=0)
