"""The check of the checker: builds engines with known faults and lets the examination find them.

The examination is handed a way to build an engine and never learns which fault is in it, or whether there is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvine.evidence.progress import Progress, silent
from kvine.evidence.traps.catalogue import Trap
from kvine.evidence.traps.examine import Finding, Lab, examine
from kvine.evidence.traps.seams import broken, healthy


@dataclass(frozen=True)
class Injection:
    """A fault, and what the examination made of it."""

    trap: Trap
    finding: Finding

    @property
    def ok(self) -> bool:
        """Whether it was caught, and named for what it is."""
        return self.finding.caught and self.finding.named_as == self.trap.name


@dataclass(frozen=True)
class Report:
    """All injections on one model.

    Attributes:
        model: its name.
        healthy: what the examination found in the engine as it is.
        injections: of the faults that the model can have.
        unsuitable: the other traps, each with the reason.
    """

    model: str
    healthy: Finding
    injections: tuple[Injection, ...]
    unsuitable: tuple[tuple[Trap, str], ...]

    @property
    def ok(self) -> bool:
        """Whether every fault was caught and named, and the healthy engine raised no alarm."""
        return not self.healthy.caught and all(injection.ok for injection in self.injections)


def inject(lab: Lab, traps: Sequence[Trap], progress: Progress = silent) -> Report:
    """Examines the engine as it is, and then with each fault.

    Args:
        lab: of the model.
        traps: the faults.
        progress: told of each examination.
    """
    total = len(traps) + 1
    progress("the engine as it is", 0, total)
    as_it_is = examine(lab, healthy)
    injections: list[Injection] = []
    unsuitable: list[tuple[Trap, str]] = []
    config = lab.model().config
    for number, trap in enumerate(traps, 1):
        progress(trap.name, number, total)
        reason = trap.unsuitable(config)
        if reason is not None:
            unsuitable.append((trap, reason))
        else:
            injections.append(Injection(trap, examine(lab, broken(trap.fault))))
    return Report(lab.source.name, as_it_is, tuple(injections), tuple(unsuitable))
