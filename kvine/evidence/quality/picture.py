"""Policies as a picture: what each costs in quality against what it takes in memory and in time."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvine.evidence.plots import plot
from kvine.evidence.quality.pareto import non_dominated
from kvine.evidence.quality.scoring import Evaluation, Scored
from kvine.evidence.quality.streaming import Streaming

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20


def draw_evaluation(outcome: Evaluation, path: Path) -> None:
    """KL divergence over bytes, and over milliseconds where they were measured; the best are joined by a line."""
    stretches = f"{outcome.context:,} at a time" if outcome.context < outcome.text_tokens else "in one go"
    title = f"{outcome.model}: {outcome.text_tokens:,} tokens, {stretches}"
    panels: list[tuple[str, Callable[[Scored], float]]] = [("MiB of K and V at the end", lambda one: one.bytes / MIB)]
    if all(one.ms is not None for one in outcome.policies):
        panels.append(("ms a decode step, median", lambda one: one.ms or 0.0))
    with plot(path, title=title, panels=len(panels)) as drawn:
        for panel, (label, take) in zip(drawn, panels, strict=True):
            _draw_costs(panel, outcome, label, take)
        _draw_key(drawn[-1], outcome)


def _draw_costs(panel: "Axes", outcome: Evaluation, label: str, take: Callable[[Scored], float]) -> None:
    policies = outcome.policies
    points = [(take(one), one.kl) for one in policies]
    best = non_dominated(points)
    others = [i for i in range(len(points)) if i not in best]
    panel.plot(*_columns(points, best), "o-", color="tab:blue", label="non-dominated")
    if others:
        panel.plot(*_columns(points, others), "x", color="gray", label="dominated")
    for number, point in enumerate(points, 1):
        colour = "black" if number - 1 in best else "gray"
        panel.annotate(str(number), point, xytext=(4, 4), textcoords="offset points", fontsize=7, color=colour)
    losses = [one.kl for one in policies if one.kl > 0]
    if losses:
        panel.set_yscale("symlog", linthresh=min(losses))  # the exact cache loses 0, which no logarithm shows
        panel.set_ylim(bottom=-min(losses) / 4)
    panel.set(xlabel=label, ylabel="KL from the exact cache, nats a token")
    panel.legend(loc="best", fontsize=7)


def _draw_key(panel: "Axes", outcome: Evaluation) -> None:
    """Which number is which policy: names at the points would cover each other."""
    names = [f"{number}  {short_name(one.name)}" for number, one in enumerate(outcome.policies, 1)]
    handles = [panel.plot([], [], " ")[0] for _ in names]
    panel.figure.legend(handles, names, loc="outside right center", fontsize=7, handlelength=0, handletextpad=0)


def _columns(points: Sequence[tuple[float, float]], chosen: Sequence[int]) -> tuple[list[float], list[float]]:
    return [points[i][0] for i in chosen], [points[i][1] for i in chosen]


def short_name(name: str) -> str:
    """A policy's name without what is long and often the same."""
    return name.replace("sink-rule=in_cache", "in-cache").replace("sink-rule=absolute", "absolute")


def draw_streaming(outcome: Streaming, path: Path) -> None:
    """Perplexity along the text, a line for each way; the model's context is a dotted line."""
    title = f"{outcome.tokens:,} tokens in one go, {outcome.window:,} in the window"
    with plot(path, title=title) as (panel,):
        for stream in outcome.streams:
            width = outcome.tokens / max(1, len(stream.segments))
            if stream.segments:
                ends = [width * (part + 1) for part in range(len(stream.segments))]
                finite = [value if math.isfinite(value) else math.nan for value in stream.segments]
                panel.plot(ends, finite, "o-", markersize=3, label=short_name(stream.name))
            else:
                panel.axhline(stream.sampled, color="black", linestyle="--", linewidth=1, label=stream.name)
        if outcome.context < outcome.tokens:
            panel.axvline(outcome.context, color="gray", linestyle=":", label="the model's context")
        panel.set(xlabel="tokens read", ylabel="perplexity of an eighth of the text", yscale="log")
        panel.legend(fontsize=6)
