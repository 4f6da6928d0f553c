"""`plan`: what a model takes, what fits, and how fast it can be at most. Arithmetic only; nothing is loaded or run.

The formulas live with what they describe, in `cache/spec.py` and `models/`: the allocator goes by the same ones.
"""

from collections.abc import Callable

from kvine.cache.shelf import Shelf, shelves_of
from kvine.config import MOST_TOKENS, CacheConfig, EngineConfig, check_dtype, parse_bytes
from kvine.errors import ConfigError
from kvine.evidence.plan.answer import Fits, Group, Plan, Walls
from kvine.evidence.plan.machine import Quantity, available_memory, measure_bandwidth, parse_bandwidth, planned_device
from kvine.evidence.plan.sources import subject_of
from kvine.evidence.plan.subject import Figures, Subject
from kvine.evidence.plan.weights import Weights
from kvine.evidence.plan.workspace import Workspace, workspace
from kvine.hub import Progress
from kvine.models.cache_specs import cache_specs

DEFAULT_CONTEXT = 8192
MOST_BATCH = 1 << 20


def plan(
    model: str | Subject | Figures,
    *,
    context: int | None = None,
    batch: int = 1,
    sequences: int = 1,
    shared: int = 0,
    memory: int | str | None = None,
    bandwidth: int | str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    weights: str = "auto",
    cache: CacheConfig | None = None,
    engine: EngineConfig | None = None,
    params: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plans a model's memory and the floor of its speed, from its config and headers alone.

    Args:
        model: an alias, a hub id, a folder, a config.json or a .gguf file; bare figures; or a subject already read.
        context: tokens of each request; by default the model's context, at most 8,192.
        batch: requests side by side.
        sequences: samples or beams of each request.
        shared: tokens of its prompt, which they share; 0 counts each sequence in full.
        memory: bytes to fit into, or a text such as `24GiB`; by default what is free on this machine.
        bandwidth: bytes a second, or a text such as `19GB/s`; by default it is measured, which takes two seconds.
        dtype: compute dtype: `auto`, `fp32`, `bf16` or `fp16`.
        device: `auto`, `cpu`, `cuda` or `mps`.
        weights: how they are kept, as `LLM` takes it; `auto` for what is no model that Kvine runs.
        cache, engine: the options that it would run with.
        params: parameters, for a model that Kvine does not run.
        progress: hears of a fetch.

    Raises:
        ConfigError, FetchError, ModelLoadError: with a sentence that says what to do.
    """
    check_dtype(dtype)
    _check_count("batch", batch, MOST_BATCH)
    place = planned_device(device)
    if isinstance(model, str):
        subject = subject_of(model, dtype=dtype, device=place, weights=weights, params=params, progress=progress)
    elif weights != "auto":
        raise ConfigError("Figures do not say how weights are kept: leave out --weights, or name a model.")
    else:
        subject = model.subject(dtype) if isinstance(model, Figures) else model
    if context is None:
        context = min(DEFAULT_CONTEXT, subject.max_context or DEFAULT_CONTEXT)
    _check_count("context", context, MOST_TOKENS)
    _check_count("sequences", sequences, MOST_BATCH)
    _check_count("shared", shared, context, least=0)
    room = available_memory(place) if memory is None else Quantity(parse_bytes(memory), "given")
    speed = measure_bandwidth(place) if bandwidth is None else Quantity(parse_bandwidth(bandwidth), "given")
    planner = Planner(
        subject,
        cache or CacheConfig(),
        engine or EngineConfig(),
        device=place,
        room=room,
        speed=speed,
        sequences=sequences,
        shared=shared,
    )
    return planner.plan(context, batch)


class Planner:
    """The formulas of one subject under one set of options, as functions of context and batch.

    Args:
        subject: what is planned.
        cache, engine: the options.
        device: the kind of device.
        room, speed: memory to fit into, and bandwidth.
        kv_bits: bits of each number of K and V, for a width that no codec has; its scales are not counted.
        sequences, shared: samples or beams of each request, and tokens that they share.
    """

    def __init__(
        self,
        subject: Subject,
        cache: CacheConfig,
        engine: EngineConfig,
        *,
        device: str,
        room: Quantity,
        speed: Quantity,
        kv_bits: int | None = None,
        sequences: int = 1,
        shared: int = 0,
    ) -> None:
        self.subject, self.cache, self.engine = subject, cache, engine
        self.device, self.room, self.speed = device, room, speed
        self.sequences, self.shared = sequences, shared
        self.specs = cache_specs(subject, cache)
        if kv_bits is not None:  # a block of so many bits is the same before and after it is full
            self.specs = tuple(spec.opened() for spec in self.specs)
        self.shelves = shelves_of(self.specs)
        if kv_bits is None:
            self.kv_dtype = subject.dtype if cache.kv_dtype == "exact" else cache.kv_dtype
            sizes = [shelf.bytes_per_block(subject.dtype) for shelf in self.shelves]
        else:
            self.kv_dtype = f"{kv_bits} bits"
            in_token = 2 * subject.num_kv_heads * subject.head_dim
            sizes = [spec.num_layers * in_token * spec.block_size * kv_bits // 8 for spec in self.specs]
        self.shelf_sizes = sizes
        self.sizes = sizes[: len(self.specs)]
        self.token_sizes = [size // cache.block_size for size in self.sizes]
        self.weights = subject.weights

    def held(self, context: int, batch: int) -> int:
        """Bytes of the blocks that all requests hold between two steps; beams may share more."""
        shelves = zip(self.shelves, self.shelf_sizes, strict=True)
        return batch * sum(self._blocks(shelf, context) * size for shelf, size in shelves)

    def peak(self, context: int, batch: int) -> int:
        """Bytes of the blocks that they hold at most, while a step runs."""
        chunk, family = self.engine.max_step_tokens, (self.sequences, self.shared, batch)
        shelves = zip(self.shelves, self.shelf_sizes, strict=True)
        return sum(shelf.max_forked_blocks(context, chunk, *family) * size for shelf, size in shelves)

    def read(self, context: int, batch: int) -> int:
        """Bytes of K and V that a decode step reads at most, each sequence its own; of packed blocks, one exact."""
        total = sum(s.num_visible(context) * n for s, n in zip(self.specs, self.token_sizes, strict=True))
        opened = zip(self.shelves[len(self.specs) :], self.shelf_sizes[len(self.specs) :], strict=True)
        for shelf, size in opened:
            tokens = min(shelf.spec.num_visible(context), shelf.spec.block_size)
            packed = self.token_sizes[self.specs.index(shelf.spec)]
            total += tokens * (size // shelf.spec.block_size - packed)
        return batch * self.sequences * total

    def workspace(self, context: int, batch: int) -> Workspace | None:
        """What a step takes beside; None for a model that Kvine does not run."""
        if self.subject.model is None:
            return None
        return workspace(
            self.subject.model,
            self.specs,
            dtype=self.subject.dtype,
            on_cpu=self.device == "cpu",
            packings=self.subject.packings,
            context=context,
            batch=batch * self.sequences,
            max_step_tokens=self.engine.max_step_tokens,
        )

    def needed(self, context: int, batch: int) -> int:
        """Weights, K and V at their most, and workspace."""
        beside = self.workspace(context, batch)
        held = self.peak(context, batch) + (0 if beside is None else beside.nbytes)
        return held + (0 if self.weights is None else self.weights.nbytes)

    def fits(self, context: int, batch: int) -> Fits:
        """What the memory holds. `needed` never shrinks with context or batch, so each most is its exact inverse."""

        def holds(tokens: int, requests: int) -> bool:
            return self.needed(tokens, requests) <= self.room.value

        longest = _last(lambda tokens: holds(tokens, batch), MOST_TOKENS)
        bounded = all(spec.window is not None for spec in self.specs)
        return Fits(
            memory=self.room,
            needed_bytes=self.needed(context, batch),
            max_context=None if longest == MOST_TOKENS and bounded else longest,
            max_batch=_last(lambda requests: holds(context, requests), MOST_BATCH),
        )

    def walls(self, context: int, batch: int) -> Walls:
        """What a decode step reads, and the floor of its time."""
        of_kv, weights = self.read(context, batch), self.weights
        if weights is None:
            return Walls(self.speed, None, of_kv, None, None, None, None)
        of_weights = weights.bytes_per_step(batch * self.sequences)
        seconds = (of_weights + of_kv) / self.speed.value
        by_context = _last(lambda tokens: self.read(tokens, batch) <= of_weights, MOST_TOKENS)
        by_batch = _last(self._reads_less(context, weights), MOST_BATCH)
        return Walls(
            bandwidth=self.speed,
            weight_bytes_per_step=of_weights,
            kv_bytes_per_step=of_kv,
            ms_per_token=seconds * 1e3,
            tokens_per_second=batch * self.sequences / seconds,
            crossover_context=None if by_context == MOST_TOKENS else by_context + 1,
            crossover_batch=None if by_batch == MOST_BATCH else by_batch + 1,
        )

    def plan(self, context: int, batch: int) -> Plan:
        """The whole answer."""
        subject = self.subject
        fits = self.fits(context, batch)
        return Plan(
            subject=subject,
            cache=self.cache,
            engine=self.engine,
            device=self.device,
            context=context,
            batch=batch,
            sequences=self.sequences,
            shared=self.shared,
            kv_dtype=self.kv_dtype,
            specs=self.specs,
            weight_bytes=None if self.weights is None else self.weights.nbytes,
            kv_bytes_per_token=sum(self.token_sizes),
            kv_bytes=self.held(context, batch),
            kv_peak_bytes=self.peak(context, batch),
            groups=tuple(self._group(g, context, batch) for g in range(len(self.specs))),
            workspace=self.workspace(context, batch),
            fits=fits,
            walls=self.walls(context, batch),
            warnings=_warnings(subject, context, fits),
        )

    def _group(self, group: int, context: int, batch: int) -> Group:
        spec, size = self.specs[group], self.sizes[group]
        blocks = spec.num_live_blocks(context)
        held = sum(
            self._blocks(shelf, context) * size
            for shelf, size in zip(self.shelves, self.shelf_sizes, strict=True)
            if shelf.spec == spec
        )
        return Group(
            layers=spec.layers,
            window=spec.window,
            sink_tokens=spec.sink_tokens,
            global_tokens=spec.kept,
            bytes_per_token=self.token_sizes[group],
            bytes_per_block=size,
            kept_tokens=blocks * spec.block_size,
            held_bytes=batch * held,
        )

    def _blocks(self, shelf: Shelf, context: int) -> int:
        return shelf.num_forked_blocks(context, self.sequences, self.shared)

    def _reads_less(self, context: int, weights: Weights) -> Callable[[int], bool]:
        """Whether so many requests read less of K and V than of the weights."""
        return lambda number: self.read(context, number) <= weights.bytes_per_step(number * self.sequences)


def _warnings(subject: Subject, context: int, fits: Fits) -> tuple[str, ...]:
    warnings = list(subject.notes)
    trained = subject.max_context
    if subject.weights is None:
        warnings.append("The weights are not counted: what fits would have to fit beside them. Give --params.")
    if trained is not None and context > trained:
        warnings.append(f"{context:,} tokens are beyond the context of {trained:,} that the model was trained for.")
    if not fits.fits:
        warnings.append("This plan does not fit the memory.")
    return tuple(warnings)


def _last(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which a condition holds that, once it fails, fails for good; 0 if none."""
    if holds(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _check_count(name: str, value: object, most: int, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} is {value!r}: give a whole number from {least} to {most}.")
