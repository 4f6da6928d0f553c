"""What an evaluation has come to: one JSON object for programs, tables for people."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvine.cli.terminal import human_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from kvine.evidence.quality.needle import Cell
    from kvine.evidence.quality.scoring import Evaluation, Scored
    from kvine.evidence.quality.streaming import Streaming

SMALL_LOSS, LARGE_LOSS = 0.02, 0.2  # nats a token from the exact cache, for colours

NOISE = 0.01  # nats a token that other orders of sums make in half precision, at most about


def evaluation_json(
    outcome: "Evaluation", needles: "Sequence[Cell] | None", streaming: "Streaming | None"
) -> dict[str, Any]:
    """The outcome as `--json` prints it; docs/policies.md defines every field. What is not finite is null."""
    best = _non_dominated(outcome)
    found: dict[str, Any] = {
        "model": outcome.model,
        "dtype": outcome.dtype,
        "packings": dict(outcome.packings),
        "device": outcome.device,
        "context": outcome.context,
        "stride": outcome.stride,
        "text_tokens": outcome.text_tokens,
        "policies": [
            {
                "name": one.name,
                "bytes": one.bytes,
                "ms": one.ms,
                "perplexity": _finite(one.perplexity),
                "kl": _finite(one.kl),
                "top1": one.top1,
                "mass_lost": one.mass_lost,
                "mass_lost_by_layer": list(one.mass_lost_by_layer),
                "peak_bytes": one.peak_bytes,
                "perplexity_increase": _finite(outcome.increase(one)),
                "endless_perplexity": _finite(one.endless_perplexity),
                "tokens": one.tokens,
                "non_dominated": best[one.name],
                "backends": list(one.backends),
                "options": {
                    "kv_dtype": one.cache.kv_dtype,
                    "window": one.cache.window,
                    "sinks": one.cache.sink_tokens,
                    "sink_rule": one.cache.sink_rule,
                    "global_tokens": [list(run) for run in one.cache.global_tokens],
                    "block_size": one.cache.block_size,
                },
            }
            for one in outcome.policies
        ],
        "refused": [asdict(one) for one in outcome.refused],
    }
    if needles is not None:
        found["needle"] = [asdict(cell) for cell in needles]
    if streaming is not None:
        found["streaming"] = _streaming_json(streaming)
    return found


def show_evaluation(
    outcome: "Evaluation", needles: "Sequence[Cell] | None", streaming: "Streaming | None"
) -> "Iterator[RenderableType]":
    """The tables, and what they say in sentences."""
    from rich.text import Text

    yield _policy_table(outcome)
    yield from map(Text, _sentences(outcome))
    if needles is not None:
        yield from _needle_tables(needles)
    if streaming is not None:
        yield _streaming_table(streaming)


def _non_dominated(outcome: "Evaluation") -> dict[str, list[str]]:
    """For each policy, in what it is beaten by none: `bytes`, `ms`, both or neither."""
    from kvine.evidence.quality.pareto import non_dominated

    policies = outcome.policies
    found: dict[str, list[str]] = {one.name: [] for one in policies}
    costs: dict[str, list[float | None]] = {
        "bytes": [float(one.bytes) for one in policies],
        "ms": [one.ms for one in policies],
    }
    for what, values in costs.items():
        known = [(value, one.kl) for value, one in zip(values, policies, strict=True) if value is not None]
        if len(known) == len(policies):
            for index in non_dominated(known):
                found[policies[index].name].append(what)
    return found


def _policy_table(outcome: "Evaluation") -> "Table":
    from rich.table import Table
    from rich.text import Text

    from kvine.models.packing import computes_in

    best = _non_dominated(outcome)
    dtype = computes_in(outcome.dtype, outcome.packings)
    stretches = f"{outcome.context:,} at a time" if outcome.context < outcome.text_tokens else "in one go"
    table = Table(
        title=f"{outcome.model}, {dtype} on {outcome.device}: {outcome.text_tokens:,} tokens, {stretches}",
        caption="KL in nats a token, top-1 and mass lost beside the exact cache. * : no other policy is as good in "
        "fewer bytes or ms.",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    table.add_column("policy", min_width=22)
    endless = any(one.endless_perplexity is not None for one in outcome.policies)
    for name in ("perplexity", "", "KL", "top-1", "mass lost", "K/V", "at most", "ms", *["endless"] * endless):
        table.add_column(name, justify="right", no_wrap=True)
    for one in outcome.policies:
        cells = [
            f"{one.perplexity:,.3f}",
            f"{outcome.increase(one):+.2%}",
            f"{one.kl:.2g}",
            f"{one.top1:.1%}",
            f"{one.mass_lost:.1%}",
            human_bytes(one.bytes) + ("*" if "bytes" in best[one.name] else " "),
            human_bytes(one.peak_bytes),
            "" if one.ms is None else f"{one.ms:.1f}" + ("*" if "ms" in best[one.name] else " "),
            *(["" if one.endless_perplexity is None else f"{one.endless_perplexity:,.3f}"] * endless),
        ]
        table.add_row(Text(one.name.replace(",", ", ")), *map(Text, cells), style=_style(one))
    return table


def _style(one: "Scored") -> str:
    return "green" if one.kl <= SMALL_LOSS else "yellow" if one.kl <= LARGE_LOSS else "red"


def _sentences(outcome: "Evaluation") -> Iterator[str]:
    exact, *others = outcome.policies
    fair = [one for one in others if one.kl <= SMALL_LOSS and one.bytes < exact.bytes]
    if fair:
        one = min(fair, key=lambda one: one.bytes)
        yield (
            f"{one.name} holds {one.bytes / exact.bytes:.1%} of the exact cache's bytes, the least of those that lie "
            f"within {SMALL_LOSS} nats a token of it."
        )
    elif others:
        yield f"No policy here saves bytes and lies within {SMALL_LOSS} nats a token of the exact cache."
    if outcome.dtype != "fp32" and any(0 < one.kl < NOISE for one in others):
        yield (
            f"In {outcome.dtype} two right computations lie up to about {NOISE} nats a token apart, by the order of "
            "their sums: what is below that, --dtype fp32 tells."
        )
    if any(one.endless_perplexity is not None for one in others):
        yield "endless: perplexity of the whole text in one go, past the model's context, which the exact cache cannot."


def _needle_tables(cells: "Sequence[Cell]") -> "Iterator[RenderableType]":
    from rich.table import Table
    from rich.text import Text

    depths = sorted({cell.depth for cell in cells})
    for policy in dict.fromkeys(cell.policy for cell in cells):
        own = {(cell.length, cell.depth): cell for cell in cells if cell.policy == policy}
        table = Table(
            title=Text(f"A fact hidden in other text: {policy}"), box=None, pad_edge=False, header_style="dim"
        )
        table.add_column("tokens", justify="right")
        for depth in depths:
            table.add_column(f"at {depth} %", justify="right", no_wrap=True)
        for length in sorted({cell.length for cell in own.values()}):
            table.add_row(f"{length:,}", *(_needle_cell(own[length, depth]) for depth in depths))
        yield table
    first = next(iter(cells)).policy
    if not any(cell.found for cell in cells if cell.policy == first):
        yield Text("This model finds no fact with everything kept, so the rest says nothing: try a larger one.")
    else:
        yield Text("Facts that greedy decoding answers; the answer's log-likelihood, nats, beside the exact cache's.")


def _needle_cell(cell: "Cell") -> "Text":
    from rich.text import Text

    style = "green" if cell.found == cell.facts else "red" if cell.found == 0 else "yellow"
    return Text(f"{cell.found}/{cell.facts} {cell.loglik:.2f} ({cell.loglik - cell.loglik_exact:+.2f})", style=style)


def _streaming_table(outcome: "Streaming") -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=f"{outcome.tokens:,} tokens in one go, at most {outcome.window:,} seen; the model's context is "
        f"{outcome.context:,}",
        caption=f"Perplexity past the window; sampled: of the same {outcome.sampled_tokens} tokens by every way; last: "
        "of the last eighth.",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    table.add_column("what is kept", min_width=22)
    for name in ("perplexity", "sampled", "last", "K/V at the end"):
        table.add_column(name, justify="right", no_wrap=True)
    anew = outcome.streams[-1].sampled
    for stream in outcome.streams:
        style = "green" if stream.sampled < 1.1 * anew else "yellow" if stream.sampled < 2 * anew else "red"
        table.add_row(
            Text(stream.name.replace(",", ", ")),
            "" if stream.perplexity is None else f"{stream.perplexity:,.2f}",
            f"{stream.sampled:,.2f}",
            f"{stream.segments[-1]:,.2f}" if stream.segments else "",
            human_bytes(stream.bytes),
            style=style,
        )
    return table


def _streaming_json(outcome: "Streaming") -> dict[str, Any]:
    return {
        "tokens": outcome.tokens,
        "window": outcome.window,
        "context": outcome.context,
        "sampled_tokens": outcome.sampled_tokens,
        "rows": [
            {
                "name": stream.name,
                "perplexity": _finite(stream.perplexity),
                "sampled_perplexity": _finite(stream.sampled),
                "segments": [_finite(value) for value in stream.segments],
                "bytes": stream.bytes,
            }
            for stream in outcome.streams
        ],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
