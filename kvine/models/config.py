"""What a model is, whichever format it came from: the numbers that drive the decoder. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from kvine.errors import ModelLoadError
from kvine.rope_scaling import RopeConfig

MOST_LAYERS = 100_000  # far more than any model has; a config that asks for more is not believed
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class LayerConfig:
    """What differs between layers: how far back a query sees, in tokens with its own (None: all), and its rotation."""

    window: int | None
    rope: RopeConfig


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's architecture. Sizes are in elements, contexts in tokens.

    `attention_scale` multiplies queries times keys; `norm_offset` is added to every norm's stored weights (Gemma's
    safetensors store them less 1); `vocab_size` is the rows of the embedding, which may exceed the tokenizer's.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_context: int
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    activation: Activation = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def check(self, file: str) -> "ModelConfig":
        """Itself, or ModelLoadError naming `file` where its numbers contradict each other."""
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{file}: {self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads evenly "
                "(num_attention_heads and num_key_value_heads, or head_count and head_count_kv)."
            )
        if len(self.layers) != self.num_layers:
            raise ModelLoadError(f"{file}: {len(self.layers)} layers are described, but there are {self.num_layers}.")
        for index, layer in enumerate(self.layers):
            if layer.rope.rotary_dim > self.head_dim:
                raise ModelLoadError(
                    f"{file}: layer {index} rotates {layer.rope.rotary_dim} dimensions of heads of {self.head_dim}."
                )
            if layer.rope.kind == "longrope":
                raise ModelLoadError(
                    f"{file}: this model uses longrope, whose tables depend on each request's length; "
                    "Kvine does not support it yet."
                )
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if token_id >= self.vocab_size:
                raise ModelLoadError(
                    f"{file}: token id {token_id} (bos_token_id or eos_token_id) is outside the vocabulary of "
                    f"{self.vocab_size}."
                )
        return self
