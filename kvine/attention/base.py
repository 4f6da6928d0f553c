"""The contracts of the room: what a step computes (`Batch`), and what every backend offers (`Backend`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kvine.cache.pool import LayerKV
from kvine.cache.spec import CacheSpec
from kvine.spans import Spans


@dataclass(frozen=True)
class GroupBatch:
    """What a step reads and writes in one layer group.

    Attributes:
        block_tables: for each request its blocks by position, `sequence.MISSING` where one was let go.
        slot_mapping: [N] slots that the step's tokens are written to; empty where full blocks are packed.
        open_tables: where full blocks are packed, for each request its open ones by position, as above.
    """

    block_tables: list[list[int]]
    slot_mapping: Tensor
    open_tables: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Batch:
    """One model call: R requests with N new tokens in all, side by side and never padded.

    Attributes:
        input_ids, positions: [N].
        query_start: [R + 1]; request r's tokens are query_start[r] … query_start[r + 1] - 1.
        context_len: [R] tokens of each request after this call.
        groups: one for each layer group.
        logits_index: [M] rows of the hidden states whose logits are wanted.
        pinned: for each request what stays visible whatever the windows; empty if nothing does for any.
    """

    input_ids: Tensor
    positions: Tensor
    query_start: list[int]
    context_len: list[int]
    groups: tuple[GroupBatch, ...]
    logits_index: Tensor
    pinned: Sequence[Spans] = ()

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.context_len)

    def spec_of(self, request: int, spec: CacheSpec) -> CacheSpec:
        """What one request sees in a group of layers."""
        return spec.keeping(self.pinned[request]) if self.pinned else spec


class Backend(Protocol):
    """One way to compute attention over blocks. Stateless: what a step needs is in its plan."""

    name: str

    def unsupported(self, spec: CacheSpec, device: torch.device) -> str | None:
        """Why this backend cannot serve a spec on a device; None if it can."""
        ...

    def plan(self, batch: Batch, group: int, spec: CacheSpec) -> Any:
        """What `attend` needs to know of a step, worked out once for all layers of a group."""
        ...

    def attend(
        self,
        q: Tensor,
        kv: LayerKV,
        plan: Any,
        *,
        scale: float,
        q_sink: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attention of each query over what it may see of its own request.

        Args:
            q: [N, Hq, D], rotated.
            kv: the layer's blocks; the step's own K and V are written already.
            plan: of this step and group.
            scale: factor on the scores.
            q_sink: [N, Hq, D], the queries rotated to read the sinks, where that differs from q.
            softcap: bound c of scores, c·tanh(score / c), before the mask.

        Returns:
            [N, Hq, D] in q's dtype.
        """
        ...
