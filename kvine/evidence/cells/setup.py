"""One cell of `verify`: all that is chosen before a text is computed. Each level of a factor changes one thing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvine.config import CacheConfig, EngineConfig
from kvine.engine.engine import EngineParts
from kvine.spans import Spans

if TYPE_CHECKING:
    from kvine.evidence.cells.drive import History

# From the prompt's ids and the block size to the ids of another request; empty for none.
OtherRequest = Callable[[Sequence[int], int], list[int]]


@dataclass(frozen=True)
class Prompt:
    """A text that cells read.

    Attributes:
        name: shown in reports.
        ids: the prompt, at least one token.
        text: the tokens that every cell is held to after it; empty until the oracle has chosen them.
    """

    name: str
    ids: tuple[int, ...]
    text: tuple[int, ...] = ()


@dataclass(frozen=True)
class Setup:
    """What one cell does.

    Attributes:
        prompt: what it reads, and is held to.
        dtype: that the model computes in, `fp32`, `bf16` or `fp16`.
        cache, engine: options of the engine under test.
        history: how the text comes about, see `drive`.
        earlier: requests served, one after the other, before the text.
        mates: requests that run beside it.
        preempt_every: after so many steps the text gives its blocks up; None lets it keep them.
        tight: whether the cache has room for this text alone.
        num_beams: lines of a beam search by which the text comes about; 1 reads the prompt's own text.
        pinned: positions of the prompt that stay visible whatever the windows.
        on_disk: whether the requests before it are served by another engine, which leaves its blocks in a store.
        expects_hit: whether the beginning of the prompt must be found in the cache.
        exchange: exchange parts of the engine, in order.
    """

    prompt: Prompt
    dtype: str
    history: "History"
    cache: CacheConfig = field(default_factory=CacheConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    earlier: tuple[OtherRequest, ...] = ()
    mates: tuple[OtherRequest, ...] = ()
    preempt_every: int | None = None
    tight: bool = False
    num_beams: int = 1
    pinned: Spans = ()
    on_disk: bool = False
    expects_hit: bool = False
    exchange: tuple[Callable[[EngineParts], EngineParts], ...] = ()
