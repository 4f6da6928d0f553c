"""`kvine eval`: what a lossy cache costs on one's own model and text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvine.cli.experiment.options import Json, PlotFile, check_plot_file, read_text, whole_numbers
from kvine.cli.options import DEFAULT_MODEL, WEIGHTS_HELP, CacheOptions, ModelOptions, spread_options
from kvine.cli.terminal import ended_by_interrupt, note, show_output, write_json
from kvine.config import EngineConfig, parse_bytes
from kvine.errors import RequestError

if TYPE_CHECKING:
    from kvine.evidence.progress import Progress
    from kvine.evidence.quality.needle import Cell
    from kvine.evidence.quality.policies import Policy, Refused
    from kvine.evidence.quality.scoring import Evaluation
    from kvine.evidence.quality.streaming import Streaming
    from kvine.llm import LLM

DEFAULT_POLICIES = "exact; kv-dtype=fp16; window=512; window=512,sinks=4,sink-rule=in-cache"


def _option(panel: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


@dataclass(frozen=True)
class PolicyOptions:
    """Which ways of keeping the past are compared."""

    policies: Annotated[
        str | None,
        _option(
            "Policies",
            f"Policies with ; between, each exact or NAME=VALUE,… with the names of the cache's options. By default "
            f"'{DEFAULT_POLICIES}'.",
        ),
    ] = None
    sweep: Annotated[bool, _option("Policies", "Codecs, windows, sinks, and both together.", "--sweep")] = False

    def check(self) -> None:
        """Says what is wrong before anything is loaded. Raises RequestError."""
        if self.sweep and self.policies is not None:
            raise RequestError("Give --policies or --sweep, not both.")

    def parse(self) -> "tuple[list[Policy], list[Refused]]":
        """The policies that were named, and those refused; a sweep waits for the model. Raises RequestError."""
        from kvine.evidence.quality.policies import parse_policies

        self.check()
        if self.sweep:
            return [], []
        return parse_policies(DEFAULT_POLICIES if self.policies is None else self.policies)


@dataclass(frozen=True)
class TextOptions:
    """What is read, and how."""

    text: Annotated[
        Path | None, _option("Text", "A file of text in UTF-8; by default Python's own help pages.", metavar="FILE")
    ] = None
    tokens: Annotated[int, _option("Text", "Most tokens of it.")] = 2048
    context: Annotated[
        int | None,
        _option(
            "Text",
            "Tokens that are read from an empty cache; by default all, at most the model's context. "
            "A longer text is cut into such stretches.",
        ),
    ] = None
    stride: Annotated[
        int | None,
        _option(
            "Text",
            "How far apart stretches begin; by default they do not overlap. With less, each begins with the end of the "
            "one before, and only what is new is scored.",
        ),
    ] = None
    decode_steps: Annotated[int, _option("Text", "Tokens read one by one, at the end of the first stretch.")] = 16
    kv_memory: Annotated[
        str | None, _option("Text", "K and V of all caches together, such as 2GiB; by default half the free memory.")
    ] = None

    def check(self) -> None:
        """Says what is wrong before anything is loaded. Raises RequestError or ConfigError."""
        if self.tokens < 2:
            raise RequestError(f"--tokens is {self.tokens:,}: give 2 or more.")
        if self.context is not None and self.context < 2:
            raise RequestError(f"--context is {self.context:,}: give 2 or more.")
        if self.stride is not None and self.stride < 1:
            raise RequestError(f"--stride is {self.stride:,}: give 1 or more.")
        if self.decode_steps < 0:
            raise RequestError(f"--decode-steps is {self.decode_steps:,}: give 0 or more.")
        if self.kv_memory is not None:
            parse_bytes(self.kv_memory)

    def evaluate(
        self,
        llm: "LLM",
        policies: "Sequence[Policy]",
        refused: "Sequence[Refused]",
        ids: Sequence[int],
        progress: "Progress",
    ) -> "Evaluation":
        """Reads the text by each policy; those that the model refuses are told first."""
        from kvine.evidence.quality.scoring import evaluate

        return evaluate(
            llm,
            policies,
            ids,
            context=self.context,
            stride=self.stride,
            decode_steps=self.decode_steps,
            kv_memory=self.kv_memory,
            refused=refused,
            on_refused=lambda one: _tell([one]),
            progress=progress,
        )


@dataclass(frozen=True)
class MoreOptions:
    """What is measured beside the text."""

    needle: Annotated[bool, _option("More", "Hide facts in long texts, and ask for them.", "--needle")] = False
    needle_lengths: Annotated[str, _option("More", "Tokens of these texts.", metavar="N,N,…")] = "512,1024,2048"
    needle_depths: Annotated[str, _option("More", "Where facts stand, per cent.", metavar="N,N,…")] = "0,25,50,75,100"
    streaming: Annotated[
        bool,
        _option(
            "More",
            "StreamingLLM's comparison: the text in one go, past the model's context too, dense, by windows with 0 "
            "to 8 sinks, and by a window computed anew.",
            "--streaming",
        ),
    ] = False
    streaming_window: Annotated[int, _option("More", "Tokens that its queries see, sinks included.")] = 256

    def numbers(self) -> tuple[list[int], list[int]]:
        """Lengths and depths. Raises RequestError."""
        lengths = whole_numbers("--needle-lengths", self.needle_lengths)
        depths = whole_numbers("--needle-depths", self.needle_depths)
        with ended_by_interrupt():
            from kvine.evidence.quality.needle import check_needle
            from kvine.evidence.quality.streaming import check_streaming
        check_needle(lengths, depths)
        check_streaming(self.streaming_window)
        return lengths, depths

    def check(self, llm: "LLM", tokens: int, lengths: Sequence[int], depths: Sequence[int]) -> None:
        """Says before anything is read what does not fit this model and text. Raises RequestError."""
        from kvine.evidence.quality.needle import check_needle
        from kvine.evidence.quality.streaming import check_streaming

        if self.needle:
            check_needle(lengths, depths, llm.model.config.max_context)
        if self.streaming:
            check_streaming(self.streaming_window, tokens=tokens)

    def needles(
        self,
        llm: "LLM",
        outcome: "Evaluation",
        lengths: Sequence[int],
        depths: Sequence[int],
        progress: "Progress",
    ) -> "tuple[Cell, ...]":
        """The facts, asked for by the policies that were evaluated."""
        from kvine.evidence.quality.needle import find_needles
        from kvine.evidence.quality.policies import Policy

        policies = [Policy(one.name, one.cache) for one in outcome.policies]
        return find_needles(llm, policies, lengths=lengths, depths=depths, progress=progress)

    def stream(self, llm: "LLM", ids: Sequence[int], progress: "Progress") -> "Streaming":
        """StreamingLLM's comparison on the text."""
        from kvine.evidence.quality.streaming import compare_streaming

        return compare_streaming(llm, ids, window=self.streaming_window, progress=progress)


@dataclass(frozen=True)
class RunOptions:
    """Where the model runs."""

    dtype: Annotated[str, _option("Model", "auto, fp32, bf16 or fp16.")] = "auto"
    weights: Annotated[str, _option("Model", WEIGHTS_HELP)] = "auto"
    device: Annotated[str, _option("Model", "auto, cpu, cuda or mps.")] = "auto"
    threads: Annotated[
        int | None, _option("Model", "CPU threads; by default OMP_NUM_THREADS, or all usable cores.")
    ] = None
    backend: Annotated[str, _option("Model", "Attention backend: auto, native, sdpa or reference.")] = (
        EngineConfig.backend
    )


@spread_options
def evaluate(
    compared: PolicyOptions,
    read: TextOptions,
    more: MoreOptions,
    run: RunOptions,
    model: Annotated[str, typer.Argument(help="An alias, a hub id, a folder or a .gguf file.")] = DEFAULT_MODEL,
    plot: PlotFile = None,
    json: Json = False,
) -> None:
    """Measure what a lossy cache costs: perplexity, KL divergence, top-1, attention lost, bytes and time by policy.

    Every policy reads the same tokens beside the exact cache, as a generation reads them: in chunks, then one by one.
    Policies without end (sink-rule=in-cache) also read a text that is longer than the model's context in one go.
    docs/policies.md defines every figure. Times mean something where nothing else runs.
    """
    policies, refused = compared.parse()
    read.check()
    words = read_text(read.text)
    check_plot_file(plot)
    _tell(refused)
    if not policies and not compared.sweep:
        raise RequestError("No policy is left: give one that can be.")
    lengths, depths = more.numbers()
    llm = _open(model, run)
    ids = _ids(llm, words, read.tokens)
    more.check(llm, len(ids), lengths, depths)
    if compared.sweep:
        policies, refused = _sweep(llm, len(ids), read)
    from kvine.cli.eval_view import evaluation_json, show_evaluation
    from kvine.cli.evidence_progress import EvidenceProgress

    with EvidenceProgress("tokens", {"needles": "texts"}) as progress:
        outcome = read.evaluate(llm, policies, refused, ids, progress)
        needles = more.needles(llm, outcome, lengths, depths, progress) if more.needle else None
        streaming = more.stream(llm, ids, progress) if more.streaming else None
    if json:
        write_json(evaluation_json(outcome, needles, streaming))
    else:
        show_output(*show_evaluation(outcome, needles, streaming))
    if plot is not None:
        from kvine.evidence.quality.picture import draw_evaluation, draw_streaming

        draw_evaluation(outcome, plot)
        if streaming is not None:
            draw_streaming(streaming, plot.with_stem(f"{plot.stem}-streaming"))


def _tell(refused: "Sequence[Refused]") -> None:
    for one in refused:
        note(f"Refused: {one.name}: {one.reason}", style="yellow")


def _open(model: str, run: RunOptions) -> "LLM":
    from kvine.cli.loading import open_llm

    where = ModelOptions(model=model, device=run.device, dtype=run.dtype, weights=run.weights, threads=run.threads)
    return open_llm(where, CacheOptions(backend=run.backend))


def _ids(llm: "LLM", words: str | None, tokens: int) -> list[int]:
    """The first tokens of the text, without what the model's texts begin with."""
    from kvine.evidence.quality.texts import first_tokens, prose

    return first_tokens(llm.tokenizer, prose(tokens) if words is None else words, tokens)


def _sweep(llm: "LLM", tokens: int, read: TextOptions) -> "tuple[list[Policy], list[Refused]]":
    from kvine.engine.build import DTYPE_NAMES
    from kvine.evidence.quality.policies import sweep_policies

    context = min(read.context or tokens, llm.model.config.max_context)
    policies, refused = sweep_policies(context, DTYPE_NAMES[llm.model.dtype])
    _tell(refused)
    return policies, refused
