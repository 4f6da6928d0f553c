"""Tiny random decoders of transformers, most of them of kinds that Kvine does not run, and texts for them."""

import warnings
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 131
_IDS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2}
_HEADS = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
_LLAMA = {**_HEADS, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", _LLAMA),
    "Mistral": ("MistralConfig", {**_LLAMA, "sliding_window": 10}),
    "Gemma3": ("Gemma3TextConfig", {**_LLAMA, "sliding_window": 10, "layer_types": _ALTERNATING}),
    "GPT2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    "GPTNeoX": ("GPTNeoXConfig", {**_HEADS, "intermediate_size": 96, "max_position_embeddings": 512}),
    "Phi": ("PhiConfig", {**_HEADS, "intermediate_size": 96, "max_position_embeddings": 512}),
    "Falcon": ("FalconConfig", {**_HEADS, "max_position_embeddings": 512}),
    "Bloom": ("BloomConfig", {"hidden_size": 64, "n_layer": 3, "n_head": 4}),
}
_CLASSES = {"GPT2": "GPT2LMHeadModel"}
KINDS = tuple(_KINDS)


@cache
def decoder(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """The same random model on each call, with biases and norms that are random too. Do not change it."""
    name, options = _KINDS[kind]
    torch.manual_seed(1)
    config = getattr(transformers, name)(**_IDS, **options)
    model = getattr(transformers, _CLASSES.get(kind, f"{kind}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = None  # no end before the length that is asked for
    return model.to(dtype)


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    """[rows, length] random ids, none of them special."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids with 0 for padding, and the mask that says so, both [rows, longest]."""
    ids = text(len(lengths), max(lengths), seed)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : ids.shape[1] - length] = 0
        mask[row, : ids.shape[1] - length] = 0
    return ids, mask


def generated(model: Any, past: Any, ids: Tensor, mask: Tensor | None = None, new: int = 24, **options: Any) -> Any:
    """What `generate` makes, with its logits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # 5.24 prefers the name `cache`, which 5.23 does not have
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids) if mask is None else mask,
            past_key_values=past,
            max_new_tokens=new,
            return_dict_in_generate=True,
            output_logits=True,
            **{"do_sample": False, **options},
        )


def masked(visible: Tensor) -> Tensor:
    """A bool [rows, q, k] as the additive mask [rows, 1, q, k] that every model takes."""
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[:, None]


def seen(mask: Tensor, window: int, sinks: int) -> Tensor:
    """[rows, N, N]: whether a query sees a key, written apart from the cache: pair by pair, tokens counted by row."""
    rows, total = mask.shape
    table = torch.zeros(rows, total, total, dtype=torch.bool)
    for row in range(rows):
        start = total - int(mask[row].sum())
        for q in range(start, total):
            for k in range(start, q + 1):
                table[row, q, k] = k > q - window or k - start < sinks
    return table
