"""A two-layer Llama with random weights over single ASCII characters: a whole checkpoint folder in some kilobytes."""

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 2, 32, 4, 2, 8, 96
CHARACTERS = ["Ċ", "Ġ", *map(chr, range(33, 127))]  # as the byte-level alphabet writes newline, space and the rest
SPECIAL = ["<|user|>", "<|system|>", "<|assistant|>", "<|end|>"]
VOCABULARY = {text: i for i, text in enumerate(CHARACTERS + SPECIAL)}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_OF_A_LAYER = 2 * (HEADS + KV_HEADS) * HEAD_DIM * HIDDEN + 3 * 48 * HIDDEN + 2 * HIDDEN
WEIGHT_BYTES = 4 * (len(VOCABULARY) * HIDDEN + LAYERS * _OF_A_LAYER + HIDDEN)  # the head is the embedding


def kv_bytes(num_tokens: int, block_size: int = 32) -> int:
    """Bytes of whole fp32 blocks that hold so many tokens, K and V of every layer."""
    return -(-num_tokens // block_size) * block_size * 2 * LAYERS * KV_HEADS * HEAD_DIM * 4


def chat_tokens(*said: str, system: str | None = None) -> int:
    """Tokens of a prompt by TEMPLATE: a character each, two special tokens around what is said, one to begin with."""
    spoken = [*said] if system is None else [system, *said]
    return sum(len(text) + 2 for text in spoken) + 1


def write_checkpoint(folder: Path) -> Path:
    """Writes config, tokenizer with chat template, and weights; returns the folder."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(VOCABULARY),
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "eos_token_id": VOCABULARY["<|end|>"],
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({text: VOCABULARY[text] for text in CHARACTERS}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    save_file(_weights(), folder / "model.safetensors", {"format": "pt"})
    return folder


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.3

    weights = {"model.embed_tokens.weight": matrix(len(VOCABULARY), HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (48, HIDDEN),
            "mlp.up_proj": (48, HIDDEN),
            "mlp.down_proj": (HIDDEN, 48),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN)
    return weights
