"""Writes the command reference while the site is built, from the commands themselves, so that it cannot go stale."""

from collections.abc import Iterator
from typing import Any

import typer.main

from kvine.cli.app import app

MARK = "<!-- every command -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the reference where a page has the mark; MkDocs calls this for every page."""
    if MARK not in markdown:
        return markdown
    return markdown.replace(MARK, "\n".join(_sections("kvine", typer.main.get_command(app))))


def _sections(name: str, command: Any) -> Iterator[str]:
    children = getattr(command, "commands", None)
    context = command.context_class(command, info_name=name)
    yield f"\n## `{name}`\n\n{command.help or ''}\n"
    pieces = " ".join(command.collect_usage_pieces(context))
    yield f"```text\n{name} {pieces}\n```\n"
    panels: dict[str, list[Any]] = {}
    for parameter in command.get_params(context):
        if not getattr(parameter, "hidden", False) and "--help" not in parameter.opts:
            title = "Arguments" if parameter.param_type_name == "argument" else "Options"
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or title, []).append(parameter)
    for title, parameters in panels.items():
        rows = [f"| `{_cell(names)}` | {_cell(text)} |" for names, text in _records(parameters, context)]
        if rows:
            yield "\n".join([f"| {title} | |", "|---|---|", *rows, ""])
    for child, inner in (children or {}).items():
        yield from _sections(f"{name} {child}", inner)


def _records(parameters: list[Any], context: Any) -> Iterator[tuple[str, str]]:
    for parameter in parameters:
        record = parameter.get_help_record(context)
        if record is not None:
            yield record


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
