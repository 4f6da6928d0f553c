"""What a tokenizer is made of, whatever file it came from: the meeting point of the readers and `Tokenizer`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import tokenizers

from kvine.errors import ModelLoadError
from kvine.text.chat import ChatTemplate


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's parts.

    Attributes:
        backend: splits, merges and knows the added tokens; its post-processor is not used.
        size: ids below this are known; a model's logits may be wider.
        bos_id: beginning of sequence, if there is one.
        prefix: ids that the tokenizer's own rule puts before a text: BOS, or nothing.
        eos_ids: ids that end a generation.
        chat_template: how messages become text; None if the model brings no template.
    """

    backend: tokenizers.Tokenizer
    size: int
    bos_id: int | None = None
    prefix: tuple[int, ...] = ()
    eos_ids: frozenset[int] = field(default_factory=frozenset)
    chat_template: ChatTemplate | None = None


def bos_prefix(add_bos: bool, bos_id: int | None, where: str) -> tuple[int, ...]:
    """The ids before a text. Raises ModelLoadError if BOS is wanted and there is none."""
    if not add_bos:
        return ()
    if bos_id is None:
        raise ModelLoadError(f"{where} asks for a BOS token before each text and names none: set its BOS token.")
    return (bos_id,)


def named_tokens(ids: Mapping[str, int | None], backend: tokenizers.Tokenizer) -> dict[str, str]:
    """Text of the special tokens that have one, by the names that chat templates use (`bos_token`, …)."""
    texts = {name: backend.id_to_token(i) for name, i in ids.items() if i is not None}
    return {name: text for name, text in texts.items() if text is not None}


def known_ids(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> frozenset[int]:
    """Ids of those texts that are tokens."""
    return frozenset(i for text in texts if (i := backend.token_to_id(text)) is not None)
