"""Tokenizers small enough for tests, made on the spot: byte-level and SentencePiece kinds, as folders and as GGUF."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from kvine.text.tokenizer import Tokenizer
from kvine.text.vocabulary import Vocabulary

TEXTS = [
    "Hello world, it's me. The quick brown fox jumps over the lazy dog; isn't it nice?",
    "繁體中文測試：你好嗎？今天天氣很好，我們去公園走走。",
    "emoji 😀 and a family 👨‍👩‍👧‍👦, flags 🇹🇼, skin 👍🏽",
    "def f(x):\n    return x ** 2  # done\n\n\n\tif x:\r\n\t\tpass\n",
    "   leading,  double,    many      spaces and trailing   ",
    "1234567890 3.14159 ½ Ⅷ ٣",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "é e\u0301 Å ﷺ 한국어 日本語 العربية \u200b\u0000\x07",
    " ",
    "\n\n",
    "",
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(special: Sequence[str] = SPECIAL, merges: int = 300) -> tokenizers.Tokenizer:
    """Byte-level BPE trained on `TEXTS`, special tokens first: ids 0, 1, 2, then bytes and merges."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 256 + merges,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


def write_folder(folder: Path, backend: tokenizers.Tokenizer, **files: dict[str, Any]) -> Path:
    """`tokenizer.json`, and each keyword as a JSON file of its name."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def gguf_metadata(backend: tokenizers.Tokenizer, pre: str = "smollm", **extra: Any) -> dict[str, Any]:
    """The same byte-level BPE as the metadata of a GGUF file; added tokens are of type control."""
    state = json.loads(backend.to_str())
    vocab = {**state["model"]["vocab"], **{token["content"]: token["id"] for token in state["added_tokens"]}}
    added = {token["content"] for token in state["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3 if token in added else 1 for token in tokens], np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
        **{f"tokenizer.{key}": value for key, value in extra.items()},
    }


def spm_metadata(pieces: dict[str, float], user_defined: Sequence[str] = (), **extra: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary as GGUF: <unk>, <s>, </s>, <turn>, 256 bytes, user-defined tokens, scored pieces."""
    control = ["<unk>", "<s>", "</s>", "<end_of_turn>"]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*control, *byte_pieces, *user_defined, *pieces]
    kinds = [2, 3, 3, 3] + [6] * 256 + [4] * len(user_defined) + [1] * len(pieces)
    scores = [0.0] * (4 + 256) + [-1000.0] * len(user_defined) + list(pieces.values())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        **{f"tokenizer.{key}": value for key, value in extra.items()},
    }


def bytes_only() -> Tokenizer:
    """Byte-level with no merges: a byte's token id is the byte, 256 is a special token."""
    alphabet = {value: byte for byte, value in byte_characters().items()}
    backend = tokenizers.Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False, special=True)])
    return Tokenizer(Vocabulary(backend, size=257, eos_ids=frozenset([256])))


def byte_characters() -> dict[int, str]:
    """Byte -> character, read off the `tokenizers` library itself: its pre-tokenizer shows UTF-8 in its alphabet."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found: dict[int, str] = {}
    for point in [*range(0x80), *range(0x80, 0x800), *range(0x800, 0xD800, 64), *range(0xE000, 0x10FFFF, 4096)]:
        data = chr(point).encode()
        found.update(zip(data, "".join(piece for piece, _ in splitter.pre_tokenize_str(chr(point))), strict=True))
    unused = [byte for byte in range(256) if byte not in found]  # never part of UTF-8: C0, C1, F5 … FF
    free = [c for c in pre_tokenizers.ByteLevel.alphabet() if c not in found.values()]
    return found | dict(zip(unused, sorted(free), strict=True))


class ScriptedTokens(Tokenizer):
    """Each id is a given text or bytes: for streams alone."""

    def __init__(self, texts: Sequence[str | bytes]) -> None:
        self.texts = [text.encode() if isinstance(text, str) else text for text in texts]
        self.vocab_size = len(self.texts)

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        return self.texts[token_id]
