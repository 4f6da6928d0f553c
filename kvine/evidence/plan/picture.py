"""The plan as a picture: memory and the floor of a token's time, as the context grows."""

from pathlib import Path

from kvine.evidence.plan.answer import Plan
from kvine.evidence.plan.variants import Variant, planner_of
from kvine.evidence.plots import plot

POINTS = 80


def draw_plan(planned: Plan, variants: tuple[Variant, ...], path: Path) -> None:
    """Two panels: K and V of all requests beside weights and memory, and milliseconds a token by what is read.

    Args:
        planned: the plan; contexts are drawn up to twice its own.
        variants: drawn instead of it, a curve each, where there are any.
        path: ends in .svg or .png.

    Raises:
        ConfigError: if matplotlib is missing or the file cannot be written.
    """
    shown = variants or (Variant("attention", "K and V", planned),)
    contexts = sorted({max(1, 2 * planned.context * point // POINTS) for point in range(POINTS + 1)})
    title = f"{planned.subject.name}: {planned.batch} request{'s' if planned.batch > 1 else ''}"
    with plot(path, title=title, panels=2) as (memory, time):
        for variant in shown:
            planner = planner_of(variant.plan, kv_bits=_kv_bits(variant.plan))
            held = [planner.held(context, planned.batch) / 1e9 for context in contexts]
            memory.plot(contexts, held, label=variant.name)
            walls = [planner.walls(context, planned.batch).ms_per_token for context in contexts]
            time.plot(contexts, [float("nan") if ms is None else ms for ms in walls], label=variant.name)
        if planned.weight_bytes is not None:
            memory.axhline(planned.weight_bytes / 1e9, color="0.4", linestyle="--", label="weights")
        if planned.walls.crossover_context is not None and planned.walls.crossover_context <= contexts[-1]:
            time.axvline(planned.walls.crossover_context, color="0.4", linestyle=":", label="K/V outweigh the weights")
        memory.set(xlabel="tokens of each request", ylabel="GB of K and V", title="held in memory")
        time.set(xlabel="tokens of each request", ylabel="ms, at least", title="for each token", ylim=(0, None))
        for panel in (memory, time):
            if panel.get_legend_handles_labels()[0]:
                panel.legend()


def _kv_bits(planned: Plan) -> int | None:
    return int(planned.kv_dtype.split()[0]) if planned.kv_dtype.endswith(" bits") else None
