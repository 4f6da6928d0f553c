"""Speed, held against what the machine allows and against other engines: the floors, the rounds, and who takes part.

`run_bench` measures; `measure_machine` and `Floors` say what could be reached.
"""

from kvine.evidence.bench.floors import Floors
from kvine.evidence.bench.machine import Machine, measure_machine
from kvine.evidence.bench.players import PEERS, Peer
from kvine.evidence.bench.report import Bench, CacheFree, Entrant, Row, Skipped
from kvine.evidence.bench.run import run_bench
from kvine.evidence.bench.settings import WHAT, Settings

__all__ = [
    "PEERS",
    "WHAT",
    "Bench",
    "CacheFree",
    "Entrant",
    "Floors",
    "Machine",
    "Peer",
    "Row",
    "Settings",
    "Skipped",
    "measure_machine",
    "run_bench",
]
