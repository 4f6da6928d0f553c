"""Scores the examination on changes that it was not written for: `python tests/evidence/score_trap_mutants.py`."""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tiny_models import write_checkpoint
from trap_mutants import MUTANTS, Mutant

from kvine.evidence.traps.examine import Finding, Lab, examine
from kvine.evidence.traps.seams import broken


@dataclass(frozen=True)
class Score:
    """What the examination made of one mutant."""

    mutant: Mutant
    finding: Finding

    @property
    def is_sensible(self) -> bool:
        """Whether the name leads to the right part of the engine."""
        return self.finding.named_as in self.mutant.sensible


def score(lab: Lab, mutant: Mutant) -> Score:
    return Score(mutant, examine(lab, broken(mutant.fault)))


def main() -> None:
    """A line for each mutant, and the two scores."""
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(write_checkpoint(Path(folder), sys.argv[1] if len(sys.argv) > 1 else "llama"))
        scores = []
        for mutant in MUTANTS.values():
            scores.append(score(lab, mutant))
            finding = scores[-1].finding
            mark = "named" if scores[-1].is_sensible else "caught" if finding.caught else "MISSED"
            print(f"{mark:7} {mutant.name}: {finding.named_as}; {finding.evidence}", flush=True)
    caught, sensible = sum(s.finding.caught for s in scores), sum(s.is_sensible for s in scores)
    print(f"{caught} of {len(scores)} caught, {sensible} of {len(scores)} sensibly named")


if __name__ == "__main__":
    main()
