"""A tokenizer of single ASCII characters for the tiny checkpoints, whose 131 ids are more than it knows."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
CHARACTERS = ["Ċ", "Ġ", *map(chr, range(33, 127))]  # newline, space and the rest, as the byte-level alphabet has them
VOCABULARY = {text: number for number, text in enumerate([*SPECIAL, *CHARACTERS])}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(folder: Path, *, bos: bool = False, chat: bool = True) -> Path:
    """Adds the tokenizer's files to a checkpoint; `</s>` and `<|end|>` end a text."""
    backend = tokenizers.Tokenizer(models.BPE({c: VOCABULARY[c] for c in CHARACTERS}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend = with_special(backend)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|end|>", **({"chat_template": TEMPLATE} if chat else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def with_special(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Special tokens come first, so they are part of the model's own vocabulary and added by name."""
    state = json.loads(backend.to_str())
    state["model"]["vocab"] = VOCABULARY
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return backend


def ids(text: str) -> list[int]:
    """What the tokenizer must make of plain text, without its BOS."""
    return [VOCABULARY[{"\n": "Ċ", " ": "Ġ"}.get(c, c)] for c in text]
