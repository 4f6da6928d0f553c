"""Tokenizers from a checkpoint folder: `tokenizer.json`, and the files around it that name its special tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from kvine.errors import ModelLoadError
from kvine.text.chat import ChatTemplate
from kvine.text.vocabulary import Vocabulary, bos_prefix, known_ids

_END_ROLES = ("eos_token", "eot_token", "eom_token")


def read_folder_vocabulary(folder: Path) -> Vocabulary:
    """The tokenizer of a checkpoint folder.

    EOS ids are joined from `config.json`, `generation_config.json` and the tokenizer's own eos, eot and eom tokens.
    Raises ModelLoadError for files that are missing or damaged.
    """
    config = _json(folder / "tokenizer_config.json")
    named = _token_texts(_json(folder / "special_tokens_map.json")) | _token_texts(config)
    backend = _backend(folder)
    bos_id = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
    return Vocabulary(
        backend=backend,
        size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        bos_id=bos_id,
        prefix=_prefix(backend, config.get("add_bos_token"), bos_id, folder),
        eos_ids=known_ids(backend, [named[role] for role in _END_ROLES if role in named])
        | _eos_ids(folder / "config.json")
        | _eos_ids(folder / "generation_config.json"),
        chat_template=_chat_template(folder, config, named),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is damaged ({error}): fetch it again.") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds no JSON object: fetch it again.")
    return content


def _backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        held = "only tokenizer.model" if (folder / "tokenizer.model").is_file() else "no tokenizer.json"
        raise ModelLoadError(
            f"{folder} holds {held}. Write a tokenizer.json beside it: "
            f"transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no narrower class
        raise ModelLoadError(f"{path} cannot be read ({error}): fetch it again.") from None
    backend.no_truncation()  # settings of the training run, of no use to an engine
    backend.no_padding()
    return backend


def _text(value: Any) -> str | None:
    """A special token is written as its text, or as an object with the text under `content`."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def _token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Every `*_token` of a configuration, `extra_special_tokens` included."""
    extra = config.get("extra_special_tokens")
    entries = {**(extra if isinstance(extra, Mapping) else {}), **config}
    return {name: text for name, value in entries.items() if name.endswith("_token") and (text := _text(value))}


def _prefix(backend: tokenizers.Tokenizer, flag: object, bos_id: int | None, folder: Path) -> tuple[int, ...]:
    """What goes before a text: `add_bos_token` decides where it is given, else the post-processor does."""
    if flag is False:
        return ()
    plain, full = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    start = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    return tuple(full[:start]) or bos_prefix(flag is True, bos_id, str(folder / "tokenizer_config.json"))


def _eos_ids(path: Path) -> frozenset[int]:
    value = _json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ModelLoadError(f"{path} gives eos_token_id as {value!r}: write an id or a list of ids.")
    return frozenset(ids)


def _chat_template(folder: Path, config: Mapping[str, Any], named: Mapping[str, str]) -> ChatTemplate | None:
    """A separate file goes before `tokenizer_config.json`, as in transformers; of named templates, `default` counts."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(path.read_text(encoding="utf-8"), named, origin=path.name)
    for name, content in (
        ("chat_template.json", _json(folder / "chat_template.json")),
        ("tokenizer_config.json", config),
    ):
        source = content.get("chat_template")
        if isinstance(source, list):
            templates = {t.get("name"): t.get("template") for t in source if isinstance(t, Mapping)}
            source = templates.get("default") or (next(iter(templates.values())) if len(templates) == 1 else None)
        if isinstance(source, str):
            return ChatTemplate(source, named, origin=name)
    return None
