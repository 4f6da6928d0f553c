"""What a bench has come to: one JSON object for programs, a table for people."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvine.cli.terminal import human_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from kvine.evidence.bench.report import Bench, Row

TITLES = {
    "ready": "ready",
    "prefill": "prefill",
    "decode": "a token",
    "batch": "at once",
    "prefix_hit": "prefix hit",
    "peak_memory": "peak memory",
}
NOISE = "~"


def bench_json(outcome: "Bench") -> dict[str, Any]:
    """The outcome as `--json` prints it; docs/performance.md defines every field."""
    machine, free = outcome.machine, outcome.cache_free
    return {
        "model": outcome.model,
        "dtype": outcome.dtype,
        "device": outcome.device,
        "repeats": outcome.repeats,
        "new_tokens": outcome.tokens,
        "machine": {
            "cpu": machine.cpu,
            "threads": machine.threads,
            "read_gb_s": machine.read_bytes_per_s / 1e9,
            "tflop_s": machine.flops_per_s / 1e12,
            "matrix_dtype": machine.matrix_dtype,
        },
        "engines": [vars(entrant) for entrant in outcome.entrants],
        "rows": [
            {
                "engine": row.engine,
                "weights": row.weights,
                "what": row.what,
                "context": row.context,
                "batch": row.batch,
                "value": row.value,
                "unit": row.unit,
                "floor": row.floor,
                "share": row.share,
                "bound": row.bound,
                "low": row.low,
                "high": row.high,
                "spread": row.spread,
                "kvine_ratio": row.kvine_ratio,
            }
            for row in outcome.rows
        ],
        "cache_free": None if free is None else {**vars(free), "speedup": free.speedup},
        "skipped": [vars(skipped) for skipped in outcome.skipped],
    }


def show_bench(outcome: "Bench") -> Iterator["RenderableType"]:
    """The machine, the table, and in sentences what does not fit a table."""
    from rich.text import Text

    machine = outcome.machine
    yield Text(
        f"{machine.cpu}, {machine.threads} threads: reads memory at {machine.read_bytes_per_s / 1e9:.1f} GB/s and "
        f"multiplies matrices at {machine.flops_per_s / 1e12:.3g} TFLOP/s ({machine.matrix_dtype})."
    )
    if outcome.rows:
        yield _table(outcome)
    yield from map(Text, _sentences(outcome))


def _table(outcome: "Bench") -> "Table":
    from rich.table import Table

    table = Table(title=f"{outcome.model}, {outcome.dtype} on {outcome.device}: medians of {outcome.repeats}")
    for name in ("what", "engine", "weights"):
        table.add_column(name, no_wrap=True)
    for name in ("context", "batch", "measured", "floor", "share", *["Kvine / this"] * outcome.compared):
        table.add_column(name, justify="right", no_wrap=True)
    before: Row | None = None
    for row in outcome.rows:
        is_alike = before is not None and row.is_like(before)
        if before is not None and not is_alike and (outcome.compared or row.what != before.what):
            table.add_section()
        title = "" if before is not None and row.what == before.what else TITLES[row.what]
        context = f"{row.context:,}" if row.context else ""
        measured = _figure(row, row.value) + (NOISE if row.is_noisy else "")
        ratio = [_ratio(row)] if outcome.compared else []
        table.add_row(
            title,
            row.engine,
            row.weights,
            context,
            str(row.batch),
            measured,
            _figure(row, row.floor),
            _share(row),
            *ratio,
        )
        before = row
    return table


def _sentences(outcome: "Bench") -> Iterator[str]:
    if any(row.is_noisy for row in outcome.rows):
        yield (
            f"{NOISE} varied by more than 20 % of the median between repeats: something else was at work on this "
            "machine. Measure again, or with more --repeats."
        )
    if outcome.compared:
        yield "Kvine / this: Kvine's figure over the other; below 1 is better for times and memory, above 1 for rates."
    if (free := outcome.cache_free) is not None:
        yield (
            f"Without a cache a token at {free.context:,} tokens takes {free.cache_free_ms:,.0f} ms, with it "
            f"{free.cached_ms:,.1f} ms: {free.speedup:,.3g} times less."
        )


def _figure(row: "Row", figure: float | None) -> str:
    if figure is None:
        return ""
    if row.unit == "bytes":
        return human_bytes(int(figure))
    digits = 0 if figure >= 1000 else 1 if figure >= 10 else 2 if figure >= 1 else 4
    return f"{figure:,.{digits}f} {row.unit}"


def _share(row: "Row") -> "Text | str":
    from rich.text import Text

    if row.share is None:
        return ""
    return Text(f"{row.share:.0%}", style="green" if row.share >= 0.75 else "yellow" if row.share >= 0.4 else "red")


def _ratio(row: "Row") -> "Text | str":
    from rich.text import Text

    if row.kvine_ratio is None:
        return ""
    is_better = (row.kvine_ratio > 1) == row.is_rate
    return Text(f"{row.kvine_ratio:.2f}", style="green" if is_better else "red")
