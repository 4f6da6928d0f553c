"""`kvine generate`: continues one prompt; the text goes to stdout as it comes, everything else to stderr."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvine.cli.loading import open_llm
from kvine.cli.options import CacheOptions, ChoiceOptions, ModelOptions, SamplingOptions, parse_runs, spread_options
from kvine.cli.terminal import seconds_since_start, write, write_json
from kvine.errors import RequestError

if TYPE_CHECKING:
    from kvine.engine.engine import ModelCall


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
    text = read_stdin() if prompt == "-" else prompt
    llm = open_llm(model, cache)
    ready_s = seconds_since_start()
    from kvine.cli import report

    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": text})
    ids = llm.encode_chat(messages) if chat else llm.encode(text)
    if pin_system:
        pinned += llm.system_span(messages)
    calls: list[ModelCall] = []
    llm.trace(calls.append if trace else None)
    if json or params.num_lines > 1:
        result = llm.generate(ids, params, use_cache=not no_cache, pinned=pinned)
    else:
        running = llm.stream(ids, params, use_cache=not no_cache, pinned=pinned)
        for piece in running:
            write(piece)
        write("\n")
        result = running.result
    if json:
        outcome = report.model_json(llm) | report.generation_json(llm, result, ready_s)
        write_json(outcome | {"trace": report.trace_json(calls)} if trace else outcome)
        return
    if params.num_lines > 1:
        report.write_choices(result)
    if trace:
        report.show_trace(calls)
    if params.logprobs is not None:
        for choice in result.choices:
            report.show_logprobs(llm.tokenizer, choice.logprobs or ())
    if not quiet:
        report.show_summary(llm, result, ready_s)


def read_stdin() -> str:
    """All of stdin, as a prompt."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"The prompt on stdin is not {error.encoding} text: convert it first.") from None
