"""What a model call has to do at least: scores, arithmetic and bytes, by formula from config and specs alone.

A call computes the rows start … end - 1 of one text; with a cache that is one row, without one it is all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from kvine.cache.spec import CacheSpec
from kvine.models.config import ModelConfig
from kvine.models.names import held_bytes, required_shapes


@dataclass(frozen=True)
class Work:
    """Of one call, or of several added up.

    Attributes:
        pairs: queries with keys that they may see, over all layers and query heads: what a causal mask leaves.
        rectangle: rows × keys over the same, masked ones too: a textbook's 1,000 × 1,000.
        linear_flops: of products with weights, two for each weight and row.
        attention_flops: of queries with keys and of weights with values, four for each pair and dimension.
        weight_bytes: weights, read once a call.
        kv_bytes: keys and values that the queries see, read once a call, whether they come from a cache or were
            computed again.

    Norms, rotation, softmax and activations are left out: they grow with the rows only.
    """

    pairs: int = 0
    rectangle: int = 0
    linear_flops: int = 0
    attention_flops: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return self.linear_flops + self.attention_flops

    @property
    def bytes(self) -> int:
        """Bytes read."""
        return self.weight_bytes + self.kv_bytes

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Counter:
    """Counts the work of calls of one model.

    Attributes:
        model: its config.
        specs: of its cache.
        dtype: compute dtype, `fp32`, `bf16` or `fp16`.
        all_logits: whether a call computes the logits of all its rows, or of the last.
        packings: type of each packed weight, by role.
    """

    model: ModelConfig
    specs: tuple[CacheSpec, ...]
    dtype: str
    all_logits: bool = False
    packings: Mapping[str, str] = field(default_factory=dict)

    def call(self, start: int, end: int) -> Work:
        """The work of computing the rows start … end - 1, 0 <= start < end."""
        model, rows = self.model, end - start
        pairs = rectangle = kv_bytes = 0
        for spec in self.specs:
            heads = spec.num_layers * model.num_heads
            pairs += heads * (spec.num_visible_pairs(end) - spec.num_visible_pairs(start))
            keys = end - start - 1 + spec.num_visible(start + 1)
            rectangle += heads * rows * keys
            kv_bytes += keys * spec.bytes_per_block(self.dtype) // spec.block_size
        in_layers, head = self._linear_weights()
        return Work(
            pairs,
            rectangle,
            2 * (in_layers * rows + head * (rows if self.all_logits else 1)),
            4 * model.head_dim * pairs,
            self.weight_bytes,
            kv_bytes,
        )

    def cached(self, prompt: int, new: int) -> Work:
        """Generating `new` tokens after `prompt` ones with a cache: the prompt at once, then a row for each token."""
        return sum((self.call(n - 1, n) for n in range(prompt + 1, prompt + new)), self.call(0, prompt))

    def cache_free(self, prompt: int, new: int) -> Work:
        """The same without one: the whole text for each token."""
        return sum((self.call(0, n) for n in range(prompt, prompt + new)), Work())

    @property
    def weight_bytes(self) -> int:
        """Weights that a call reads; of an embedding that is not the head too it reads a few rows only."""
        sizes = held_bytes(self.model, self.dtype, self.packings).items()
        return sum(size for role, size in sizes if role != "embedding.weight" or self.model.tie_embeddings)

    def _linear_weights(self) -> tuple[int, int]:
        """Weights of all layers' products, and of the head's."""
        shapes = required_shapes(self.model)
        in_layers = sum(
            shape[0] * shape[1] for role, shape in shapes.items() if role.startswith("layers.") and len(shape) == 2
        )
        return in_layers, self.model.vocab_size * self.model.hidden_size


@dataclass(frozen=True)
class Balance:
    """Text lengths in tokens from which what grows outweighs what does not; None where it never does.

    Attributes:
        cache_free_flops: attention does more arithmetic than the products with weights, in a call over the whole text.
        cached_flops: the same in a call of one row.
        cached_bytes: K and V are more bytes than the weights, in a call of one row.
    """

    cache_free_flops: int | None
    cached_flops: int | None
    cached_bytes: int | None

    @classmethod
    def of(cls, counter: Counter) -> Self:
        """The balance of one model."""

        def outweighs(work: Work) -> bool:
            return work.attention_flops >= work.linear_flops

        return cls(
            first_length(lambda n: outweighs(counter.call(0, n))),
            first_length(lambda n: outweighs(counter.call(n - 1, n))),
            first_length(lambda n: counter.call(n - 1, n).kv_bytes >= counter.weight_bytes),
        )


def first_length(is_so: Callable[[int], bool], most: int = 1 << 40) -> int | None:
    """The least n >= 1 for which something that stays so is so."""
    if not is_so(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_so(middle) else (middle, high)
    return high
