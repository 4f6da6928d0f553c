"""What an examination has an engine do, from the simple to the entangled, so that the first failure says most.

Lengths are counted in blocks, so that every probe crosses block boundaries whatever the block size is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from kvine.cache.hashing import digest
from kvine.config import CacheConfig
from kvine.engine.engine import EngineParts
from kvine.evidence.traps.bench import Bench

Dtype = Literal["base", "fp16", "bf16"]


@dataclass(frozen=True)
class Words:
    """Random token ids, none twice in a text where the vocabulary allows; the same text whenever it is asked for.

    Args:
        vocab_size: of the model.
        block: tokens in a block.
        seed: of all of them.
    """

    vocab_size: int
    block: int
    seed: int

    def text(self, which: int, length: int) -> list[int]:
        """Text number `which`, so many tokens."""
        generator = torch.Generator().manual_seed(1000 * self.seed + which)
        if length > self.vocab_size:
            return torch.randint(0, self.vocab_size, (length,), generator=generator).tolist()
        return torch.randperm(self.vocab_size, generator=generator)[:length].tolist()


Script = Callable[[Bench, Words], None]


@dataclass(frozen=True)
class Probe:
    """One thing to try.

    Attributes:
        name: shown in findings.
        script: what is done.
        dtype: of the model; `base` is the lab's own.
        change: options of the cache that differ from the examined configuration.
        colliding_hash: whether the prefix index gets a hash under which everything collides.
        blocks: of each layer group that fit the cache; None leaves it as large as it is.
    """

    name: str
    script: Script
    dtype: Dtype = "base"
    change: Callable[[CacheConfig], CacheConfig] = field(default=lambda cache: cache)
    colliding_hash: bool = False
    blocks: int | None = None

    def prepare(self, parts: EngineParts) -> None:
        """What is exchanged in an engine before its first use."""
        manager = parts.manager
        if self.blocks is not None:
            manager.budget = self.blocks * sum(pool.bytes_per_block for pool in manager.pools)
        if self.colliding_hash:
            manager.index = type(manager.index)(len(manager.specs), lambda data: digest(b""))


def alone(bench: Bench, words: Words) -> None:
    """A prompt at once, then token by token over a block boundary."""
    prompt = 2 * words.block + words.block // 2 + 1
    bench.open("a", words.text(1, prompt + words.block + 2))
    bench.feed(a=prompt)
    for _ in range(words.block + 2):
        bench.feed(a=1)


def chunks(bench: Bench, words: Words) -> None:
    """A prompt in chunks of odd lengths."""
    b = words.block
    sizes = (b + 1, 2, b, 1, 2 * b + 1)
    bench.open("a", words.text(1, sum(sizes) + 2))
    for size in (*sizes, 1, 1):
        bench.feed(a=size)


def batch(bench: Bench, words: Words) -> None:
    """Three texts of different lengths side by side."""
    b = words.block
    lengths = {"a": 2 * b + 1, "b": b + 2, "c": 3 * b}
    for number, (name, length) in enumerate(lengths.items()):
        bench.open(name, words.text(10 + number, length + b + 1))
    bench.feed(**lengths)
    for _ in range(b + 1):
        bench.feed(a=1, b=1, c=1)


def fork(bench: Bench, words: Words) -> None:
    """Beams: branches that write on, one dropped and another doubled, in other places of the batch."""
    b = words.block
    start = 2 * b + max(1, b // 2)
    bench.open("a", words.text(20, start))
    bench.feed(a=start)
    bench.fork("a", "b")
    bench.fork("a", "c")
    for step in range(2):
        for place, name in enumerate("abc"):
            bench.append(name, *words.text(100 + 10 * step + place, 1))
        bench.feed(a=1, b=1, c=1)
    bench.release("c")
    bench.fork("b", "d")
    for step in range(max(2, b // 2 + 1)):
        for place, name in enumerate("bda"):
            bench.append(name, *words.text(200 + 10 * step + place, 1))
        bench.feed(b=1, d=1, a=1)


def crop(bench: Bench, words: Words) -> None:
    """A rollback inside an open block, one inside a sealed one, and other tokens instead."""
    b = words.block
    start = 4 * b - 1
    bench.open("a", words.text(30, start))
    bench.feed(a=start)
    for number, length in enumerate((3 * b + b // 4, 2 * b + b // 2 - 1)):
        bench.crop("a", length)
        bench.append("a", *words.text(31 + number, b + 2))
        bench.catch_up("a", chunk=number + 1)


def prefix(bench: Bench, words: Words) -> None:
    """Texts that begin alike: whole blocks found, a block partly found and copied, and the first text once more."""
    b = words.block
    first = words.text(40, 2 * b + b // 2 + 2)
    bench.open("a", first)
    bench.catch_up("a")
    bench.release("a")
    shared = len(first) - 1
    for number, begin in enumerate((2 * b, shared, shared)):
        name = f"b{number}"
        bench.open(name, first[:begin] + words.text(41 + number, b + 1))
        bench.catch_up(name)
    bench.open("again", first + words.text(45, 3))
    bench.catch_up("again")


def early(bench: Bench, words: Words) -> None:
    """A second request for a text of which the first has computed only the beginning."""
    b = words.block
    text = words.text(50, 3 * b + 2)
    bench.open("a", text)
    bench.feed(a=b)
    bench.open("b", text)
    bench.catch_up("b", chunk=b)
    bench.catch_up("a", chunk=b)


def lookalikes(bench: Bench, words: Words) -> None:
    """Texts that are none of those in the cache, although a poor key takes them for one."""
    b = words.block
    first = words.text(60, 2 * b + 2)
    swapped = [first[1], first[0], *first[2:]] if first[0] != first[1] else [first[0] ^ 1, *first[1:]]
    turned = first[b : 2 * b] + first[:b] + first[2 * b :]
    for number, text in enumerate((first, swapped, turned, words.text(61, 2 * b + 2))):
        bench.open(f"s{number}", text)
        bench.catch_up(f"s{number}")


def scarce(bench: Bench, words: Words) -> None:
    """More texts than the cache holds: what is evicted must not be found, what is found must be true."""
    b = words.block
    for number in (70, 71, 70, 72, 73, 71, 70):
        bench.open("a", words.text(number, 3 * b + 1))
        bench.catch_up("a")
        bench.release("a")


def short(bench: Bench, words: Words) -> None:
    """A few tokens, for what shows at once."""
    bench.open("a", words.text(80, words.block + 4))
    bench.feed(a=words.block + 1)
    for _ in range(3):
        bench.feed(a=1)


def packed(bench: Bench, words: Words) -> None:
    """Blocks that fill up in pieces so small that each is seen before a window lets go of it."""
    bench.open("a", words.text(90, 3 * words.block + 2))
    bench.catch_up("a", chunk=3)


def _window(cache: CacheConfig) -> CacheConfig:
    return replace(cache, window=cache.block_size + 2, sink_tokens=0)


def _sinks(rule: Literal["absolute", "in_cache"]) -> Callable[[CacheConfig], CacheConfig]:
    def change(cache: CacheConfig) -> CacheConfig:
        return replace(cache, window=cache.block_size + 1, sink_tokens=2, sink_rule=rule)

    return change


def _packed(cache: CacheConfig) -> CacheConfig:
    return replace(cache, kv_dtype="int8", window=None, sink_tokens=0)


PROBES: Sequence[Probe] = (
    Probe("alone", alone),
    Probe("chunks", chunks),
    Probe("batch", batch),
    Probe("fork", fork),
    Probe("crop", crop),
    Probe("prefix", prefix),
    Probe("early hit", early),
    Probe("lookalikes", lookalikes, colliding_hash=True),
    Probe("scarce memory", scarce, blocks=7),
    Probe("window", chunks, change=_window),
    Probe("sinks", chunks, change=_sinks("absolute")),
    Probe("moved sinks", chunks, change=_sinks("in_cache")),
    Probe("packed", packed, change=_packed),
    Probe("fp16", short, dtype="fp16", change=lambda cache: replace(cache, kv_dtype="exact")),
    Probe("bf16 kept as fp16", short, dtype="bf16", change=lambda cache: replace(cache, kv_dtype="fp16")),
)
