"""Text to ids and ids to bytes, over the `tokenizers` library, for checkpoint folders and GGUF files alike.

Decoding goes through the bytes of single tokens, so that one token at a time gives what all at once give.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from kvine.errors import ModelLoadError, RequestError
from kvine.text.chat import ChatTemplate
from kvine.text.folder_vocab import read_folder_vocabulary
from kvine.text.gguf_vocab import read_gguf_vocabulary
from kvine.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from kvine.formats.gguf import GGUFFile
    from kvine.hub import ModelSource


class Tokenizer:
    """One model's tokenizer. Safe to share between threads.

    Attributes:
        vocab_size: number of ids it knows, 0 … vocab_size - 1; a model's padded vocabulary may be larger, and ids
            beyond decode to nothing.
        bos_id: beginning of sequence, or None.
        eos_ids: ids that end a generation: end of text and end of turn, from every file that names one.
        chat_template: None if the model brings none.
        backend: the `tokenizers` object, for libraries that want it.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.backend: tokenizers.Tokenizer = vocabulary.backend
        self.vocab_size: int = vocabulary.size
        self.bos_id: int | None = vocabulary.bos_id
        self.eos_ids: frozenset[int] = vocabulary.eos_ids
        self.chat_template: ChatTemplate | None = vocabulary.chat_template
        self._prefix = list(vocabulary.prefix)
        self._to_bytes, self._strip_left = _piece_decoder(self.backend)
        self._added: dict[int, bool] = {  # id -> hidden
            i: token.special for i, token in self.backend.get_added_tokens_decoder().items()
        }
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text; special tokens spelled out in it are recognized.

        `add_special` puts BOS in front if that is this tokenizer's rule and the text does not begin with it already;
        nothing is ever taken away. Text that a chat template rendered is encoded without.
        Raises RequestError for text that is not Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("The text holds half of a surrogate pair: send valid Unicode.") from None
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        if add_special and self._prefix and ids[: len(self._prefix)] != self._prefix and ids[:1] != [self.bos_id]:
            return self._prefix + ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD. A SentencePiece model's own leading space is dropped."""
        data = b"".join(self.token_bytes(i, skip_special=skip_special) for i in ids)
        text = data.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._strip_left else text

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """What one token adds to a text in UTF-8: part of a character perhaps; b"" for special and unknown ids."""
        if skip_special and self._added.get(token_id, False):
            return b""
        data = self._bytes.get(token_id)
        if data is None:
            piece = self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            data = self._bytes[token_id] = self._to_bytes(piece, token_id in self._added) if piece is not None else b""
        return data

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One printable piece for each id: spaces as spaces, bytes that are no character as <0xE2>."""
        return [_printable(self.token_bytes(i, skip_special=False)) for i in ids]


def load_tokenizer(source: "ModelSource", file: "GGUFFile | None" = None) -> Tokenizer:
    """The tokenizer of a model on disk; `file` is the source's where that is open already.

    Raises ModelLoadError naming what is missing, damaged or of an unknown kind.
    """
    if source.format == "safetensors":
        return tokenizer_from_folder(source.path)
    if file is not None:
        return tokenizer_from_gguf(file.metadata)
    from kvine.formats.gguf_header import read_header  # brings the gguf package, which takes long to load

    return tokenizer_from_gguf(read_header(source.path).metadata)


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder. Raises ModelLoadError."""
    return Tokenizer(read_folder_vocabulary(folder))


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, cache: Path | None = None) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata. Raises ModelLoadError.

    `cache`: folder for what is derived from SentencePiece scores (default: the user's cache).
    """
    return Tokenizer(read_gguf_vocabulary(metadata, cache=cache))


PieceToBytes = Callable[[str, bool], bytes]  # (piece, is it an added token?) -> UTF-8


def _piece_decoder(backend: tokenizers.Tokenizer) -> tuple[PieceToBytes, bool]:
    """How a single piece becomes bytes, and whether a text loses one leading space.

    Raises ModelLoadError for decoders that do not work piece by piece.
    """
    state: Any = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes, False
    if kinds == ["Metaspace"] and steps[0]["replacement"] == "▁":
        return _spaced_bytes, steps[0].get("prepend_scheme", "always") != "never"
    replaces = [step for step in steps if step["type"] == "Replace"]
    spaced = all((step["pattern"], step["content"]) == ({"String": "▁"}, " ") for step in replaces)
    if len(replaces) == 1 and spaced and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        convert = _byte_fallback_bytes if "ByteFallback" in kinds else _spaced_bytes
        return convert, any(step["type"] == "Strip" and step["start"] > 0 for step in steps)
    raise ModelLoadError(
        f"The tokenizer's decoder ({', '.join(kinds)}) is of a kind that cannot be read here: byte-level and "
        "SentencePiece decoders can."
    )


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's alphabet: printable bytes stand for themselves, the others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_bytes(piece: str, added: bool) -> bytes:
    if added or not all(character in _ALPHABET for character in piece):
        return piece.encode()
    return bytes(_ALPHABET[character] for character in piece)


def _spaced_bytes(piece: str, added: bool) -> bytes:
    return piece.replace("▁", " ").encode()


def _byte_fallback_bytes(piece: str, added: bool) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match.group(1), 16)]) if match else _spaced_bytes(piece, added)


def _printable(data: bytes) -> str:
    text = data.decode("utf-8", errors="surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda match: f"<0x{ord(match.group()) - 0xDC00:02X}>", text)
