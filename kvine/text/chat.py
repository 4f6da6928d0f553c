"""Chat messages to the text that a model was trained on, by the template that came with it.

Templates are Jinja2 as transformers runs them: the same variables, filters and whitespace rules.
"""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from jinja2 import Template, TemplateError

from kvine.errors import RequestError
from kvine.text.sandbox import Meter, Sandbox


class ChatTemplate:
    """A model's chat template, compiled at its first use and rendered in a sandbox with bounded time and memory.

    Attributes:
        source: the template's text.
        origin: where it was found, for logs.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, origin: str) -> None:
        """`special_tokens`: text by name (`bos_token`, `eos_token`, …), as variables of the template."""
        self.source = source
        self.origin = origin
        self._special_tokens = dict(special_tokens)
        self._sandbox = Sandbox()
        self._template: Template | None = None
        self._lock = Lock()

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt for a conversation; with `add_generation_prompt`, up to where the assistant's answer begins.

        Each message has a `role` and a `content`: a string, or parts of the kind `{"type": "text", "text": …}`, which
        are joined by line breaks. Other entries are handed to the template as they are.
        Raises RequestError for other messages, and for templates that refuse them, fail, try to leave the sandbox or
        do not end.
        """
        checked = _checked(messages)
        with self._lock:
            self._sandbox.meter = Meter()
            try:
                if self._template is None:
                    self._template = self._sandbox.from_string(self.source)
                return self._template.render(
                    messages=checked,
                    add_generation_prompt=add_generation_prompt,
                    tools=None,  # templates ask whether it is none, not whether it is defined
                    documents=None,
                    **self._special_tokens,
                )
            except TemplateError as error:
                raise RequestError(
                    f"The chat template ({self.origin}) refused the messages: {error.message}"
                ) from error
            except Exception as error:  # a template can fail as any program can
                raise RequestError(
                    f"The chat template ({self.origin}) failed on these messages ({type(error).__name__}: {error}). "
                    "Check their roles and order, or send a plain prompt as a completion."
                ) from error


def _checked(messages: object) -> list[dict[str, Any]]:
    """Plain copies of the messages with string contents. Raises RequestError."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise RequestError('Messages are a non-empty list such as [{"role": "user", "content": "Hello"}].')
    checked = []
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        if not isinstance(message, Mapping):
            raise RequestError(f'{where} is no object: write {{"role": "user", "content": "…"}}.')
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise RequestError(f"{where} has no role: give one as a string, such as user or assistant.")
        others = {str(name): _plain(value, where) for name, value in message.items() if name != "content"}
        checked.append({**others, "content": _content(message.get("content"), where)})
    return checked


def _plain(value: object, where: str) -> Any:
    """A copy in plain types: the methods of other objects are beyond what the sandbox can judge."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item, where) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    raise RequestError(f"{where} holds a {type(value).__name__}: give texts, numbers, lists and objects, as in JSON.")


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return str.__str__(content)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"{where} has no content: give a string, or a list of text parts.")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f'{where} has a content part of type {kind!r}: only {{"type": "text", "text": "…"}} works.'
            )
        texts.append(part["text"])
    return "\n".join(texts)
