"""The experiments as pictures; `kvine.evidence.plots` says what can be written where."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvine.evidence.experiments.bits import Bits
from kvine.evidence.experiments.cache import CacheExperiment
from kvine.evidence.experiments.curves import Curves
from kvine.evidence.experiments.endless import Endless
from kvine.evidence.experiments.meaning import Meaning
from kvine.evidence.experiments.walls import Walls
from kvine.evidence.experiments.window import WindowExperiment
from kvine.evidence.plots import plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"cache-free": "tab:red", "cached": "tab:blue"}


def draw_cache(outcome: CacheExperiment, path: Path) -> None:
    """Time until the first token and for the others, stacked; and memory beside the model, where it was measured."""
    rows = outcome.rows
    names = [f"{row.path}\n{row.logits} logits" for row in rows]
    title = f"{outcome.model}, {outcome.dtype}: {outcome.prompt_tokens:,} tokens of prompt, {outcome.new_tokens} new"
    with plot(path, title=title, panels=2) as (times, memory):
        first = [row.prefill_ms / 1e3 for row in rows]
        times.bar(names, first, label="first token", color="tab:gray")
        rest = [(row.total_ms - row.prefill_ms) / 1e3 for row in rows]
        times.bar(names, rest, bottom=first, label="the others", color=[COLOURS[row.path] for row in rows])
        times.set_ylabel("seconds")
        times.legend()
        memory.bar(names, [(row.own_bytes or 0) / 1e6 for row in rows], color=[COLOURS[row.path] for row in rows])
        memory.set_ylabel("peak memory beside the model, MB")


def draw_curves(outcome: Curves, path: Path) -> None:
    """For each curve the time of a step, and in all, over the text's length; logarithmic, with the fitted laws."""
    title = f"{outcome.model}, {outcome.dtype}: with and without a cache"
    with plot(path, title=title, panels=2 * len(outcome.curves)) as axes:
        for number, curve in enumerate(outcome.curves):
            for panel, per in zip(axes[2 * number : 2 * number + 2], ("step", "total"), strict=True):
                for fit in curve.fits:
                    if fit.per != per or fit.what != "time":
                        continue
                    points = curve.of(fit.path)
                    x = [point.length for point in points]
                    y = [point.step_ms if per == "step" else point.total_ms for point in points]
                    colour, law = COLOURS[fit.path], fit.law
                    panel.plot(x, y, "o", color=colour, label=f"{fit.path}: n^{law.exponent:.2f}")
                    panel.plot(x, [law.factor * n**law.exponent for n in x], "-", color=colour, alpha=0.5)
                panel.set(xscale="log", yscale="log", xlabel="tokens of text", ylabel="ms")
                panel.set_title(f"{curve.grow} grows: {'a step' if per == 'step' else 'in all'}")
                panel.legend()


def draw_walls(outcome: Walls, path: Path) -> None:
    """Time of a step, and tokens a second, over the batch; a line for each context."""
    title = f"{outcome.model}, {outcome.dtype}: a decode step over batch and context"
    with plot(path, title=title, panels=2) as (times, rates):
        for context in sorted({cell.context for cell in outcome.cells}):
            cells = [cell for cell in outcome.cells if cell.context == context and cell.ms is not None]
            batches = [cell.batch for cell in cells]
            times.plot(batches, [cell.ms or 0 for cell in cells], "o-", label=f"{context:,} tokens")
            rates.plot(batches, [cell.tokens_per_second or 0 for cell in cells], "o-", label=f"{context:,} tokens")
        for panel, what in ((times, "ms a step"), (rates, "tokens a second, all sequences")):
            panel.set(xscale="log", yscale="log", xlabel="batch", ylabel=what)
            panel.legend()


def draw_window(outcome: WindowExperiment, path: Path) -> None:
    """Probability of the right answer, logarithmic, and perplexity past the window; a bar for each way of keeping."""
    names = [kept.name for kept in outcome.kept]
    colours = ["tab:green" if outcome.keeps(kept) else "tab:red" for kept in outcome.kept]
    with plot(path, title=f"{outcome.model}: a fact told at the start, window {outcome.window}", panels=2) as axes:
        for panel in axes:
            panel.invert_yaxis()
        axes[0].barh(names, [kept.probability for kept in outcome.kept], color=colours)
        axes[0].set(xscale="log", xlabel="probability of the right answer")
        axes[1].barh(names, [kept.perplexity for kept in outcome.kept], color="tab:gray")
        axes[1].set(xlabel="perplexity past the window", yticklabels=[])


def draw_meaning(outcome: Meaning, path: Path) -> None:
    """Relative distance of the word's last token by layer, K and V, beside that of other tokens."""
    layers = outcome.tokens[-1].layers
    numbers = [layer.layer for layer in layers]
    title = f"{outcome.model}: the same token ({outcome.tokens[-1].token_id}) in two sentences"
    with plot(path, title=title, panels=2) as (keys, values):
        _distances(keys, numbers, [(d.key.relative, d.others_key.relative) for d in layers], "keys, not rotated")
        _distances(values, numbers, [(d.value.relative, d.others_value.relative) for d in layers], "values")


def _distances(panel: "Axes", layers: list[int], pairs: list[tuple[float, float]], what: str) -> None:
    panel.bar(layers, [own for own, _ in pairs], color="tab:blue", label="the same token")
    panel.plot(layers, [others for _, others in pairs], "o-", color="tab:gray", label="other tokens, median")
    panel.locator_params(axis="x", integer=True)
    panel.set(xlabel="layer", ylabel="relative distance", title=what)
    panel.legend()


def draw_bits(outcome: Bits, path: Path) -> None:
    """Error of attention's outputs by layer, logarithmic, of keys and of values: a line for each grouping and width."""
    title = f"{outcome.model}: keys and values in fewer bits, {outcome.tokens:,} tokens"
    widths = sorted({row.bits for row in outcome.rows})
    with plot(path, title=title, panels=2) as panels:
        for panel, part in zip(panels, ("key", "value"), strict=True):
            for row in outcome.rows:
                if row.part == part:
                    panel.plot(
                        [100 * layer.outputs for layer in row.layers],
                        "-" if row.grouping == "channel" else "--",
                        color=f"C{widths.index(row.bits)}",
                        label=f"{row.bits} bits, by {row.grouping}",
                    )
            panel.locator_params(axis="x", integer=True)
            panel.set(xlabel="layer", ylabel="error of the outputs, %", yscale="log", title=f"{part}s")
        lines, names = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(lines, names, loc="outside right center", fontsize=7)


def draw_endless(outcome: Endless, path: Path) -> None:
    """Perplexity of the parts that were judged, logarithmic, and K and V held, along the text."""
    title = f"{outcome.model}: {outcome.tokens:,} tokens of one text"
    with plot(path, title=title, panels=2) as (fluency, memory):
        for text in outcome.written:
            starts = [piece.start for piece in text.pieces]
            name = text.name.replace("sink-rule=in_cache", "in-cache")
            fluency.plot(starts, [piece.perplexity for piece in text.pieces], "o-", label=name)
            memory.plot(starts, [piece.held / 2**20 for piece in text.pieces], "o-", label=name)
        for panel in (fluency, memory):
            panel.axvline(outcome.context, color="gray", linestyle=":", label="the model's context")
            panel.set(xlabel="tokens of the text")
            panel.legend(fontsize=7)
        fluency.set(yscale="log", ylabel=f"perplexity of {outcome.piece_tokens} tokens, by the exact cache")
        memory.set(ylabel="MiB of K and V held")
        memory.set_ylim(bottom=0)
