"""`kvine bench`: how fast Kvine is on this machine, how fast it could be, and how fast other engines are."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvine.cli.experiment.options import Json, PlotFile, check_plot_file, whole_numbers
from kvine.cli.options import DEFAULT_MODEL, WEIGHTS_HELP, spread_options
from kvine.cli.terminal import ended_by_interrupt, note, show_output, write_json
from kvine.errors import RequestError

if TYPE_CHECKING:
    from kvine.evidence.bench.players import Peer
    from kvine.evidence.bench.settings import Settings

ALL = "ready,prefill,decode,batch,prefix_hit,peak_memory,cache_free"


def _option(panel: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


@dataclass(frozen=True)
class MeasureOptions:
    """What to measure, and how Kvine computes meanwhile."""

    what: Annotated[str, _option("Measure", "What to measure.", metavar="WHAT,…")] = ALL
    repeats: Annotated[int, _option("Measure", "Times that each figure is measured; medians are shown.")] = 3
    tokens: Annotated[int, _option("Measure", "New tokens after each prompt.")] = 64
    batch: Annotated[str, _option("Measure", "Numbers of requests at once.", metavar="N,N,…")] = "1,8,32,64"
    context: Annotated[
        int | None,
        _option("Measure", "Tokens of the long prompt; by default a fixed text, 1,929 for SmolLM2."),
    ] = None
    weights: Annotated[str, _option("Model", WEIGHTS_HELP)] = "auto"
    dtype: Annotated[str, _option("Model", "auto, fp32, bf16 or fp16.")] = "auto"
    device: Annotated[str, _option("Model", "auto, cpu, cuda or mps.")] = "auto"
    threads: Annotated[
        int | None, _option("Model", "CPU threads; by default OMP_NUM_THREADS, or all usable cores.")
    ] = None
    timeout: Annotated[float, _option("Measure", "Seconds that an engine may take for one answer.")] = 900.0

    def settings(self) -> "Settings":
        """What the bench takes. Raises RequestError for a value that is out of range."""
        batches = whole_numbers("--batch", self.batch)
        from kvine.evidence.bench.settings import Settings

        return Settings(
            what=tuple(dict.fromkeys(self.what.split(","))),
            repeats=self.repeats,
            tokens=self.tokens,
            batches=tuple(sorted(set(batches))),
            context=self.context,
            weights=self.weights,
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            patience=self.timeout,
        )


@dataclass(frozen=True)
class PeerOptions:
    """Other engines."""

    vs: Annotated[
        str | None,
        _option(
            "Other engines",
            "Measured in turns with Kvine: transformers, llama.cpp, openvino, vllm.",
            metavar="NAME,…",
        ),
    ] = None
    peer_python: Annotated[
        list[str], _option("Other engines", "The Python that has it; else this one. Repeatable.", metavar="NAME=PATH")
    ] = field(default_factory=list)
    peer_model: Annotated[
        list[str], _option("Other engines", "What it reads, not Kvine's file. Repeatable.", metavar="NAME=PATH")
    ] = field(default_factory=list)

    def peers(self) -> "list[Peer]":
        """The engines that were named. Raises KvineError for one that is unknown, or a path for another one."""
        named = [] if self.vs is None else list(dict.fromkeys(self.vs.split(",")))
        pythons = _pairs("--peer-python", self.peer_python, named)
        models = _pairs("--peer-model", self.peer_model, named)
        from kvine.evidence.bench.players import Peer

        return [Peer(name, pythons.get(name), Path(models[name]) if name in models else None) for name in named]


@spread_options
def bench(
    measure: MeasureOptions,
    others: PeerOptions,
    model: Annotated[str, typer.Argument(help="An alias, a hub id, a folder or a .gguf file.")] = DEFAULT_MODEL,
    plot: PlotFile = None,
    json: Json = False,
) -> None:
    """Measure speed: prefill, decode, batches, prefix hits, memory, beside what this machine allows and other engines.

    First the machine's read bandwidth and matrix rate are measured; every figure is shown as a share of the floor that
    follows from them. docs/performance.md defines all figures. Leave the machine alone meanwhile.
    """
    settings, peers = measure.settings(), others.peers()
    check_plot_file(plot)
    from kvine.cli.bench_view import bench_json, show_bench
    from kvine.cli.evidence_progress import EvidenceProgress
    from kvine.cli.progress import FetchProgress
    from kvine.hub import resolve

    with FetchProgress() as fetching:
        source = resolve(model, progress=fetching)
    with ended_by_interrupt():
        from kvine.evidence.bench.run import run_bench

    with EvidenceProgress("measurements") as progress:
        outcome = run_bench(source, settings, peers, progress=progress, tell=note)
    if json:
        write_json(bench_json(outcome))
    else:
        show_output(*show_bench(outcome))
    if plot is not None:
        from kvine.evidence.bench.picture import draw_bench

        draw_bench(outcome, plot)


def _pairs(option: str, given: Sequence[str], named: Sequence[str]) -> dict[str, str]:
    """NAME=PATH pairs of peers that --vs names. Raises RequestError for anything else."""
    pairs: dict[str, str] = {}
    for pair in given:
        name, separator, path = pair.partition("=")
        if not separator or not path:
            raise RequestError(f"{option} {pair!r} is not NAME=PATH: write for example transformers=/path/to/it.")
        if name not in named:
            raise RequestError(f"{option} is about {name!r}, which --vs does not name: add --vs {name}.")
        if name in pairs:
            raise RequestError(f"{option} names {name} twice: give one path for it.")
        pairs[name] = path
    return pairs
