"""`kvine bench`: how fast Kvine is on this machine, how fast it could be, and how fast other engines are."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvine.cli.experiment.options import Json, PlotFile, check_plot_file, whole_numbers
from kvine.cli.options import DEFAULT_MODEL
from kvine.cli.terminal import ended_by_interrupt, note, show_output, write_json
from kvine.errors import RequestError

ALL = "ready,prefill,decode,batch,prefix_hit,peak_memory,cache_free"


def _peers(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Other engines", **more)


def bench(
    model: Annotated[str, typer.Argument(help="An alias, a hub id, a folder or a .gguf file.")] = DEFAULT_MODEL,
    what: Annotated[str, typer.Option(metavar="WHAT,…", help="What to measure.")] = ALL,
    repeats: Annotated[int, typer.Option(help="Times that each figure is measured; medians are shown.")] = 3,
    tokens: Annotated[int, typer.Option(help="New tokens after each prompt.")] = 64,
    batch: Annotated[str, typer.Option(metavar="N,N,…", help="Numbers of requests at once.")] = "1,8,32,64",
    context: Annotated[
        int | None, typer.Option(help="Tokens of the long prompt, instead of the default text of 1,929.")
    ] = None,
    weights: Annotated[str, typer.Option(help="As generate has it: exact, or auto to keep them packed.")] = "exact",
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; by default as many cores as the process may use.")
    ] = None,
    vs: Annotated[
        str | None,
        _peers("Measured in turns with Kvine: transformers, llama.cpp, openvino, vllm.", metavar="NAME,…"),
    ] = None,
    peer_python: Annotated[
        list[str] | None, _peers("The Python that has it; else this one. Repeatable.", metavar="NAME=PATH")
    ] = None,
    peer_model: Annotated[
        list[str] | None, _peers("What it reads, instead of Kvine's file. Repeatable.", metavar="NAME=PATH")
    ] = None,
    timeout: Annotated[float, _peers("Seconds that an engine may take for one answer.")] = 900.0,
    plot: PlotFile = None,
    json: Json = False,
) -> None:
    """Measure speed: prefill, decode, batches, prefix hits, memory, beside what this machine allows and other engines.

    First the machine's read bandwidth and matrix rate are measured; every figure is shown as a share of the floor that
    follows from them. docs/performance.md defines all figures. Leave the machine alone meanwhile.
    """
    batches = tuple(whole_numbers("--batch", batch))
    named = vs.split(",") if vs is not None else []
    pythons, models = _pairs("--peer-python", peer_python, named), _pairs("--peer-model", peer_model, named)
    check_plot_file(plot)
    from kvine.cli.evidence_progress import EvidenceProgress
    from kvine.cli.progress import FetchProgress
    from kvine.hub import resolve

    with FetchProgress() as fetching:
        source = resolve(model, progress=fetching)
    with ended_by_interrupt():
        from kvine.evidence.bench.run import run_bench
    from kvine.evidence.bench.players import Peer
    from kvine.evidence.bench.settings import Settings

    settings = Settings(
        what=tuple(dict.fromkeys(what.split(","))),
        repeats=repeats,
        tokens=tokens,
        batches=tuple(sorted(set(batches))),
        context=context,
        weights=weights,
        dtype=dtype,
        device=device,
        threads=threads,
        patience=timeout,
    )
    peers = [
        Peer(name, pythons.get(name), Path(models[name]) if name in models else None) for name in dict.fromkeys(named)
    ]
    with EvidenceProgress("measurements") as progress:
        outcome = run_bench(source, settings, peers, progress=progress, tell=note)
    if plot is not None:
        from kvine.evidence.bench.picture import draw_bench

        draw_bench(outcome, plot)
    from kvine.cli.bench_view import bench_json, show_bench

    if json:
        write_json(bench_json(outcome))
    else:
        show_output(*show_bench(outcome))


def _pairs(option: str, given: list[str] | None, named: list[str]) -> dict[str, str]:
    """NAME=PATH pairs of peers that --vs names. Raises RequestError for anything else."""
    pairs: dict[str, str] = {}
    for pair in given or []:
        name, separator, path = pair.partition("=")
        if not separator or not path:
            raise RequestError(f"{option} {pair!r} is not NAME=PATH: write for example transformers=/path/to/it.")
        if name not in named:
            raise RequestError(f"{option} is about {name!r}, which --vs does not name: add --vs {name}.")
        if name in pairs:
            raise RequestError(f"{option} names {name} twice: give one path for it.")
        pairs[name] = path
    return pairs
