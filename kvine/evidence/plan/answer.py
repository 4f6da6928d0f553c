"""What a plan says: sizes in bytes, contexts in tokens."""

from dataclasses import dataclass

from kvine.cache.spec import CacheSpec
from kvine.config import CacheConfig, EngineConfig
from kvine.evidence.plan.machine import Quantity
from kvine.evidence.plan.subject import Subject
from kvine.evidence.plan.workspace import Workspace
from kvine.spans import Spans


@dataclass(frozen=True)
class Group:
    """Layers that see alike, and what they keep. Bytes are of K and V together, over all of these layers.

    Attributes:
        layers: numbers of the layers.
        window, sink_tokens, global_tokens: what their queries see; a window of None is the whole past.
        bytes_per_token: of one token, while it is kept.
        bytes_per_block: of one block, the unit in which memory is taken.
        kept_tokens: of one request at the planned context, in whole blocks.
        held_bytes: of all requests at the planned context.
    """

    layers: tuple[int, ...]
    window: int | None
    sink_tokens: int
    global_tokens: Spans
    bytes_per_token: int
    bytes_per_block: int
    kept_tokens: int
    held_bytes: int


@dataclass(frozen=True)
class Fits:
    """What a memory holds beside the weights and a step's workspace.

    Attributes:
        memory: its bytes, and where the figure comes from.
        needed_bytes: of the plan: weights, the most K and V that its requests hold at once, workspace.
        max_context: most tokens of each of the planned number of requests; None where a window bounds every layer and
            any length fits. Without one it is at most 2³¹ − 1, the longest text that Kvine counts.
        max_batch: most requests of the planned context.
    """

    memory: Quantity
    needed_bytes: int
    max_context: int | None
    max_batch: int

    @property
    def fits(self) -> bool:
        """Whether the plan itself does."""
        return self.needed_bytes <= self.memory.value


@dataclass(frozen=True)
class Walls:
    """What a decode step must read from memory, and the time below which it cannot take.

    Attributes:
        bandwidth: bytes a second that the machine reads.
        weight_bytes_per_step: read once, for all requests together.
        kv_bytes_per_step: read by each sequence for itself, over all requests.
        ms_per_token: floor of a step's time: each sequence gets one token from it. None where the weights are unknown.
        tokens_per_second: ceiling over all requests.
        crossover_context: shortest context from which on, at the planned batch, more is read of K and V than of
            weights; None if no context does.
        crossover_batch: the same of the batch, at the planned context.
    """

    bandwidth: Quantity
    weight_bytes_per_step: int | None
    kv_bytes_per_step: int
    ms_per_token: float | None
    tokens_per_second: float | None
    crossover_context: int | None
    crossover_batch: int | None


@dataclass(frozen=True)
class Plan:
    """The answer. All sizes in bytes, contexts in tokens.

    Attributes:
        subject: what was planned.
        cache, engine, device: what it was planned for.
        context, batch: tokens of each request, and how many requests.
        sequences, shared: samples or beams of each request, and how many tokens they share.
        kv_dtype: what K and V are kept in.
        specs: of the cache.
        weight_bytes: what the weights take while the model runs; None where that is unknown.
        kv_bytes_per_token: K and V of a token that every layer keeps.
        kv_bytes: K and V of all requests, in whole blocks, between two steps.
        kv_peak_bytes: the most that they hold at once: a step writes before old blocks are let go.
        groups: the layers by what they see.
        workspace: what a step takes beside; None for models that Kvine does not run.
        fits, walls: see there.
        warnings: sentences for the user.
    """

    subject: Subject
    cache: CacheConfig
    engine: EngineConfig
    device: str
    context: int
    batch: int
    sequences: int
    shared: int
    kv_dtype: str
    specs: tuple[CacheSpec, ...]
    weight_bytes: int | None
    kv_bytes_per_token: int
    kv_bytes: int
    kv_peak_bytes: int
    groups: tuple[Group, ...]
    workspace: Workspace | None
    fits: Fits
    walls: Walls
    warnings: tuple[str, ...]
