"""`kvine traps`: the classic mistakes with their symptoms, and an examination of this engine for them."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvine.cli.options import ExactModelOptions, ModelOptions, spread_options
from kvine.cli.terminal import ended_by_interrupt, show_output, write_json

if TYPE_CHECKING:
    from rich.text import Text

    from kvine.evidence.traps.catalogue import Trap
    from kvine.evidence.traps.examine import Finding
    from kvine.evidence.traps.inject import Report
    from kvine.evidence.traps.places import Kind
    from kvine.evidence.traps.samples import Sample

FAULT = 1


@spread_options
def traps(
    model: ExactModelOptions,
    name: Annotated[
        str,
        typer.Argument(metavar="[NAME]", help="One trap, or a kind that --examine has named; all traps by default."),
    ] = "all",
    examine: Annotated[
        bool, typer.Option("--examine", help="Examine this engine for faults, and name what is found.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show the classic mistakes of a KV cache: the wrong code, what its user sees, how to find it, the right code.

    The samples were recorded; no model is loaded. With --examine one is, and this engine is examined for faults: exit
    code 1 if there is one, with the kind it looks like.
    """
    model.check()
    if examine:
        _examine(model, json)
        return
    with ended_by_interrupt():
        from kvine.evidence.traps.catalogue import TRAPS, find_traps
        from kvine.evidence.traps.kinds import KINDS
        from kvine.evidence.traps.places import kind_named
        from kvine.evidence.traps.samples import load_samples
    chosen = [] if name in KINDS and name not in TRAPS else find_traps(name)
    kinds = [kind_named(kind) for kind in (KINDS if name == "all" else [name])]
    samples = load_samples()
    if json:
        taught = [_trap_json(trap, samples[trap.name]) for trap in chosen]
        write_json({"traps": taught, "kinds": [asdict(kind) for kind in kinds]})
    elif name == "all":
        _show_list(chosen)
    elif chosen:
        _show_trap(chosen[0], samples[name])
        show_output(*_where(kinds[0]))
    else:
        _show_kind(kinds[0])


def inject(model: ModelOptions, name: str, json: bool) -> None:
    """`kvine verify --inject`: exit code 1 if a fault is not caught, or not named for what it is."""
    from kvine.cli.evidence_progress import EvidenceProgress

    with ended_by_interrupt():
        from kvine.evidence.traps.catalogue import find_traps
        from kvine.evidence.traps.inject import inject as run
    chosen = find_traps(name)
    lab = _lab(model)
    with EvidenceProgress(unit="faults") as progress:
        report = run(lab, chosen, progress)
    if json:
        write_json(_report_json(report))
    else:
        _show_report(report)
    if not report.ok:
        raise typer.Exit(FAULT)


def _lab(model: ModelOptions) -> Any:
    from kvine.cli.progress import FetchProgress
    from kvine.hub import resolve

    with FetchProgress() as fetching:
        source = resolve(model.model, progress=fetching)
    with ended_by_interrupt():
        import torch

        from kvine.engine.resources import checked_threads
        from kvine.errors import ConfigError
        from kvine.evidence.traps.examine import Lab
    if model.device not in ("auto", "cpu"):
        raise ConfigError("The trap lab computes on the CPU: leave --device out.")
    torch.set_num_threads(checked_threads(model.threads))
    return Lab(source, dtype="fp32" if model.dtype == "auto" else model.dtype, weights=model.weights)


def _examine(model: ModelOptions, json: bool) -> None:
    from kvine.cli.evidence_progress import EvidenceProgress

    lab = _lab(model)
    from kvine.evidence.traps.examine import examine
    from kvine.evidence.traps.places import kind_named
    from kvine.evidence.traps.seams import healthy

    with EvidenceProgress(unit="probes") as progress:
        finding = examine(lab, healthy, progress=progress)
    if json:
        kind = None if finding.named_as is None else kind_named(finding.named_as)
        write_json({"ok": not finding.caught, **_finding_json(finding), "kind": None if kind is None else asdict(kind)})
    else:
        _show_finding(finding)
    if finding.caught:
        raise typer.Exit(FAULT)


# -- JSON --------------------------------------------------------------------------------------------------------------


def _trap_json(trap: "Trap", sample: "Sample") -> dict[str, Any]:
    return {
        "name": trap.name,
        "wrong_code": trap.wrong,
        "symptom": trap.symptom,
        "sample": vars(sample),
        "how_to_find": f"kvine verify --inject {trap.name}",
        "right_code": trap.right,
        "file": trap.file,
    }


def _finding_json(finding: "Finding") -> dict[str, Any]:
    return {
        "caught": finding.caught,
        "named_as": finding.named_as,
        "layer": finding.layer,
        "position": finding.position,
        "probe": finding.probe,
        "evidence": finding.evidence,
    }


def _report_json(report: "Report") -> dict[str, Any]:
    return {
        "ok": report.ok,
        "model": report.model,
        "healthy": _finding_json(report.healthy),
        "faults": [{"name": i.trap.name, **_finding_json(i.finding)} for i in report.injections],
        "unsuitable": [{"name": trap.name, "reason": reason} for trap, reason in report.unsuitable],
    }


# -- for people --------------------------------------------------------------------------------------------------------


def _show_list(traps: list["Trap"]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="The classic mistakes of a KV cache", show_lines=True)
    table.add_column("trap", style="bold", no_wrap=True)
    table.add_column("what its user sees")
    for trap in traps:
        table.add_row(Text(trap.name), Text(trap.symptom))
    show_output(
        table, Text("kvine traps NAME shows one with its code and a sample; kvine verify --inject NAME finds it.")
    )


def _show_trap(trap: "Trap", sample: "Sample") -> None:
    from rich.panel import Panel
    from rich.syntax import Syntax
    from rich.text import Text

    show_output(
        Text(trap.name, style="bold"),
        Text(trap.symptom),
        Panel(Syntax(trap.wrong, "python", word_wrap=True), title="wrong", border_style="red"),
        Text(f"{sample.model}, {sample.what}"),
        Panel(Text(sample.prompt), title="prompt", border_style="dim"),
        Panel(Text(sample.healthy), title="healthy", border_style="green"),
        Panel(Text(sample.broken), title="broken", border_style="red"),
        Text(f"Find it: kvine verify --inject {trap.name} builds it in and examines the engine; in your own code,"),
        Text("kvine traps --examine finds it."),
        Panel(Syntax(trap.right, "python", word_wrap=True), title=f"right, {trap.file}", border_style="green"),
    )


def _show_finding(finding: "Finding") -> None:
    from rich.text import Text

    from kvine.evidence.traps.places import kind_named

    if finding.named_as is None:
        show_output(Text("No fault: all that was tried came out as the textbook has it.", style="green"))
        return
    where = "" if finding.layer is None else f", layer {finding.layer}"
    where += "" if finding.position is None else f", position {finding.position}"
    kind = kind_named(finding.named_as)
    show_output(
        Text(f"A fault, first seen in the probe {finding.probe!r}{where}.", style="bold red"),
        Text(f"It looks like {finding.named_as}: {kind.meaning}."),
        Text(f"Seen: {finding.evidence}."),
        *_where(kind),
    )


def _show_kind(kind: "Kind") -> None:
    from rich.text import Text

    near = " and ".join(f"kvine traps {name}" for name in kind.traps)
    show_output(
        Text(kind.name, style="bold"),
        Text(f"A kind of fault that `kvine traps --examine` names: {kind.meaning}."),
        Text(f"No trap builds in just this. The nearest: {near}." if near else "No trap builds in this, or the like."),
        *_where(kind),
    )


def _where(kind: "Kind") -> list["Text"]:
    from rich.text import Text

    return [Text("Where to look, the likeliest first:"), *(Text(f"  {place}") for place in kind.places)]


def _show_report(report: "Report") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{report.model}: faults built in, and what the examination made of them")
    for column in ("fault", "caught", "named as", "layer", "position", "probe"):
        table.add_column(column, justify="right" if column in ("layer", "position") else "left")
    for injection in report.injections:
        finding = injection.finding
        table.add_row(
            Text(injection.trap.name),
            "yes" if finding.caught else "no",
            Text(finding.named_as or ""),
            "" if finding.layer is None else str(finding.layer),
            "" if finding.position is None else str(finding.position),
            Text(finding.probe or ""),
            style="green" if injection.ok else "bold red",
        )
    lines = [Text(f"Left out, {trap.name}: {reason}.", style="dim") for trap, reason in report.unsuitable]
    if report.healthy.caught:
        lines.append(Text(f"The engine as it is raises an alarm: {report.healthy.named_as}.", style="bold red"))
    right = sum(injection.ok for injection in report.injections)
    style = "green" if report.ok else "bold red"
    lines.append(
        Text(f"{right} of {len(report.injections)} faults were caught and named for what they are.", style=style)
    )
    show_output(table, *lines)
