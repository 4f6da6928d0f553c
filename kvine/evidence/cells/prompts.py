"""What cells read: a built-in set of short texts, a file of prompts, or runs that were recorded."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from kvine.errors import RequestError
from kvine.evidence.cells.setup import Prompt
from kvine.evidence.prompts import fox_prompt

TWO_BLOCKS = 64  # tokens: two blocks of the usual 32, and whole ones of 1 and 16

BUILT_IN = {
    "English": "The tide comes in twice a day because",
    "one token": "The",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return ",
    "two blocks": fox_prompt(20),
    "Chinese": "我們把讀過的字記下來，這樣就不必每次都",
    "repeated": "no " * 24,
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21, 34,",
    "question": "Question: Which is heavier, a kilogram of iron or a kilogram of feathers?\nAnswer:",
}
QUICK = ("English", "one token", "two blocks")


@dataclass(frozen=True)
class Source:
    """A prompt before a tokenizer has seen it.

    Attributes:
        name: shown in reports.
        prompt: a text, or token ids.
        text: ids that are to follow, of a recorded run.
        length: cut to this many tokens; None leaves it whole.
    """

    name: str
    prompt: str | list[int]
    text: tuple[int, ...] = ()
    length: int | None = None


def built_in(*, quick: bool) -> list[Source]:
    """The prompts that cells read unless told otherwise."""
    lengths = {"one token": 1, "two blocks": TWO_BLOCKS}
    return [Source(name, BUILT_IN[name], length=lengths.get(name)) for name in (QUICK if quick else BUILT_IN)]


def read_prompts(path: Path) -> list[Source]:
    """Prompts of a file: one a line, or lines (or one whole file) of JSON.

    A JSON object has `prompt` (a text, or token ids), or `prompt_ids` as `kvine generate --json` writes them; with
    `token_ids`, cells are held to these.

    Raises:
        RequestError: for a file that cannot be read, or is no such thing, with the line.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"The prompts in {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"The prompts in {path} cannot be read ({error}): give a text file in UTF-8.") from None
    whole = _whole_object(content)
    if whole is not None:
        return [_from_json(whole, str(path), "run")]
    sources = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        name = f"line {number}"
        if line.lstrip().startswith("{"):
            try:
                value = json.loads(line)
            except ValueError as error:
                raise RequestError(f"{path}, line {number}, begins like JSON but is none: {error}.") from None
            sources.append(_from_json(value, f"{path}, line {number}", name))
        else:
            sources.append(Source(name, line))
    if not sources:
        raise RequestError(f"There is no prompt in {path}: write one a line.")
    return sources


def encode(sources: Iterable[Source], encoder: Callable[[str | list[int]], list[int]]) -> tuple[Prompt, ...]:
    """Token ids of prompts, without those that this tokenizer makes the same of.

    Args:
        sources: the prompts.
        encoder: from a text to ids that the model knows; lists of ids are checked only.

    Raises:
        RequestError: for a prompt without tokens, or ids that the model does not know.
    """
    prompts: dict[tuple[tuple[int, ...], tuple[int, ...]], Prompt] = {}
    for source in sources:
        try:
            ids = tuple(encoder(source.prompt)[: source.length])
            text = tuple(encoder(list(source.text))) if source.text else ()
        except RequestError as error:
            raise RequestError(f"Prompt {source.name!r}: {error}") from None
        prompts.setdefault((ids, text), Prompt(source.name, ids, text))
    return tuple(prompts.values())


def _whole_object(content: str) -> Any:
    """The file as one JSON object over several lines; None if it is none."""
    try:
        value = json.loads(content)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _from_json(value: Any, where: str, name: str) -> Source:
    prompt = value.get("prompt_ids", value.get("prompt")) if isinstance(value, dict) else None
    if prompt is None or not (isinstance(prompt, str) or _are_ids(prompt)):
        raise RequestError(f'{where}: a recorded prompt is {{"prompt": TEXT}} or {{"prompt_ids": [...]}}.')
    text = value.get("token_ids", [])
    if not _are_ids(text):
        raise RequestError(f"{where}: token_ids is a list of token ids.")
    return Source(name, prompt, tuple(text))


def _are_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
