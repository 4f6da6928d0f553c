"""A plan as people read it, and as `--json` prints it."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvine.cli.terminal import human_bytes
from kvine.spans import num_positions

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from kvine.evidence.plan import Plan, RequestCost, Variant


def plan_json(planned: "Plan", cost: "RequestCost | None", variants: "tuple[Variant, ...]") -> dict[str, Any]:
    """The plan as `--json` prints it; bytes, tokens and milliseconds. null: unknown, or (of a most) without end."""
    from kvine.models.packing import count_packings

    subject, weights = planned.subject, planned.subject.weights
    return {
        "model": subject.name,
        "architecture": subject.architecture,
        "runs": subject.model is not None,
        "not_run": subject.not_run,
        "dtype": subject.dtype,
        "dtype_reason": subject.dtype_reason,
        "packings": count_packings(subject.packings),
        "kv_dtype": planned.kv_dtype,
        "device": planned.device,
        "context": planned.context,
        "batch": planned.batch,
        "sequences": planned.sequences,
        "shared": planned.shared,
        "trained_context": subject.max_context,
        **_figures(planned),
        "stored_bytes": None if weights is None else weights.stored_bytes,
        "parameters": None if weights is None else weights.parameters,
        "request": None if cost is None else {**asdict(cost), "price": cost.price},
        "variants": [{"axis": v.axis, "name": v.name, **_figures(v.plan)} for v in variants],
        "warnings": list(planned.warnings),
    }


def _figures(planned: "Plan") -> dict[str, Any]:
    fits, walls = planned.fits, planned.walls
    return {
        "weight_bytes": planned.weight_bytes,
        "kv_bytes_per_token": planned.kv_bytes_per_token,
        "kv_bytes": planned.kv_bytes,
        "kv_peak_bytes": planned.kv_peak_bytes,
        "workspace_bytes": None if planned.workspace is None else planned.workspace.nbytes,
        "needed_bytes": fits.needed_bytes,
        "groups": [
            {
                "layers": len(group.layers),
                "layer_numbers": list(group.layers),
                "window": group.window,
                "sink_tokens": group.sink_tokens,
                "global_tokens": [list(run) for run in group.global_tokens],
                "bytes_per_token": group.bytes_per_token,
                "bytes_per_block": group.bytes_per_block,
                "kept_tokens": group.kept_tokens,
                "held_bytes": group.held_bytes,
            }
            for group in planned.groups
        ],
        "fits": {
            "memory": int(fits.memory.value),
            "memory_source": fits.memory.source,
            "fits": fits.fits,
            "max_context": fits.max_context,
            "max_batch": fits.max_batch,
        },
        "walls": {
            "bandwidth": walls.bandwidth.value,
            "bandwidth_source": walls.bandwidth.source,
            "weight_bytes_per_step": walls.weight_bytes_per_step,
            "kv_bytes_per_step": walls.kv_bytes_per_step,
            "ms_per_token": walls.ms_per_token,
            "tokens_per_second": walls.tokens_per_second,
            "crossover_context": walls.crossover_context,
            "crossover_batch": walls.crossover_batch,
        },
    }


def show_plan(planned: "Plan", cost: "RequestCost | None", variants: "tuple[Variant, ...]") -> "list[RenderableType]":
    """The plan as tables, and what they say in sentences."""
    from rich.text import Text

    shown: list[RenderableType] = [Text(_title(planned), style="bold"), Text(), _memory_table(planned), Text()]
    if len(planned.groups) > 1 or planned.groups[0].window is not None:
        shown += [_group_table(planned), Text()]
    shown += [Text(line) for line in (_fits_line(planned), *_wall_lines(planned))]
    if cost is not None:
        shown += [Text(line) for line in _cost_lines(cost)]
    if planned.subject.dtype_reason is not None:
        shown.append(Text(planned.subject.dtype_reason, style="dim"))
    if planned.subject.not_run is not None:
        shown.append(Text(planned.subject.not_run, style="yellow"))
    shown += [Text(warning, style="yellow") for warning in planned.warnings]
    for axis in dict.fromkeys(variant.axis for variant in variants):
        shown += [Text(), _variant_table(tuple(v for v in variants if v.axis == axis))]
    return shown


def _title(planned: "Plan") -> str:
    subject = planned.subject
    heads = "" if subject.num_heads is None else f"{subject.num_heads} query and "
    shape = f"{heads}{subject.num_kv_heads} KV head{'' if subject.num_kv_heads == 1 else 's'} of {subject.head_dim}"
    if subject.num_kv_heads == 1 and subject.num_heads is None:
        shape = f"K of width {subject.head_dim:,} and V of as much"
    architecture = "" if subject.architecture is None else f"{subject.architecture}, "
    return f"{subject.name}: {architecture}{len(subject.layers)} layers, {shape}, {subject.dtype}"


def _memory_table(planned: "Plan") -> "Table":
    table = _table("memory", "GB", "GiB", "")
    tokens = f"{planned.batch:,} × {_texts(planned)}{planned.context:,} tokens"
    weights = planned.subject.weights
    if weights is not None:
        stored = "" if weights.stored_bytes is None else f"; stored in {human_bytes(weights.stored_bytes)}"
        table.add_row("weights", *_sizes(weights.nbytes), weights.source + stored)
    per_token = f"{planned.kv_bytes_per_token:,} bytes ({_per_token(planned.kv_bytes_per_token)}) a token"
    blocks = f", {planned.kv_dtype}, in blocks of {planned.cache.block_size}"
    table.add_row(f"K/V of {tokens}", *_sizes(planned.kv_bytes), per_token + blocks)
    if planned.kv_peak_bytes > planned.kv_bytes:
        more = "a step writes before what fell out of a window is let go"
        table.add_row("  more during a step", *_sizes(planned.kv_peak_bytes - planned.kv_bytes), more)
    if planned.workspace is not None:
        rows = min(planned.engine.max_step_tokens, planned.batch * planned.sequences * planned.context)
        table.add_row("workspace", *_sizes(planned.workspace.nbytes), f"at most, of a step of {rows:,} tokens")
    table.add_row("together", *_sizes(planned.fits.needed_bytes), "", style="bold")
    return table


def _group_table(planned: "Plan") -> "Table":
    table = _table("layers", "see", "bytes a token", "tokens kept", "GB", "GiB")
    for group in planned.groups:
        seen = "all tokens" if group.window is None else f"the last {group.window:,}"
        if group.sink_tokens:
            seen += f" and the first {group.sink_tokens:,}"
        if group.global_tokens:
            seen += f" and {num_positions(group.global_tokens):,} global ones"
        kept = f"{group.kept_tokens:,}"
        table.add_row(str(len(group.layers)), seen, f"{group.bytes_per_token:,}", kept, *_sizes(group.held_bytes))
    return table


def _fits_line(planned: "Plan") -> str:
    fits = planned.fits
    memory = f"{int(fits.memory.value) / 1e9:,.1f} GB ({human_bytes(int(fits.memory.value))}, {fits.memory.source})"
    if not fits.max_batch and fits.max_context == 0:
        return f"Fits in {memory}: not even one token."
    longest = "any length" if fits.max_context is None else f"up to {fits.max_context:,} tokens"
    trained = planned.subject.max_context
    if trained is not None and fits.max_context is not None and fits.max_context > trained:
        longest += f" (trained for {trained:,})"
    elif trained is not None and fits.max_context is None and planned.cache.sink_rule == "absolute":
        longest += f" (but {trained:,} tokens are the model's context, which only in_cache sinks go past)"
    return (
        f"Fits in {memory}: {_requests(planned.batch)} of {longest}, or "
        f"{_requests(fits.max_batch)} of {planned.context:,} tokens."
    )


def _wall_lines(planned: "Plan") -> list[str]:
    walls = planned.walls
    of_kv = (
        f"{_short(walls.kv_bytes_per_step)} of K/V, each {'request' if planned.sequences == 1 else 'sequence'} its own"
    )
    if walls.weight_bytes_per_step is None or walls.ms_per_token is None or walls.tokens_per_second is None:
        return [f"A decode step reads {of_kv}."]
    speed = f"{walls.bandwidth.value / 1e9:,.1f} GB/s ({walls.bandwidth.source})"
    lines = [
        f"A decode step reads {_short(walls.weight_bytes_per_step)} of weights, once for all requests, and {of_kv}.",
        f"At {speed} that takes at least {walls.ms_per_token:,.1f} ms a token: at most "
        f"{walls.tokens_per_second:,.1f} tokens a second over all requests.",
    ]
    points = []
    if walls.crossover_context is not None:
        points.append(f"from {walls.crossover_context:,} tokens on ({_requests(planned.batch)})")
    if walls.crossover_batch is not None:
        points.append(f"from {_requests(walls.crossover_batch)} on (of {planned.context:,} tokens)")
    outweigh = "K/V outweigh the weights " + ", or ".join(points) if points else "K/V never outweigh the weights"
    return [*lines, f"{outweigh}."]


def _cost_lines(cost: "RequestCost") -> list[str]:
    parts = [
        f"{cost.prefill_tokens:,} tokens to prefill",
        f"{cost.cached_tokens:,} from the cache",
        f"{cost.decode_tokens:,} to decode",
    ]
    line = f"The request: {', '.join(parts)}."
    if cost.decode_ms is not None:
        line += f" Its decode steps take at least {cost.decode_ms / 1e3:,.2f} s alone on the machine."
    if not (cost.price or cost.uncached_price):
        return [line]
    return [
        line,
        f"Its price: {cost.prefill_price:,.6g} + {cost.cached_price:,.6g} + {cost.decode_price:,.6g} = "
        f"{cost.price:,.6g}; {cost.uncached_price:,.6g} with nothing cached.",
    ]


def _variant_table(variants: "tuple[Variant, ...]") -> "Table":
    names = {"attention": "KV heads", "bits": "bits of weights and K/V", "window": "window of the cache"}
    planned = variants[0].plan
    table = _table(names[variants[0].axis], "K/V bytes a token", "K/V", "weights", "most tokens", "most requests", "ms")
    for variant in variants:
        fits, ms = variant.plan.fits, variant.plan.walls.ms_per_token
        table.add_row(
            variant.name,
            f"{variant.plan.kv_bytes_per_token:,}",
            human_bytes(variant.plan.kv_bytes),
            "unknown" if variant.plan.weight_bytes is None else human_bytes(variant.plan.weight_bytes),
            "any" if fits.max_context is None else f"{fits.max_context:,}",
            f"{fits.max_batch:,}",
            "" if ms is None else f"{ms:,.1f}",
        )
    table.caption = f"{_requests(planned.batch)} of {planned.context:,} tokens; ms a token, at least"
    if variants[0].axis == "bits":
        table.caption += "; packing's scales are not counted"
    return table


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column in ("", "see") else "right")
    return table


def _sizes(nbytes: int) -> tuple[str, str]:
    return _number(nbytes / 1e9), _number(nbytes / 2**30)


def _number(value: float) -> str:
    return f"{value:,.1f}" if value >= 100 else f"{value:,.2f}" if value >= 1 else f"{value:.3f}"


def _short(nbytes: int) -> str:
    return f"{_number(nbytes / 1e9)} GB" if nbytes >= 10**7 else f"{nbytes / 1e6:,.3g} MB"


def _per_token(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.2f} MiB" if nbytes >= 2**16 else human_bytes(nbytes)


def _texts(planned: "Plan") -> str:
    """How many sequences each request has, and what they share; nothing where it is one."""
    if planned.sequences == 1:
        return ""
    shared = f" that share {planned.shared:,}" if planned.shared else ""
    return f"{planned.sequences:,} sequences{shared} × "


def _requests(number: int) -> str:
    return f"{number:,} request{'' if number == 1 else 's'}"
