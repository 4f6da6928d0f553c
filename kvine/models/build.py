"""A decoder from its weights by role: the one place that knows which part takes which tensor."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvine import kernels
from kvine.kernels.packed import PackedLinear, PackedWeight
from kvine.models.config import ModelConfig
from kvine.models.decoder import Decoder, DecoderLayer
from kvine.models.layers import MLP, Embedding, Linear, RMSNorm
from kvine.models.matmul import choose_product


def build_decoder(
    config: ModelConfig, weights: Mapping[str, Tensor | PackedWeight], dtype: torch.dtype, device: torch.device
) -> Decoder:
    """`weights` holds every role of `required_shapes(config)` on `device`: norms in fp32, others in `dtype` or packed.

    Raises ConfigError if the environment asks for kernels that cannot run here.
    """
    native = kernels.chosen() if device.type == "cpu" else None
    bind = choose_product(dtype, device, native)

    def linear(role: str) -> Linear:
        return product(weights[f"{role}.weight"], plain(f"{role}.bias") if f"{role}.bias" in weights else None)

    def product(weight: Tensor | PackedWeight, bias: Tensor | None) -> Linear:
        if isinstance(weight, PackedWeight):
            assert native is not None
            return Linear(weight, bias, PackedLinear(native, weight, bias, dtype))
        return Linear(weight, bias, bind(weight, bias))

    def plain(role: str) -> Tensor:
        weight = weights[role]
        assert isinstance(weight, Tensor)
        return weight

    def norm(role: str) -> RMSNorm:
        return RMSNorm(plain(f"{role}.weight"), config.norm_eps, native)

    def optional_norm(role: str) -> RMSNorm | None:
        return norm(role) if f"{role}.weight" in weights else None

    def mlp(prefix: str) -> MLP:
        gate, up, down = (linear(f"{prefix}.{part}") for part in ("gate", "up", "down"))
        return MLP(gate, up, down, config.activation, native)

    def layer(prefix: str) -> DecoderLayer:
        return DecoderLayer(
            attn_norm=norm(f"{prefix}.attn_norm"),
            q_proj=linear(f"{prefix}.q"),
            k_proj=linear(f"{prefix}.k"),
            v_proj=linear(f"{prefix}.v"),
            o_proj=linear(f"{prefix}.o"),
            q_norm=optional_norm(f"{prefix}.q_norm"),
            k_norm=optional_norm(f"{prefix}.k_norm"),
            post_attn_norm=optional_norm(f"{prefix}.post_attn_norm"),
            mlp_norm=norm(f"{prefix}.mlp_norm"),
            mlp=mlp(prefix),
            post_mlp_norm=optional_norm(f"{prefix}.post_mlp_norm"),
        )

    embedding = weights["embedding.weight"]
    head = embedding if config.tie_embeddings else weights["head.weight"]
    scale = None
    if config.embedding_scale != 1.0:
        scale = torch.tensor(config.embedding_scale, dtype=dtype, device=device)
    return Decoder(
        config,
        Embedding(embedding, scale, dtype),
        [layer(f"layers.{index}") for index in range(config.num_layers)],
        norm("final_norm"),
        product(head, None),
    )
