"""`kvine generate`: continues one prompt; the text goes to stdout as it comes, everything else to stderr."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvine.cli.conversation import CHAT_NOTE
from kvine.cli.loading import open_llm
from kvine.cli.options import CacheOptions, ChoiceOptions, ModelOptions, SamplingOptions, parse_runs, spread_options
from kvine.cli.terminal import seconds_since_start, write, write_json
from kvine.errors import RequestError
from kvine.spans import merged

if TYPE_CHECKING:
    from kvine.engine.engine import ModelCall
    from kvine.generation import Generation, TextGeneration
    from kvine.llm import LLM
    from kvine.session import Session
    from kvine.spans import Spans


_NO_SESSION = (
    "--session goes on as one text, in the cache: give it without --chat, --no-cache, --n and --num-beams. "
    "Conversations are kept by /save in kvine chat."
)


@spread_options
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt as it stands; - reads stdin to its end.")],
    model: ModelOptions,
    sampling: SamplingOptions,
    several: ChoiceOptions,
    cache: CacheOptions,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt as a question, by the chat template.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message; with --chat.")] = None,
    pin: Annotated[
        str, typer.Option(metavar="RUNS", help="Positions of the prompt that no window drops, such as 0:20.")
    ] = "",
    pin_system: Annotated[bool, typer.Option("--pin-system", help="No window drops the system message.")] = False,
    session: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Go on with the text kept in FILE, or begin one; it is kept there again at the end."
        ),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Recompute the whole text for every token.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Show what each model call read, and the cache held.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, when the text is complete.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary after the text.")] = False,
) -> None:
    """Continue a prompt. The text goes to stdout as it comes, all else to stderr. Several texts come at the end."""
    params = several.of(sampling.params())
    if system is not None and not chat:
        raise RequestError("--system is part of a conversation: give --chat as well.")
    if pin_system and system is None:
        raise RequestError("--pin-system pins what --system says: give it too.")
    pinned = parse_runs("--pin", pin)
    if session is not None and (chat or no_cache or params.num_lines > 1):
        raise RequestError(_NO_SESSION)
    text = read_stdin() if prompt == "-" else prompt
    llm = open_llm(model, cache)
    ready_s = seconds_since_start()
    from kvine.cli import report

    calls: list[ModelCall] = []
    llm.trace(calls.append if trace else None)
    kept = None if session is None else _open_session(llm, session, pinned)
    if kept is not None:
        result = _shown(kept.stream(params, after=text), silent=json)
    else:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": text})
        ids = llm.encode_chat(messages) if chat else llm.encode(text)
        if pin_system:
            pinned += llm.system_span(messages)
        if json or params.num_lines > 1:
            result = llm.generate(ids, params, use_cache=not no_cache, pinned=pinned)
        else:
            result = _shown(llm.stream(ids, params, use_cache=not no_cache, pinned=pinned))
    if json:
        outcome = report.model_json(llm) | report.generation_json(llm, result, ready_s)
        write_json(outcome | {"trace": report.trace_json(calls)} if trace else outcome)
    else:
        if params.num_lines > 1:
            report.write_choices(result)
        if trace:
            report.show_trace(calls)
        for choice in result.choices if params.logprobs is not None else ():
            report.show_logprobs(llm.tokenizer, choice.logprobs or ())
        if not quiet:
            report.show_summary(llm, result, ready_s)
    if kept is not None and session is not None:
        kept.save(session)  # last: what it cannot write has been shown


def _shown(running: "TextGeneration", *, silent: bool = False) -> "Generation":
    for piece in running:
        if not silent:
            write(piece)
    if not silent:
        write("\n")
    return running.result


def read_stdin() -> str:
    """All of stdin, as a prompt."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"The prompt on stdin is not {error.encoding} text: convert it first.") from None


def _open_session(llm: "LLM", path: Path, pinned: "Spans") -> "Session":
    """The text kept in a file, or a new one."""
    if not os.path.lexists(path):
        if not path.parent.is_dir():
            raise RequestError(f"The folder {path.parent} of the session's file does not exist: make it first.")
        return llm.session(pinned=pinned)
    kept = llm.load_session(path)
    if isinstance(kept.note, dict) and CHAT_NOTE in kept.note:
        raise RequestError(f"{path} holds a conversation: go on with it by /load in kvine chat, or give another file.")
    if pinned and kept.pinned != merged(pinned):
        raise RequestError(f"{path} was begun with other pinned positions: leave --pin out.")
    return kept
