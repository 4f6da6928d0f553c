"""`kvine plan`: what a model and its cache take, what fits, and the floor of a token's time. Loads no weights."""

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvine.cli.options import WEIGHTS_HELP, parse_runs, spread_options
from kvine.cli.terminal import show_output, waiting, write_json
from kvine.config import CacheConfig, EngineConfig
from kvine.errors import ConfigError

if TYPE_CHECKING:
    from kvine.evidence.plan import Figures, Plan, RequestCost, Variant


class Compare(enum.StrEnum):
    """What to vary."""

    ATTENTION = "attention"
    BITS = "bits"
    WINDOW = "window"


def _option(panel: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


@dataclass(frozen=True)
class FigureOptions:
    """A model by its figures."""

    layers: Annotated[int | None, _option("Figures, instead of a model", "Layers that keep K and V.")] = None
    heads: Annotated[int | None, _option("Figures, instead of a model", "Query heads.")] = None
    kv_heads: Annotated[int | None, _option("Figures, instead of a model", "KV heads; by default the query heads.")] = (
        None
    )
    head_dim: Annotated[int | None, _option("Figures, instead of a model", "Size of a head.")] = None
    kv_width: Annotated[
        int | None, _option("Figures, instead of a model", "Width of K alone, over all KV heads; V has as much.")
    ] = None
    params: Annotated[
        str | None,
        _option("Figures, instead of a model", "Parameters, such as 27B; also of a model that Kvine does not run."),
    ] = None

    def figures(self) -> "tuple[Figures, int | None]":
        """The figures, and the parameters alone, which may stand beside a model."""
        from kvine.evidence.plan import Figures
        from kvine.evidence.plan.subject import parse_count

        params = None if self.params is None else parse_count(self.params)
        return Figures(self.layers, self.heads, self.kv_heads, self.head_dim, self.kv_width, params), params


@dataclass(frozen=True)
class KeepOptions:
    """How the past would be kept, and the weights."""

    dtype: Annotated[str, _option("Cache", "Weights and activations: auto, fp32, bf16 or fp16.")] = "auto"
    weights: Annotated[str, _option("Cache", WEIGHTS_HELP)] = "auto"
    kv_dtype: Annotated[
        str,
        _option(
            "Cache",
            "K and V: exact (as dtype), fp32, fp16, bf16, int8, int4, int2, or KEYS/VALUES such as int8/int4 or k8v4.",
        ),
    ] = CacheConfig.kv_dtype
    window: Annotated[int | None, _option("Cache", "See the last n tokens only.")] = CacheConfig.window
    sinks: Annotated[int, _option("Cache", "First tokens that stay visible past the window.")] = CacheConfig.sink_tokens
    sink_rule: Annotated[str, _option("Cache", "absolute, or in_cache to go on past the model's context.")] = (
        CacheConfig.sink_rule
    )
    global_tokens: Annotated[
        str, _option("Cache", "Positions that stay visible past the window, such as 0:4,100:108.", metavar="RUNS")
    ] = ""
    block_size: Annotated[int, _option("Cache", "Tokens in a block.")] = CacheConfig.block_size
    max_step_tokens: Annotated[int, _option("Cache", "Tokens in one model call.")] = EngineConfig.max_step_tokens

    def configs(self) -> tuple[CacheConfig, EngineConfig]:
        """Raises ConfigError for a value that cannot work."""
        cache = CacheConfig(
            block_size=self.block_size,
            kv_dtype=self.kv_dtype,
            window=self.window,
            sink_tokens=self.sinks,
            sink_rule=self.sink_rule.replace("-", "_"),  # type: ignore[arg-type]  # checked there
            global_tokens=parse_runs("--global-tokens", self.global_tokens),
        )
        return cache, EngineConfig(max_step_tokens=self.max_step_tokens)


@dataclass(frozen=True)
class RequestOptions:
    """One request and its price."""

    prompt_tokens: Annotated[int | None, _option("One request", "Tokens of its prompt.")] = None
    cached_tokens: Annotated[int, _option("One request", "How many of them the cache already holds.")] = 0
    output_tokens: Annotated[int, _option("One request", "Tokens that it generates.")] = 0
    price_prefill: Annotated[float, _option("One request", "Price of a million computed prompt tokens.")] = 0.0
    price_cached: Annotated[float, _option("One request", "Price of a million cached prompt tokens.")] = 0.0
    price_decode: Annotated[float, _option("One request", "Price of a million generated tokens.")] = 0.0

    def cost(self, planned: "Plan") -> "RequestCost | None":
        """What the request costs; None if none was described."""
        from kvine.evidence.plan import Prices, request_cost

        if self.prompt_tokens is None:
            if self != RequestOptions():
                raise ConfigError("How long is the request's prompt? Give --prompt-tokens.")
            return None
        prices = Prices(self.price_prefill, self.price_cached, self.price_decode)
        tokens = {"prompt": self.prompt_tokens, "cached": self.cached_tokens, "output": self.output_tokens}
        return request_cost(planned, **tokens, prices=prices)


@spread_options
def plan(
    figures: FigureOptions,
    keep: KeepOptions,
    request: RequestOptions,
    model: Annotated[
        str | None, typer.Argument(help="An alias, a hub id, a folder, a config.json or a .gguf file.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of each request; by default the model's context, at most 8192.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Requests side by side.")] = 1,
    sequences: Annotated[int, typer.Option(help="Samples or beams of each request.")] = 1,
    shared: Annotated[int, typer.Option(help="Tokens of the prompt, which they share.")] = 0,
    memory: Annotated[str | None, typer.Option(help="Fit into this, such as 24GiB; else what is free here.")] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Memory reads so many GB/s; else that is measured, which takes 2 s.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    compare: Annotated[list[Compare] | None, typer.Option(help="Variants side by side. Repeatable.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it, to a .svg or .png file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Plan a model: memory of weights and K/V, what fits, and how fast a token can come at most.

    Reads its config and the headers of its files, no weights; or takes figures. docs/plan.md defines every number.
    """
    from kvine.cli.plan_view import plan_json, show_plan
    from kvine.cli.progress import FetchProgress
    from kvine.evidence.plan import plan as make_plan

    cache, engine = keep.configs()
    subject, params = _subject(model, figures)
    if plot is not None:
        from kvine.evidence.plots import check_plot

        check_plot(plot)
    waits = "reading the model's headers" if bandwidth else "measuring how fast this machine reads its memory"
    with FetchProgress() as fetching, waiting(waits):
        planned = make_plan(
            subject,
            context=context,
            batch=batch,
            sequences=sequences,
            shared=shared,
            memory=memory,
            bandwidth=bandwidth,
            dtype=keep.dtype,
            device=device,
            weights=keep.weights,
            cache=cache,
            engine=engine,
            params=params,
            progress=fetching,
        )
    cost = request.cost(planned)
    variants = _variants(planned, compare or [])
    if plot is not None:
        from kvine.evidence.plan.picture import draw_plan

        draw_plan(planned, variants, plot)
    if json:
        write_json(plan_json(planned, cost, variants))
    else:
        show_output(*show_plan(planned, cost, variants))


def _subject(model: str | None, options: FigureOptions) -> "tuple[str | Figures, int | None]":
    figures, params = options.figures()
    if model is None:
        if not figures.given:
            raise ConfigError("What to plan? Name a model, as in kvine plan smollm2-135m, or give its figures.")
        return figures, None
    if any(value is not None for name, value in vars(figures).items() if name != "params"):
        raise ConfigError("Give a model or its figures, not both; to vary a model, --compare.")
    return model, params


def _variants(planned: "Plan", axes: list[Compare]) -> "tuple[Variant, ...]":
    from kvine.evidence.plan import compare

    return tuple(variant for axis in dict.fromkeys(axes) for variant in compare(planned, axis.value))
