"""What a model's weights take in memory, and how much of them a decode step reads.

Weights are read once a step, however many requests share it; an embedding table and experts are read in part.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from kvine.cache.layout import ITEM_BYTES
from kvine.models.config import ModelConfig
from kvine.models.names import held_bytes, is_norm, required_shapes
from kvine.models.packing import packed_row_bytes


@dataclass(frozen=True)
class Weights:
    """Weights as they are held while the model runs.

    Attributes:
        nbytes: all of them.
        parameters: how many numbers; None where only the bytes are known.
        source: where the figure comes from, in words.
        stored_bytes: what the checkpoint's tensors take on disk, where its headers or its index say so.
        lookup_bytes: of an embedding table that no head shares; a step reads one row for each token.
        row_bytes: one such row.
        expert_bytes: of all routed experts of a mixture; a token reads `experts_per_token` of `num_experts`.
    """

    nbytes: int
    parameters: int | None
    source: str
    stored_bytes: int | None = None
    lookup_bytes: int = 0
    row_bytes: int = 0
    expert_bytes: int = 0
    num_experts: int = 1
    experts_per_token: int = 1

    def bytes_per_step(self, batch: int) -> int:
        """Bytes that a decode step of `batch` requests reads, each byte once.

        Of a mixture's experts it reads those that any of its tokens is routed to: with even and independent routing
        the share 1 - (1 - k/E)^batch.
        """
        routed = 1 - (1 - self.experts_per_token / self.num_experts) ** batch
        looked_up = min(batch * self.row_bytes, self.lookup_bytes)
        return self.nbytes - self.lookup_bytes - self.expert_bytes + looked_up + round(self.expert_bytes * routed)

    def scaled(self, nbytes: int, source: str) -> "Weights":
        """The same parameters in `nbytes`, every part in proportion; rounded down, so that parts stay within it."""
        lookup, row, experts = (
            part * nbytes // self.nbytes for part in (self.lookup_bytes, self.row_bytes, self.expert_bytes)
        )
        return replace(self, nbytes=nbytes, source=source, lookup_bytes=lookup, row_bytes=row, expert_bytes=experts)


def weights_of(
    config: ModelConfig, dtype: str, packings: Mapping[str, str], stored_bytes: int | None = None
) -> Weights:
    """The weights of a model that Kvine runs: exactly what loading will report.

    `packings` are the types of those that are packed, by role; the others are held in `dtype`, norms in fp32.
    """
    held = held_bytes(config, dtype, packings)
    table, row = "embedding.weight", 0
    if not config.tie_embeddings:
        width = config.hidden_size
        row = packed_row_bytes(packings[table], width) if table in packings else width * ITEM_BYTES[dtype]
    return Weights(
        sum(held.values()),
        sum(prod(shape) for shape in required_shapes(config).values()),
        _in_words(config, dtype, packings),
        stored_bytes=stored_bytes,
        lookup_bytes=held[table] if row else 0,
        row_bytes=row,
    )


def _in_words(config: ModelConfig, dtype: str, packings: Mapping[str, str]) -> str:
    """How many parameters are held in what."""
    norms, numbers = 0, Counter[str]()
    for role, shape in required_shapes(config).items():
        if is_norm(role):
            norms += prod(shape)
        else:
            numbers[packings.get(role, dtype)] += prod(shape)
    parts = [f"{number:,} parameters in {kind}" for kind, number in numbers.most_common()]
    return f"{', '.join(parts)} and {norms:,} of norms in fp32"
