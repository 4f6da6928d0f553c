"""The cache-free computation with products that round nothing: to measure how far packed weights' own rounding reaches.

What is multiplied with packed weights is rounded to 8 bits. On which side of a middle a number lies is up to the order
of some earlier sum, so that two right computations may differ by as much as all of this rounding, even in fp32.
"""

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from kvine.engine.cache_free import DenseRunner
from kvine.kernels.packed import PackedWeight
from kvine.models.decoder import Decoder, DecoderLayer
from kvine.models.layers import Linear


def with_exact_products(dense: DenseRunner) -> DenseRunner | None:
    """The same cache-free path, its packed weights unpacked for each product; None where no weight is packed."""
    decoder = dense.decoder
    if not isinstance(decoder, Decoder):
        return None
    linears = [decoder.head, *(linear for layer in decoder.layers for linear in _linears(layer))]
    if not any(isinstance(linear.weight, PackedWeight) for linear in linears):
        return None
    layers = [_with_exact_layer(layer) for layer in decoder.layers]
    head = with_exact_product(decoder.head)
    return DenseRunner(
        Decoder(decoder.config, decoder.embedding, layers, decoder.final_norm, head), dense.attention, dense.device
    )


def with_exact_product(linear: Linear) -> Linear:
    """The same product, of a packed weight's values in the dtype of what they are multiplied with."""
    weight, bias = linear.weight, linear.bias
    if not isinstance(weight, PackedWeight):
        return linear

    def product(x: Tensor) -> Tensor:
        return F.linear(x, weight.unpacked(x.dtype), bias)

    return replace(linear, product=product)


def _linears(layer: DecoderLayer) -> tuple[Linear, ...]:
    mlp = layer.mlp
    return layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, mlp.gate, mlp.up, mlp.down


def _with_exact_layer(layer: DecoderLayer) -> DecoderLayer:
    q, k, v, o, gate, up, down = map(with_exact_product, _linears(layer))
    mlp = replace(layer.mlp, gate=gate, up=up, down=down)
    return replace(layer, q_proj=q, k_proj=k, v_proj=v, o_proj=o, mlp=mlp)
