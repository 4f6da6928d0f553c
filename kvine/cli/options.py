"""The options that commands share, in groups: a command names a group as one parameter and gets it filled in.

Ranges are not repeated here: `SamplingParams`, `CacheConfig` and `EngineConfig` check what they are given.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal, get_type_hints

import typer

from kvine.config import CacheConfig, EngineConfig, check_device, check_dtype
from kvine.errors import ConfigError, RequestError
from kvine.sampling.params import SamplingParams
from kvine.spans import Spans, parse_spans

DEFAULT_MODEL = "smollm2-135m"  # the hub's own; importing the hub would slow down --help
WEIGHTS_HELP = (
    "packed: a GGUF file's stay packed; exact: decoded to dtype; auto: packed where kernels are, but in fp32 exact; "
    "q8, q4: others are rounded to 8, 4 bits too."
)


def spread_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of its groups: a parameter whose type is a dataclass becomes an option per field.

    Typer reads the signature and the annotations that this sets.
    """
    groups: dict[str, type] = {}
    parameters: list[Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for parameter in signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            parameters += _options_of(kind)
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=kind))

    @wraps(command)
    def spread(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        command(**values)

    spread.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread


def _options_of(group: type) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            f.name,
            Parameter.KEYWORD_ONLY,
            default=f.default if f.default_factory is MISSING else f.default_factory(),
            annotation=hints[f.name],
        )
        for f in fields(group)
    ]


def _model(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Model")


def _sampling(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Sampling", **more)


def _several(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Several texts")


def _cache(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Cache", show_default=True, **more)


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and where it runs."""

    model: Annotated[
        str, _model("An alias, a Hugging Face hub id, a checkpoint folder or a .gguf file.", "--model", "-m")
    ] = DEFAULT_MODEL
    device: Annotated[str, _model("auto, cpu, cuda or mps.")] = "auto"
    dtype: Annotated[str, _model("auto, fp32, bf16 or fp16.")] = "auto"
    weights: Annotated[str, _model(WEIGHTS_HELP)] = "auto"
    threads: Annotated[int | None, _model("CPU threads; by default OMP_NUM_THREADS, or all usable cores.")] = None

    def check(self) -> None:
        """Says what is wrong without loading torch, also where no model is loaded. Raises ConfigError."""
        from kvine.engine.resources import checked_threads
        from kvine.models.packing import check_weights

        check_device(self.device)
        check_dtype(self.dtype)
        check_weights(self.weights)
        if self.threads is not None:
            checked_threads(self.threads)


@dataclass(frozen=True)
class ExactModelOptions(ModelOptions):
    """The same where exact weights are what is usually wanted."""

    weights: Annotated[str, _model(WEIGHTS_HELP)] = "exact"


@dataclass(frozen=True)
class SamplingOptions:
    """How many tokens to generate, and how to choose each."""

    max_tokens: Annotated[int, _sampling("Most tokens to generate.")] = 256
    min_tokens: Annotated[int, _sampling("No end of text before this many tokens.")] = SamplingParams.min_tokens
    temperature: Annotated[float, _sampling("0 takes the most likely token.")] = SamplingParams.temperature
    top_k: Annotated[int, _sampling("Keep the k most likely tokens; 0: all.")] = SamplingParams.top_k
    top_p: Annotated[float, _sampling("Keep the most likely tokens up to this probability.")] = SamplingParams.top_p
    min_p: Annotated[float, _sampling("Keep tokens this times as likely as the first.")] = SamplingParams.min_p
    repetition_penalty: Annotated[float, _sampling("Divides the logits of tokens in prompt and output.")] = (
        SamplingParams.repetition_penalty
    )
    presence_penalty: Annotated[float, _sampling("Subtracted from tokens in the output.")] = (
        SamplingParams.presence_penalty
    )
    frequency_penalty: Annotated[float, _sampling("Subtracted for each time a token is in the output.")] = (
        SamplingParams.frequency_penalty
    )
    penalty_window: Annotated[int | None, _sampling("Penalties look at the last n tokens only.")] = (
        SamplingParams.penalty_window
    )
    logit_bias: Annotated[
        list[str], _sampling("Added to the logit of a token id; -inf bans it. Repeatable.", metavar="ID=BIAS")
    ] = field(default_factory=list)
    seed: Annotated[int | None, _sampling("Draw the same tokens each time.")] = SamplingParams.seed
    logprobs: Annotated[
        int | None, _sampling("Show each token's log-probability and those of the n most likely.", metavar="N")
    ] = SamplingParams.logprobs
    stop: Annotated[list[str], _sampling("End the text before this string. Repeatable.", metavar="TEXT")] = field(
        default_factory=list
    )
    stop_token_id: Annotated[list[int], _sampling("End the text at this token id. Repeatable.", metavar="ID")] = field(
        default_factory=list
    )
    ignore_eos: Annotated[bool, _sampling("Go on past the model's end of text.", "--ignore-eos")] = False

    def params(self) -> SamplingParams:
        """What the sampler takes. Raises RequestError for a value that is out of range."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            penalty_window=self.penalty_window,
            logit_bias=parse_logit_bias(self.logit_bias),
            seed=self.seed,
            logprobs=self.logprobs,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_id),
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True)
class ChoiceOptions:
    """How many texts to generate from one prompt."""

    n: Annotated[int, _several("Draw so many texts, which share the prompt.", "--n")] = SamplingParams.n
    num_beams: Annotated[int, _several("Beam search: find the so many most likely texts.")] = SamplingParams.num_beams
    length_penalty: Annotated[
        float, _several("Beams: divide a text's score by its length to this power; above 0 favours long ones.")
    ] = SamplingParams.length_penalty
    early_stopping: Annotated[
        str, _several("Beams: true ends with the first so many texts, never only when no better can come.")
    ] = "false"

    def of(self, params: SamplingParams) -> SamplingParams:
        """The same parameters for so many texts. Raises RequestError for what does not go together."""
        known: dict[str, bool | Literal["never"]] = {"true": True, "false": False, "never": "never"}
        if self.early_stopping not in known:
            raise RequestError(f"--early-stopping {self.early_stopping!r} is unknown: choose true, false or never.")
        return replace(
            params,
            n=self.n,
            num_beams=self.num_beams,
            length_penalty=self.length_penalty,
            early_stopping=known[self.early_stopping],
        )


@dataclass(frozen=True)
class CacheOptions:
    """How the past is kept, and how it is computed."""

    kv_memory: Annotated[
        str | None, _cache("Budget for K and V, such as 512MiB; by default part of the free memory.")
    ] = None
    kv_dtype: Annotated[
        str,
        _cache("What K and V are stored as: exact, fp32, fp16, bf16, int8, int4, int2, int4-token …, or two, as k8v4."),
    ] = CacheConfig.kv_dtype
    block_size: Annotated[int, _cache("Tokens in a block.")] = CacheConfig.block_size
    window: Annotated[int | None, _cache("See the last n tokens only.")] = CacheConfig.window
    sinks: Annotated[int, _cache("First tokens that stay visible past the window.")] = CacheConfig.sink_tokens
    sink_rule: Annotated[str, _cache("absolute, or in_cache to go on past the model's context.")] = (
        CacheConfig.sink_rule
    )
    global_tokens: Annotated[
        str, _cache("Positions that stay visible past the window, such as 0:4,100:108.", metavar="RUNS")
    ] = ""
    no_prefix_caching: Annotated[
        bool, _cache("Keep nothing for later requests that begin alike.", "--no-prefix-caching")
    ] = False
    cache_dir: Annotated[
        str | None, _cache("Keep what was computed in this folder too, for later processes.", metavar="FOLDER")
    ] = None
    cache_size: Annotated[str | None, _cache("Most that the folder takes; at first 2GiB, then as it was.")] = None
    max_step_tokens: Annotated[int, _cache("Tokens in one model call; longer prompts are read in chunks.")] = (
        EngineConfig.max_step_tokens
    )
    backend: Annotated[str, _cache("Attention backend: auto, native, sdpa or reference.")] = EngineConfig.backend

    def configs(self) -> tuple[CacheConfig, EngineConfig]:
        """What `LLM` takes. Raises ConfigError for a value that cannot work."""
        cache = CacheConfig(
            block_size=self.block_size,
            kv_memory=self.kv_memory,
            kv_dtype=self.kv_dtype,
            window=self.window,
            sink_tokens=self.sinks,
            sink_rule=self.sink_rule.replace("-", "_"),  # type: ignore[arg-type]  # checked there
            global_tokens=parse_runs("--global-tokens", self.global_tokens),
            prefix_caching=not self.no_prefix_caching,
            cache_dir=self.cache_dir,
            cache_size=self.cache_size,
        )
        return cache, EngineConfig(max_step_tokens=self.max_step_tokens, backend=self.backend)


def parse_runs(option: str, text: str) -> Spans:
    """Reads runs of positions. Raises ConfigError for what are none."""
    try:
        return parse_spans(text)
    except ValueError:
        raise ConfigError(
            f"{option} {text!r} names no positions: write runs such as 0:4 or 0:4,100:108, whose ends are outside."
        ) from None


def parse_logit_bias(pairs: list[str]) -> dict[int, float]:
    """Reads `ID=BIAS` pairs; whether the numbers are allowed is for `SamplingParams` to say.

    Raises:
        RequestError: for what is no such pair, or an id given twice.
    """
    bias: dict[int, float] = {}
    for pair in pairs:
        left, _, right = pair.partition("=")
        try:
            token_id, amount = int(left), float(right)
        except ValueError:
            raise RequestError(
                f"--logit-bias {pair!r} is not ID=BIAS: write a pair such as 42=-5 or 42=-inf."
            ) from None
        if token_id in bias:
            raise RequestError(f"--logit-bias names token {token_id} twice: give each token id once.")
        bias[token_id] = amount
    return bias
