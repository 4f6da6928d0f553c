"""Short generations in which each fault shows as its user would meet it. Greedy, so that they can be repeated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from kvine.cache.hashing import digest
from kvine.config import CacheConfig
from kvine.engine.engine import EngineParts
from kvine.evidence.traps.bench import Bench
from kvine.text.tokenizer import Tokenizer

TALE = "Once upon a time, there was a little girl who lived in a small village at the edge of a forest. One morning"
FRANCE, JAPAN = "The capital of France is", "The capital of Japan is"
BREAD = "To bake bread, you need flour, water, yeast and salt. First, mix the flour with the"
NEW_TOKENS = 32


@dataclass(frozen=True)
class Story:
    """How one sample is made.

    Attributes:
        what: is done, in a few words.
        prompt: whose continuation is shown.
        tell: generates on a bench, and returns the text shown.
        dtype: of the model.
        cache: of the engine.
    """

    what: str
    prompt: str
    tell: Callable[[Bench, Tokenizer], str]
    dtype: str = "fp32"
    cache: CacheConfig = field(default_factory=CacheConfig)


def tell(story: Story, parts: EngineParts, tokenizer: Tokenizer) -> str:
    """One sample's text; where a model call fails, its error instead."""
    bench = Bench(parts, snapshots=False)
    try:
        return story.tell(bench, tokenizer)
    except (RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _write(bench: Bench, logits: dict[str, Tensor], count: int = NEW_TOKENS) -> dict[str, list[int]]:
    """Each sequence writes greedily, all in one batch; what has been written, the tokens in `logits` first."""
    written: dict[str, list[int]] = {name: [] for name in logits}
    for step in range(count):
        for name, row in logits.items():
            token = int(row.nan_to_num(nan=-torch.inf).argmax())
            written[name].append(token)
            bench.append(name, token)
        if step + 1 < count:
            logits = bench.feed(**dict.fromkeys(logits, 1))
    return written


def _plain(bench: Bench, tokenizer: Tokenizer) -> str:
    bench.open("a", tokenizer.encode(TALE))
    return tokenizer.decode(_write(bench, {"a": bench.catch_up("a")})["a"])


def _in_batch(bench: Bench, tokenizer: Tokenizer) -> str:
    texts = {"a": tokenizer.encode(TALE), "b": tokenizer.encode(BREAD)}
    return _side_by_side(bench, tokenizer, texts, "a")


def _in_rectangle(bench: Bench, tokenizer: Tokenizer) -> str:
    long = tokenizer.encode(" ".join([BREAD] * 12))
    story = tokenizer.encode(TALE)
    texts = {"short": [*long[: 100 - len(story)], *story], "long": long[:200]}
    return _side_by_side(bench, tokenizer, texts, "short")


def _side_by_side(bench: Bench, tokenizer: Tokenizer, texts: Mapping[str, Sequence[int]], shown: str) -> str:
    for name, tokens in texts.items():
        bench.open(name, tokens)
    logits = bench.feed(**{name: len(tokens) for name, tokens in texts.items()})
    return tokenizer.decode(_write(bench, logits)[shown])


def _beams(bench: Bench, tokenizer: Tokenizer) -> str:
    bench.open("a", tokenizer.encode(TALE))
    first = bench.catch_up("a")
    bench.fork("a", "b")
    bench.fork("a", "c")
    best = first.topk(3).indices
    forced = {name: torch.zeros_like(first).index_fill(0, best[i], 1.0) for i, name in enumerate("abc")}
    written = _write(bench, forced, 12)
    last = bench.feed(a=1, b=1, c=1)
    bench.release("a")
    bench.fork("c", "d")
    second = torch.zeros_like(first).index_fill(0, last["c"].topk(2).indices[1], 1.0)
    more = _write(bench, {"c": last["c"], "d": second, "b": last["b"]}, 20)
    return tokenizer.decode([*written["c"], *more["d"]])


def _bytes(bench: Bench, tokenizer: Tokenizer) -> str:
    text = _plain(bench, tokenizer)
    pools = bench.runner.attention.pools
    size = sum(x.nbytes // (pool.num_blocks * pool.spec.block_size) for pool in pools for x in (pool.k, pool.v))
    return f"{text}\n[{size:,} bytes of K and V for each token]"


def _early(bench: Bench, tokenizer: Tokenizer) -> str:
    tokens = tokenizer.encode(TALE)
    bench.open("first", tokens)
    bench.feed(first=4)
    bench.open("second", tokens)
    return tokenizer.decode(_write(bench, {"second": bench.catch_up("second", chunk=4)})["second"])


def _lookalike(bench: Bench, tokenizer: Tokenizer) -> str:
    index = bench.manager.index
    bench.manager.index = type(index)(len(bench.manager.specs), lambda data: digest(b""))
    bench.open("a", tokenizer.encode(FRANCE))
    bench.catch_up("a")
    bench.open("b", tokenizer.encode(JAPAN))
    return tokenizer.decode(_write(bench, {"b": bench.catch_up("b")})["b"])


def _rollback(bench: Bench, tokenizer: Tokenizer) -> str:
    begin = tokenizer.encode("The capital of")
    bench.open("a", [*begin, *tokenizer.encode(" France is Paris, and the capital of Spain is Madrid.")])
    bench.catch_up("a")
    bench.crop("a", len(begin))
    bench.append("a", *tokenizer.encode(" Japan is"))
    return tokenizer.decode(_write(bench, {"a": bench.catch_up("a")}, 10)["a"])


def _branches(bench: Bench, tokenizer: Tokenizer) -> str:
    bench.open("a", tokenizer.encode("The capital of"))
    bench.catch_up("a")
    bench.fork("a", "b")
    bench.append("a", *tokenizer.encode(" Japan is"))
    bench.append("b", *tokenizer.encode(" France is"))
    logits = bench.feed(a=len(tokenizer.encode(" Japan is")), b=len(tokenizer.encode(" France is")))
    return tokenizer.decode(_write(bench, logits)["a"])


_SMALL = CacheConfig(block_size=4)
STORIES: Mapping[str, Story] = MappingProxyType(
    {
        "plain": Story("alone, token by token", TALE, _plain),
        "batch": Story("in one batch with another prompt", TALE, _in_batch),
        "rectangle": Story("100 tokens beside 200 in one batch", f"… {TALE}", _in_rectangle),
        "beams": Story("the third of three beams, then its second branch", TALE, _beams),
        "bytes": Story("in fp16", TALE, _bytes, dtype="fp16"),
        "bits": Story("a bf16 model with its cache in fp16", TALE, _plain, "bf16", CacheConfig(kv_dtype="fp16")),
        "packed": Story("kept in 8 bits", TALE, _plain, cache=CacheConfig(block_size=4, kv_dtype="int8")),
        "error": Story("the first model call", TALE, _plain),
        "window": Story("with a window of 16", TALE, _plain, cache=CacheConfig(window=16)),
        "sinks": Story(
            "with a window of 16 and 4 sinks, counted in the cache",
            TALE,
            _plain,
            cache=CacheConfig(window=16, sink_tokens=4, sink_rule="in_cache"),
        ),
        "early": Story("while an equal prompt is being read, blocks of 4", TALE, _early, cache=_SMALL),
        "lookalike": Story(f"after {FRANCE!r}, all keys equal, blocks of 4", JAPAN, _lookalike, cache=_SMALL),
        "rollback": Story(
            "after a rollback of ' France is Paris, and the capital of Spain is Madrid.'", JAPAN, _rollback
        ),
        "branches": Story(f"beside a branch with {FRANCE!r}", JAPAN, _branches),
    }
)
