"""`kvine experiment cache --grow`: tables of how time and work grow, and the exponents fitted to them."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvine.cli.terminal import show_output

if TYPE_CHECKING:
    from rich.table import Table

    from kvine.evidence.experiments.curves import Curve, Curves, Fit, Point


def curves_json(outcome: "Curves") -> dict[str, Any]:
    """The outcome as `--json` prints it. `rows` and `speedup` are those of the longest text."""
    return {
        "model": outcome.model,
        "dtype": outcome.dtype,
        "packings": outcome.packings,
        "device": outcome.device,
        "repeats": outcome.repeats,
        "logits": outcome.logits,
        "rows": [vars(row) for row in outcome.rows],
        "speedup": outcome.speedup,
        "heads": outcome.heads,
        "curves": [
            {
                "grow": curve.grow,
                "fixed_tokens": curve.fixed,
                "points": [_point_json(point) for point in curve.points],
                "fits": [
                    {"path": fit.path, "per": fit.per, "what": fit.what, **asdict(fit.law), "theory": fit.theory}
                    for fit in curve.fits
                ],
            }
            for curve in outcome.curves
        ],
        "balance": asdict(outcome.balance),
    }


def _point_json(point: "Point") -> dict[str, Any]:
    works = {
        per: {**vars(work), "flops": work.flops, "bytes": work.bytes}
        for per, work in (("step", point.step), ("total", point.total))
    }
    return asdict(point) | works


def show_curves(outcome: "Curves") -> None:
    """Each curve as a table of points and one of exponents, and what the two mean in sentences."""
    from rich.text import Text

    for curve in outcome.curves:
        show_output(_point_table(outcome, curve), _fit_table(curve))
    show_output(*map(Text, _sentences(outcome)))


def _sentences(outcome: "Curves") -> list[str]:
    n = outcome.curves[-1].points[-1].length
    balance = outcome.balance
    return [
        f"At {n:,} tokens one head of one layer scores {n:,} × {n:,} = {n * n:,} pairs without a cache, of which a "
        f"mask leaves {n * (n + 1) // 2:,}; with one it scores 1 × {n:,}. Bytes read are the same: a cache saves "
        "computing the past again, not reading it.",
        f"Exponents reach theory in long texts only. In short ones the products with weights rule, which grow with the "
        f"rows: attention is more arithmetic than they from {_length(balance.cache_free_flops)} without a cache and "
        f"from {_length(balance.cached_flops)} with one, and K and V are more bytes than the weights from "
        f"{_length(balance.cached_bytes)}.",
    ]


def _length(tokens: int | None) -> str:
    return "no length" if tokens is None else f"{tokens:,} tokens"


def _point_table(outcome: "Curves", curve: "Curve") -> "Table":
    from rich.table import Table

    from kvine.models.packing import computes_in

    dtype = computes_in(outcome.dtype, outcome.packings)
    after = (
        "new tokens after a prompt of that length" if curve.grow == "prompt" else "token of prompt before the output"
    )
    table = Table(
        title=f"{outcome.model}, {dtype} on {outcome.device}: the {curve.grow} grows, {curve.fixed} {after}",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    of_step = ("last step\nms", "pairs of\na head", "\nGFLOP", "\nMB read")
    for name in (f"\n{curve.grow}", "\npath", *of_step, "in all\ns", "pairs of\na head"):
        table.add_column(name, justify="left" if name == "\npath" else "right")
    for point in sorted(curve.points, key=lambda point: point.size):
        table.add_row(
            f"{point.size:,}",
            point.path,
            f"{point.step_ms:,.1f}",
            f"{point.step.pairs / outcome.heads:,.0f}",
            f"{point.step.flops / 1e9:,.2f}",
            f"{point.step.bytes / 1e6:,.1f}",
            f"{point.total_ms / 1e3:,.2f}",
            f"{point.total.pairs / outcome.heads:,.0f}",
        )
    return table


def _fit_table(curve: "Curve") -> "Table":
    from rich.table import Table

    law = curve.fits[0].law
    table = Table(
        title=f"Exponents over {law.low:,.0f} to {law.high:,.0f} tokens of text",
        caption="R²: of the time's law. Theory: for long texts.",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    for name in ("path", "of", "time", "R²", "pairs", "FLOPs", "theory", "bytes", "theory"):
        table.add_column(name, justify="left" if name in ("path", "of") else "right")
    groups: dict[tuple[str, str], dict[str, Fit]] = {}
    for fit in curve.fits:
        groups.setdefault((fit.path, fit.per), {})[fit.what] = fit
    for (path, per), fits in groups.items():
        exponents = {what: f"{fit.law.exponent:.2f}" for what, fit in fits.items()}
        table.add_row(
            path,
            "a step" if per == "step" else "in all",
            exponents["time"],
            f"{fits['time'].law.r2:.3f}",
            exponents["pairs"],
            exponents["flops"],
            f"{fits['pairs'].theory:g}",
            exponents["bytes"],
            f"{fits['bytes'].theory:g}",
        )
    return table
