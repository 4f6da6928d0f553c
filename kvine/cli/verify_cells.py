"""The cells of `kvine verify`, as JSON and as tables."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvine.evidence.cells.outcome import Cell, CellsReport, LevelCount
    from kvine.evidence.locate import Location

MOST_SHOWN = 8  # faulty cells in full


def cells_json(report: "CellsReport") -> dict[str, Any]:
    """What `--json` says of the cells; numbers that are not finite become null."""
    return {
        "cells": [_cell_json(cell) for cell in report.cells],
        "covered_pairs": report.pairs,
        "refused": [
            {"levels": [list(level) for level in refusal.levels], "reason": refusal.reason}
            for refusal in report.refused
        ],
        "levels": [
            {"factor": count.factor, "level": count.level, "cells": count.cells, "faults": count.faults}
            for count in report.by_level()
        ],
        "seed": report.seed,
        "seconds": round(report.seconds, 3),
    }


def cells_view(report: "CellsReport") -> list["RenderableType"]:
    """Cells by factor; each fault with its options, and what all faults have in common."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{len(report.cells)} cells in {report.seconds:.0f} s: each two options together at least once")
    table.add_column("factor")
    table.add_column("cells of each level, and how many of them are faulty")
    by_factor: dict[str, list[LevelCount]] = {}
    for count in report.by_level():
        by_factor.setdefault(count.factor, []).append(count)
    for factor, counts in by_factor.items():
        levels = Text(" · ").join(
            Text(f"{count.level} {count.cells}")
            + Text(f" ({count.faults} faulty)" if count.faults else "", style="bold red")
            for count in counts
        )
        table.add_row(factor, levels)
    lines: list[RenderableType] = [table, Text(_summary(report))]
    lines += [Text(f"Cannot meet: {reason}", style="dim") for reason in dict.fromkeys(r.reason for r in report.refused)]
    lines += [Text(f"Not run: {_options(cell)}: {cell.reason}") for cell in report.cells if cell.verdict == "not run"]
    lines += [Text(_fault_line(cell), style="red") for cell in report.faults[:MOST_SHOWN]]
    if len(report.faults) > MOST_SHOWN:
        lines.append(Text(f"{len(report.faults) - MOST_SHOWN} further faults: see --json."))
    lines += [Text(line, style="bold red") for line in _common_lines(report)]
    return lines


def _summary(report: "CellsReport") -> str:
    run = [cell for cell in report.cells if cell.gap is not None and cell.bound]
    line = f"{report.pairs:,} pairs of options met; {len(report.refused)} cannot meet."
    if run:
        closest = max(run, key=lambda cell: (cell.gap or 0) / (cell.bound or 1))
        line += (
            f" Closest to its bound: a difference of {closest.gap:.2g} in a logit, where rounding explains "
            f"{closest.bound:.2g}. Largest KL divergence of all: {max(cell.kl_max or 0 for cell in run):.2g} nats."
        )
    return line


def _fault_line(cell: "Cell") -> str:
    line = f"Fault: {_options(cell)}: "
    if cell.reason is not None:
        line += cell.reason
    else:
        line += (
            f"logits differ by {cell.gap:.2g}, rounding explains {cell.bound:.2g}; {cell.agreement:.0%} of the tokens "
            f"agree; KL {cell.kl_mean:.2g} nats on average."
        )
    return line if cell.location is None else f"{line} {location_line(cell.location)}"


def location_line(at: "Location") -> str:
    """Where a path first leaves the oracle, in a sentence."""
    layer = "" if at.layer < 0 else f" of layer {at.layer}"
    return (
        f"First wrong: {at.tensor}{layer} at position {at.position}, in model call {at.step + 1}: differs by "
        f"{at.difference:.2g}, rounding explains {at.bound:.2g}."
    )


def _common_lines(report: "CellsReport") -> list[str]:
    """What faults have in common, if there are enough of them to tell."""
    if len(report.faults) < 2:
        return []
    lines = []
    for count in report.suspects():
        every = "and every cell with it is faulty" if count.faults == count.cells else f"as have {count.cells} cells"
        lines.append(f"All {count.faults} faults have {count.factor} = {count.level}, {every}.")
    return lines


def _options(cell: "Cell") -> str:
    return "; ".join(f"{factor} = {level}" for factor, level in cell.factors.items())


def _cell_json(cell: "Cell") -> dict[str, Any]:
    at = cell.location
    return {
        "factors": dict(cell.factors),
        "verdict": cell.verdict,
        "tokens": cell.tokens,
        "agreement": cell.agreement,
        "gap": _finite(cell.gap),
        "bound": cell.bound,
        "kl": _finite(cell.kl_mean),
        "kl_max": _finite(cell.kl_max),
        "location": None
        if at is None
        else {
            "step": at.step,
            "layer": at.layer,
            "tensor": at.tensor,
            "position": at.position,
            "difference": _finite(at.difference),
            "bound": at.bound,
        },
        "reason": cell.reason,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
