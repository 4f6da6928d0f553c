"""Tokenizers from GGUF metadata (`tokenizer.ggml.*`), which carries pieces and flags but no `tokenizer.json`.

Follows llama.cpp's meaning of the keys, and the ids that the models' own tokenizers give.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from kvine.errors import ModelLoadError
from kvine.text.chat import ChatTemplate
from kvine.text.pretokenizers import pre_tokenizer
from kvine.text.spm_merges import cached_merges
from kvine.text.vocabulary import Vocabulary, bos_prefix, known_ids, named_tokens

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

# Tokens that end a turn or a text by their name; a file often gives only one of those its model uses.
END_NAMES = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
        *(
            "<|return|>",
            "<|call|>",
            "<end_of_utterance>",
            "<turn|>",
            "<｜end▁of▁sentence｜>",
            "<EOT>",
            "[EOT]",
            "[EOS]",
        ),
    )
)


def read_gguf_vocabulary(metadata: Mapping[str, Any], *, cache: Path | None = None) -> Vocabulary:
    """The tokenizer of a GGUF file: byte-level BPE (`gpt2`) or SentencePiece (`llama`).

    `cache`: folder for what is derived from SentencePiece scores (default: the user's cache).
    Raises ModelLoadError for other kinds, unknown pre-tokenizers, and arrays or ids that contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _tokens(metadata)
    types = _numbers(metadata, "token_type", len(tokens), default=NORMAL).astype(np.int64)
    if kind == "gpt2":
        rule = pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
        backend = Tokenizer(_byte_level_bpe(metadata, tokens, rule.ignore_merges))
        backend.pre_tokenizer = rule.build()
        if (normalizer := rule.normalizer()) is not None:
            backend.normalizer = normalizer
        backend.decoder = decoders.ByteLevel()
        add_bos, defaults = rule.add_bos, {}
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens, types, cache)
        add_bos, defaults = True, {"bos": 1, "eos": 2, "unknown": 0}
    else:
        raise ModelLoadError(
            f"This GGUF's tokenizer is of the kind {kind!r}; 'gpt2' (byte-level BPE) and 'llama' (SentencePiece) can "
            "be read. Use the safetensors checkpoint with its tokenizer.json."
        )
    _add_special(backend, tokens, types)
    ids = {name: _token_id(metadata, name, len(tokens), defaults.get(name)) for name in _ID_NAMES}
    flag = metadata.get("tokenizer.ggml.add_bos_token")
    source = metadata.get("tokenizer.chat_template")
    named = named_tokens({f"{_TEMPLATE_NAMES[name]}_token": ids[name] for name in _TEMPLATE_NAMES}, backend)
    return Vocabulary(
        backend=backend,
        size=_known_size(types),
        bos_id=ids["bos"],
        prefix=bos_prefix(add_bos if flag is None else bool(flag), ids["bos"], "This GGUF"),
        eos_ids=_end_ids(backend, types, ids),
        chat_template=ChatTemplate(source, named, origin="GGUF metadata") if isinstance(source, str) else None,
    )


_ID_NAMES = ("bos", "eos", "eot", "eom", "unknown", "padding")
_TEMPLATE_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or set(map(type, tokens)) != {str}:
        raise ModelLoadError("This GGUF holds no vocabulary (tokenizer.ggml.tokens): use a complete model file.")
    return [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]


def _ids_by_text(tokens: Sequence[str]) -> dict[str, int]:
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise ModelLoadError(f"tokenizer.ggml.tokens names {twice!r} twice: the file is damaged, convert it again.")
    return ids


def _numbers(metadata: Mapping[str, Any], name: str, count: int, default: int | None = None) -> npt.NDArray[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None and default is not None:
        return np.full(count, default)
    array = np.asarray([] if values is None else values)
    if array.shape != (count,) or array.dtype.kind not in "iuf":
        raise ModelLoadError(
            f"tokenizer.ggml.{name} holds {array.size} numbers for {count} tokens: convert the file again."
        )
    return array


def _token_id(metadata: Mapping[str, Any], name: str, count: int, default: int | None) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return default if default is not None and default < count else None
    if not isinstance(value, int) or not 0 <= value < count:
        raise ModelLoadError(f"{key} is {value!r}, but the vocabulary has {count} tokens: convert the file again.")
    return value


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str], ignore_merges: bool) -> models.BPE:
    merges = metadata.get("tokenizer.ggml.merges")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges] if isinstance(merges, list) else []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ModelLoadError("tokenizer.ggml.merges is missing or damaged: convert the file again.")
    vocab = _ids_by_text(tokens)
    try:
        return models.BPE(vocab, pairs, ignore_merges=ignore_merges)
    except Exception as error:  # tokenizers raises no narrower class
        raise ModelLoadError(
            f"tokenizer.ggml.merges does not fit the vocabulary ({error}): convert the file again."
        ) from None


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: npt.NDArray[np.int64], cache: Path | None
) -> Tokenizer:
    """SentencePiece BPE as Llama's own `tokenizer.json` writes it: spaces become ▁, unknown characters bytes."""
    vocab = _ids_by_text(tokens)
    scores = _numbers(metadata, "scores", len(tokens)).astype(np.float32)
    spelled = np.flatnonzero((types == NORMAL) | (types == UNUSED)).tolist()
    merges = cached_merges(tokens, scores, spelled, cache)
    text = tokens.__getitem__
    pairs = list(zip(map(text, merges[:, 0].tolist()), map(text, merges[:, 1].tolist()), strict=True))
    unknown = _token_id(metadata, "unknown", len(tokens), 0)
    backend = Tokenizer(
        models.BPE(
            vocab,
            pairs,
            unk_token=tokens[unknown or 0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        backend.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = spaces
        backend.decoder = decoders.Sequence(decoding)
    return backend


def _add_special(backend: Tokenizer, tokens: Sequence[str], types: npt.NDArray[np.int64]) -> None:
    """Control and user-defined tokens are matched whole before anything else; only control tokens are hidden."""
    for kinds, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        chosen = np.flatnonzero(np.isin(types, kinds)).tolist()
        added = [AddedToken(tokens[i], normalized=False, special=special) for i in chosen]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)


def _known_size(types: npt.NDArray[np.int64]) -> int:
    """Ids up to the last one in use: converters pad a vocabulary to the model's with `[PAD…]` tokens of type unused."""
    return int(np.flatnonzero(types != UNUSED).max(initial=-1)) + 1


def _end_ids(backend: Tokenizer, types: npt.NDArray[np.int64], ids: Mapping[str, int | None]) -> frozenset[int]:
    named = frozenset(i for i in known_ids(backend, END_NAMES) if types[i] == CONTROL)
    # In the harmony format <|end|> closes a message of a turn that goes on; <|return|> and <|call|> end the turn.
    if known_ids(backend, ["<|return|>"]) & named:
        named -= known_ids(backend, ["<|end|>"])
    return named | {i for name in ("eos", "eot", "eom") if (i := ids[name]) is not None}
