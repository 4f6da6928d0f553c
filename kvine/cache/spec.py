"""What a group of layers keeps and what a query may see of it: the engine's only definition of visibility.

The planner, the allocator and every attention backend ask here, so that they cannot disagree.
"""

from dataclasses import dataclass, replace
from typing import Any

from kvine.cache.layout import is_packed, part_bytes
from kvine.config import SinkRule
from kvine.spans import Spans, beyond_beginning, blocks_of, clipped, merged, num_positions


@dataclass(frozen=True)
class CacheSpec:
    """One group of layers that see alike and so share a block table.

    Attributes:
        layers: the model's layers in this group, ascending.
        num_kv_heads, head_dim: shape of one token's K (and V) in one layer.
        block_size: tokens in a block.
        window: a query at q sees keys k with q - k < window; None sees all.
        sink_tokens: the first tokens, visible past the window.
        sink_rule: at which distance sinks are seen, see `CacheConfig`.
        kept: runs of positions that are visible past the window too: merged, and none among the sinks.
        trained: whether the window is the model's own, which takes neither sinks nor anything else that is kept.
        key_codec, value_codec: how full blocks are stored, see `kvine.cache.layout`.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    block_size: int = 32
    window: int | None = None
    sink_tokens: int = 0
    sink_rule: SinkRule = "absolute"
    kept: Spans = ()
    trained: bool = False
    key_codec: str = "exact"
    value_codec: str = "exact"

    @property
    def num_layers(self) -> int:
        """Layers in the group."""
        return len(self.layers)

    def visible(self, q_pos: Any, k_pos: Any) -> Any:
        """Whether a query at q_pos reads the key at k_pos; on integers, arrays or tensors that broadcast."""
        causal = k_pos <= q_pos
        if self.window is None:
            return causal
        seen = (q_pos - k_pos < self.window) | (k_pos < self.sink_tokens)
        for first, end in self.kept:
            seen = seen | ((k_pos >= first) & (k_pos < end))
        return causal & seen

    def keeping(self, spans: Spans) -> "CacheSpec":
        """The same group for a sequence of which these positions stay visible, whatever the window.

        A run that begins where the sinks end, or before, makes them more. ValueError for others where sinks are
        counted inside the cache: what lies apart has no place there.
        """
        if self.window is None or self.trained or not spans:
            return self
        apart = beyond_beginning((*self.kept, *spans), self.sink_tokens)
        if apart and self.sink_rule == "in_cache":
            raise ValueError(apart)
        first, end = merged((*self.kept, *spans, (0, self.sink_tokens)))[0]
        return replace(self, sink_tokens=0 if first else end, kept=apart)

    def window_start(self, q_pos: int) -> int:
        """First position that a query at q_pos sees through its window, sinks aside."""
        return 0 if self.window is None else max(0, q_pos - self.window + 1)

    @property
    def sinks_move_from(self) -> int | None:
        """First position whose query reads the sinks by another rotation than its own; None if there is none.

        Under `in_cache` a query past the window stands at the end of a cache of S + W tokens (arXiv:2309.17453, §3.2).
        """
        if self.window is None or not self.sink_tokens or self.sink_rule == "absolute":
            return None
        return self.sink_tokens + self.window

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that num_tokens tokens fill, the last one perhaps partly."""
        return -(-num_tokens // self.block_size)

    def passed_blocks(self, num_accepted: int) -> range:
        """Blocks behind the sinks' that the window of no query at num_accepted or later reaches."""
        if self.window is None:
            return range(0)
        first = self.num_blocks(self.sink_tokens)
        return range(first, max(first, (num_accepted - self.window + 1) // self.block_size))

    def keeps(self, block: int) -> bool:
        """Whether something of a block stays visible past the window; sinks aside."""
        begin = block * self.block_size
        return any(first < begin + self.block_size and begin < end for first, end in self.kept)

    def dead_blocks(self, num_accepted: int) -> list[int]:
        """Blocks that no query at num_accepted or later can see."""
        return [block for block in self.passed_blocks(num_accepted) if not self.keeps(block)]

    def live_blocks(self, num_tokens: int) -> list[int]:
        """Blocks of a sequence of num_tokens tokens that some later query can see."""
        passed = self.passed_blocks(num_tokens)
        return [b for b in range(self.num_blocks(num_tokens)) if b not in passed or self.keeps(b)]

    def num_dead_blocks(self, num_tokens: int, below: int | None = None) -> int:
        """How many blocks `dead_blocks` lists, of those below number `below` if one is given."""
        passed = self.passed_blocks(num_tokens)
        stop = passed.stop if below is None else min(passed.stop, below)
        among = clipped(blocks_of(self.kept, self.block_size), passed.start, stop)
        return len(range(passed.start, stop)) - num_positions(among)

    def num_live_blocks(self, num_tokens: int) -> int:
        """How many blocks `live_blocks` lists: what a sequence holds between two steps."""
        return self.num_blocks(num_tokens) - self.num_dead_blocks(num_tokens)

    def max_live_blocks(self, num_tokens: int, chunk: int, num_sequences: int = 1) -> int:
        """Most blocks that sequences growing to num_tokens each need at once, computing at most `chunk` tokens a step.

        The step's tokens are shared out over the sequences in any way; and one is only let in where it could take the
        whole step by itself while the others decode.
        """
        whole = self.num_blocks(num_tokens)
        if self.window is None:
            return num_sequences * whole
        # A step reads or writes the window before its first token and its own tokens. The first of these positions may
        # lie at the end of a block, and each sequence's last block may be filled by a single token.
        around = self.window - 2 + self.block_size - 1

        def most(sequences: int, step: int) -> int:
            step = min(step, sequences * num_tokens)
            passed = self.passed_blocks(num_tokens - (step if sequences == 1 else 1))
            kept = num_positions(clipped(blocks_of(self.kept, self.block_size), passed.start, passed.stop))
            each = self.num_blocks(self.sink_tokens) + kept + 1
            return min(sequences * whole, sequences * each + (sequences * around + step) // self.block_size)

        return max(most(num_sequences, chunk), (num_sequences - 1) * most(1, 1) + most(1, chunk))

    def num_forked_blocks(self, num_tokens: int, num_sequences: int, num_shared: int) -> int:
        """What forks of one sequence hold between two steps, if they share what their first num_shared tokens fill."""
        shared = min(num_shared, num_tokens) // self.block_size
        shared -= self.num_dead_blocks(num_tokens, shared)
        return shared + num_sequences * (self.num_live_blocks(num_tokens) - shared)

    def max_forked_blocks(
        self, num_tokens: int, chunk: int, num_sequences: int, num_shared: int, num_families: int = 1
    ) -> int:
        """`max_live_blocks` of num_sequences forks of one sequence, or of several such families.

        Each fork takes a token in a step whatever the chunk. They share the blocks that their first num_shared tokens
        fill, and each copies the one after those before it writes there.
        """
        if num_sequences == 1:
            return self.max_live_blocks(num_tokens, chunk, num_families)
        apart = self.max_live_blocks(num_tokens, max(chunk, num_sequences), num_families * num_sequences)
        shared = min(num_shared, num_tokens) // self.block_size
        return min(apart, num_families * (shared + num_sequences * (self.num_blocks(num_tokens) - shared)))

    def num_visible(self, num_tokens: int) -> int:
        """Tokens that the last query of a sequence of num_tokens tokens reads, itself included."""
        if self.window is None or num_tokens <= self.window:
            return num_tokens
        beyond = num_tokens - self.window
        return self.window + num_positions(clipped(((0, self.sink_tokens), *self.kept), 0, beyond))

    def num_visible_pairs(self, num_tokens: int) -> int:
        """Pairs of query and key in a whole sequence: the sum of `num_visible` over 1 … num_tokens."""
        seen = num_tokens if self.window is None else min(num_tokens, self.window)
        beyond = num_tokens - seen
        pairs = seen * (seen + 1) // 2 + beyond * seen
        for first, end in clipped(((0, self.sink_tokens), *self.kept), 0, beyond):
            pairs += (end - first) * (2 * beyond - first - end + 1) // 2  # a kept key k past `beyond - k` windows
        return pairs

    @property
    def packs(self) -> bool:
        """Whether keys or values of a full block are packed, so that open blocks are kept apart."""
        return is_packed(self.key_codec) or is_packed(self.value_codec)

    def key_bytes(self, dtype: str) -> int:
        """Exact bytes of a head's keys in a sealed block of one layer, under compute dtype `fp32`, `bf16` or `fp16`."""
        return part_bytes("key", self.key_codec, self.block_size, self.head_dim, dtype)

    def value_bytes(self, dtype: str) -> int:
        """The same of values."""
        return part_bytes("value", self.value_codec, self.block_size, self.head_dim, dtype)

    def bytes_per_block(self, dtype: str) -> int:
        """Exact bytes of K and V in one sealed block over the group's layers."""
        return self.num_layers * self.num_kv_heads * (self.key_bytes(dtype) + self.value_bytes(dtype))

    def opened(self) -> "CacheSpec":
        """The same group with codecs for its open blocks."""
        key, value = ("exact" if is_packed(codec) else codec for codec in (self.key_codec, self.value_codec))
        return replace(self, key_codec=key, value_codec=value)
