"""`kvine experiment cache`: what a KV cache saves in time, and what it costs and saves in memory."""

import enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvine.cli.options import ModelOptions, spread_options
from kvine.cli.terminal import ended_by_interrupt, human_bytes, show_output, write_json
from kvine.errors import RequestError

if TYPE_CHECKING:
    from kvine.evidence.experiments.cache import CacheExperiment


class LogitsChoice(enum.StrEnum):
    """Which of a call's logits are computed."""

    ALL = "all"
    LAST = "last"
    BOTH = "both"


@spread_options
def cache(
    model: ModelOptions,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 64,
    repeats: Annotated[int, typer.Option(help="Times that each path is measured; medians are shown.")] = 3,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Instead of the default of 1,929 tokens.")] = None,
    logits: Annotated[
        LogitsChoice,
        typer.Option(help="all: of every position a call computes, as a textbook loop does; last: of the last only."),
    ] = LogitsChoice.ALL,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Generate with and without a KV cache: time, speedup and peak memory of both.

    Each measurement has a process of its own; the paths take turns. docs/benchmarks.md defines the figures.
    """
    if tokens < 1 or repeats < 1:
        raise RequestError("An experiment needs at least 1 token and 1 repeat.")
    from kvine.cli.evidence_progress import EvidenceProgress
    from kvine.cli.progress import FetchProgress
    from kvine.evidence.prompts import DEFAULT_PROMPT
    from kvine.hub import resolve

    with FetchProgress() as fetching:
        source = resolve(model.model, progress=fetching)
    with ended_by_interrupt():
        from kvine.evidence.experiments.cache import run_cache_experiment

    with EvidenceProgress() as progress:
        outcome = run_cache_experiment(
            source,
            prompt=DEFAULT_PROMPT if prompt is None else prompt,
            new_tokens=tokens,
            repeats=repeats,
            logits=logits.value,
            dtype=model.dtype,
            device=model.device,
            threads=model.threads,
            progress=progress,
        )
    if json:
        write_json(experiment_json(outcome))
    else:
        show_experiment(outcome)


def experiment_json(outcome: "CacheExperiment") -> dict[str, Any]:
    """The outcome as `--json` prints it. `speedup` is that of the first mode of logits, `speedups` has them all."""
    return {
        "model": outcome.model,
        "dtype": outcome.dtype,
        "device": outcome.device,
        "prompt_tokens": outcome.prompt_tokens,
        "new_tokens": outcome.new_tokens,
        "repeats": outcome.repeats,
        "same_tokens": outcome.same_tokens,
        "rows": [vars(row) for row in outcome.rows],
        "speedup": outcome.speedup(outcome.modes[0]),
        "speedups": {mode: outcome.speedup(mode) for mode in outcome.modes},
    }


def show_experiment(outcome: "CacheExperiment") -> None:
    """The outcome as a table, and what it says in sentences."""
    from rich.table import Table
    from rich.text import Text

    from kvine.evidence.experiments.cache import memory_sentence

    table = Table(
        title=f"{outcome.model}, {outcome.dtype} on {outcome.device}: {outcome.prompt_tokens:,} tokens of prompt, "
        f"{outcome.new_tokens} new ones, median of {outcome.repeats}"
    )
    table.add_column("path")
    table.add_column("logits")
    for name in ("total, s", "first token, s", "further, ms", "speedup", "peak memory", "beside model"):
        table.add_column(name, justify="right")
    for row in outcome.rows:
        table.add_row(
            row.path,
            row.logits,
            f"{row.total_ms / 1e3:,.2f}",
            f"{row.prefill_ms / 1e3:,.2f}",
            f"{row.decode_ms:,.1f}",
            f"{outcome.speedup(row.logits):.2f}x" if row.path == "cached" else "",
            "unknown" if row.peak_bytes is None else human_bytes(row.peak_bytes),
            "" if row.own_bytes is None else human_bytes(row.own_bytes),
        )
    lines = [memory_sentence(outcome)]
    if not outcome.same_tokens:
        lines.append("The paths did not all generate the same tokens: kvine verify tells whether that is rounding.")
    show_output(table, *(Text(line) for line in lines if line))
