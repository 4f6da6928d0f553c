"""A bench as a picture: each engine's times and token rates, with a line where the machine sets their end."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvine.evidence.bench.report import Bench, Row
from kvine.evidence.plots import plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")
GROUP = 0.7  # of the room between two groups
NAMES = {"ready": "ready", "prefill": "prefill", "decode": "a token", "prefix_hit": "prefix hit"}


def draw_bench(outcome: Bench, path: Path) -> None:
    """Times as points and token rates over the batch, a colour for each engine; black and dotted are the floors."""
    colours = dict(zip((entrant.name for entrant in outcome.entrants), COLOURS, strict=False))
    machine = outcome.machine
    threads = "1 thread" if machine.threads == 1 else f"{machine.threads} threads"
    title = f"{outcome.model} on {machine.cpu}, {threads}, medians of {outcome.repeats}"
    drawn = [
        (draw, rows)
        for draw, rows in (
            (_draw_times, [row for row in outcome.rows if row.what in NAMES]),
            (_draw_rates, [row for row in outcome.rows if row.is_rate]),
        )
        if rows
    ]
    with plot(path, title=title, panels=max(1, len(drawn))) as panels:
        for panel, (draw, rows) in zip(panels, drawn, strict=False):
            draw(panel, rows, colours)
        handles = [panels[0].plot([], [], "s", color=colours[entrant.name])[0] for entrant in outcome.entrants]
        panels[0].legend(handles, [f"{entrant.name}, {entrant.weights}" for entrant in outcome.entrants])


def _draw_times(panel: "Axes", rows: Sequence[Row], colours: dict[str, str]) -> None:
    """Points, for a bar would begin nowhere: a logarithmic axis has no 0. The line from floor to point is their ratio.

    A thick line goes from the least to the most of the repeats.
    """
    groups = list(dict.fromkeys((row.what, row.context) for row in rows))
    height = GROUP / len(colours)
    for row in rows:
        to_ms, colour = 1e3 if row.unit == "s" else 1.0, colours[row.engine]
        place = groups.index((row.what, row.context)) + height * (list(colours).index(row.engine) + 0.5) - GROUP / 2
        if row.floor is not None:
            ends = [row.floor * to_ms, row.value * to_ms]
            panel.plot(ends, [place, place], color=colour, linewidth=1)
            panel.plot(ends[:1], [place], "|", color="black", markersize=7, markeredgewidth=2)
        panel.plot([row.low * to_ms, row.high * to_ms], [place, place], color=colour, linewidth=4, alpha=0.4)
        panel.plot([row.value * to_ms], [place], "o", color=colour, markersize=5)
    for between in range(1, len(groups)):
        panel.axhline(between - 0.5, color="black", alpha=0.15, linewidth=0.8)
    panel.set_yticks(range(len(groups)), [f"{NAMES[what]}\n{_tokens(context)}" for what, context in groups])
    panel.grid(visible=False, axis="y")
    panel.set(xscale="log", xlabel="ms, logarithmic; the black line is the floor")
    panel.invert_yaxis()


def _draw_rates(panel: "Axes", rows: Sequence[Row], colours: dict[str, str]) -> None:
    for engine, colour in colours.items():
        own = [row for row in rows if row.engine == engine]
        batches = [row.batch for row in own]
        panel.plot(batches, [row.value for row in own], "o-", color=colour)
        if all(row.floor is not None for row in own):
            panel.plot(batches, [row.floor or 0 for row in own], ":", color=colour)
    panel.set(xscale="log", yscale="log", xlabel="requests at once", ylabel="tokens a second, all of them")
    together = sorted({row.batch for row in rows})
    panel.set_xticks(together, [str(batch) for batch in together])
    panel.set_xticks([], minor=True)


def _tokens(context: int) -> str:
    return f"{context:,} tokens" if context else ""
