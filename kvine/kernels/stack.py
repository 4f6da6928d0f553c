"""A whole decoder in one call: going back to Python and starting threads between two products takes as long as the
arithmetic of a small model.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvine.kernels import Kernels, PackedKind
from kvine.kernels.packed import NativeProduct


@dataclass(frozen=True, slots=True)
class StackShape:
    """What all layers have in common, and what comes before and after them.

    `scale` multiplies the scores and `softcap` bounds them. `embedding` and `head` are products with [vocabulary,
    hidden]; of the first only rows are read. `embedding_scale` multiplies these, 1 for none.
    """

    dtype: torch.dtype
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    scale: float
    softcap: float | None
    activation: str
    embedding: NativeProduct
    embedding_scale: float
    final_norm: Tensor
    head: NativeProduct
    vocab_size: int


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What layers of one kind have in common: rope, cache and layer group.

    Attributes:
        frequencies: fp64 [R / 2], radians a position.
        scaling: of cosines and sines.
        keys, values: the blocks of one such layer, [blocks, Hkv, block_size, D].
        group: the number of the layer group.
        packed: how full blocks are packed, and how many there are; then `keys` and `values` are the open ones.
    """

    frequencies: Tensor
    scaling: float
    keys: Tensor
    values: Tensor
    group: int
    packed: PackedKind | None = None


@dataclass(frozen=True, slots=True)
class StackLayer:
    """One layer: norms in fp32, of which those are None that the architecture lacks, products, where its past is kept,
    and the number of its kind.
    """

    attn_norm: Tensor  # [hidden]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    post_attn_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor
    post_mlp_norm: Tensor | None
    products: tuple[NativeProduct, ...]  # q, k, v, o, gate, up, down
    keys: Tensor  # [blocks, Hkv, block_size, D]
    values: Tensor
    kind: int
    sealed_keys: Tensor | None = None  # uint8 [blocks, Hkv, bytes], where full blocks are packed
    sealed_values: Tensor | None = None


class NativeStack:
    """A decoder over the blocks that hold its past, for steps in which each request has one query.

    The result equals that of the kernels called one by one, bit for bit.
    """

    def __init__(
        self, native: Kernels, shape: StackShape, kinds: Sequence[LayerKind], layers: Sequence[StackLayer]
    ) -> None:
        self._kept = (shape, tuple(kinds), tuple(layers))  # what the kernels read stays alive
        self._vocab_size = shape.vocab_size
        self._stack = native.path.stack(
            native.dtypes[shape.dtype],
            (shape.hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim),
            shape.norm_eps,
            shape.scale,
            shape.softcap or 0.0,
            native.activations[shape.activation],
            shape.embedding.bound,
            shape.embedding_scale,
            shape.final_norm.data_ptr(),
            shape.head.bound,
        )
        for kind in kinds:
            self._stack.add_kind(
                kind.frequencies.data_ptr(),
                len(kind.frequencies),
                kind.scaling,
                kind.keys.shape[2],
                kind.keys.shape[0],
                (native.dtypes[kind.keys.dtype], native.dtypes[kind.values.dtype]),
                kind.group,
            )
            if kind.packed is not None:
                self._stack.pack_kind(kind.packed.num_blocks, kind.packed.keys, kind.packed.values)
        for layer in layers:
            norms = (layer.attn_norm, layer.q_norm, layer.k_norm, layer.post_attn_norm, layer.mlp_norm)
            self._stack.add_layer(
                tuple(0 if norm is None else norm.data_ptr() for norm in (*norms, layer.post_mlp_norm)),
                tuple(product.bound for product in layer.products),
                layer.keys.data_ptr(),
                layer.values.data_ptr(),
                0 if layer.sealed_keys is None else layer.sealed_keys.data_ptr(),
                0 if layer.sealed_values is None else layer.sealed_values.data_ptr(),
                layer.kind,
            )

    def run(self, ids: list[int], wanted: list[int], groups: Sequence[list[int]]) -> Tensor:
        """Writes K and V of N tokens, one for each request, and computes logits, on torch's number of threads.

        Args:
            ids: N of them.
            wanted: the rows whose logits are wanted, ascending; M of them.
            groups: each layer group's plan (see `Kernels.decode`), of all N requests in order.

        Returns:
            [M, vocabulary] fp32.

        Raises:
            IndexError: for a token, a row or a block that there is not; nothing has been written then.
        """
        plan = array("q", ids)
        plan.extend(wanted)
        starts = []
        for group in groups:
            starts.append(len(plan))
            plan.extend(group)
        logits = torch.empty((len(wanted), self._vocab_size), dtype=torch.float32)
        self._stack.run(
            plan.buffer_info()[0], len(ids), len(wanted), starts, logits.data_ptr(), torch.get_num_threads()
        )
        return logits
