"""For each factor a fault that only some of its levels bring out: the cells see it, and say which and where."""

from collections.abc import Mapping
from dataclasses import dataclass

import broken_cells
import pytest
from broken_cells import PlantFault
from cell_lab import Lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("faults"), "llama", quick=False)


@dataclass(frozen=True)
class Case:
    """A fault, and the levels of its factor that bring it out.

    `tensor` of layer 0 is wrong first; None: the engine fails. `also` is a level of another factor that does so too;
    `alone`: nothing else does.
    """

    fault: PlantFault
    levels: tuple[str, ...]
    tensor: str | None
    also: tuple[str, str] | None = None
    alone: bool = True

    def meets(self, factor: str, names: Mapping[str, str]) -> bool:
        return names[factor] in self.levels or (self.also is not None and names[self.also[0]] == self.also[1])


CASES = {
    "prompt": Case(broken_cells.short_table, ("24 tokens",), "cached_k"),
    "dtype": Case(broken_cells.low_precision_in_bf16, ("bf16",), "cached_k"),
    "feeding": Case(broken_cells.chunks_from_zero, ("chunks of 7",), "cached_k", alone=False),  # prefix hits too
    "block size": Case(broken_cells.slots_of_blocks_of_three, ("3",), "cached_k"),
    "prefix": Case(broken_cells.careless_comparison, ("hit, partly",), "cached_k", ("mates", "begins alike")),
    "mates": Case(broken_cells.shared_table, ("three, uneven", "begins alike"), "attn_out", ("beams", "3")),
    "preemption": Case(broken_cells.resumed_one_early, ("every 3 steps",), "cached_k", ("memory", "one request")),
    "memory": Case(broken_cells.overcommitted, ("one request",), None),
    "history": Case(broken_cells.fork_without_copies, ("fork",), "cached_k", ("beams", "3")),
    "beams": Case(broken_cells.exchanged_beams, ("3",), "attn_out"),
    "store": Case(broken_cells.exchanged_halves, ("disk",), "cached_k"),
    "backend": Case(broken_cells.loud_reference, ("reference",), "attn_out"),
    "codec": Case(broken_cells.coarse_fp16, ("fp16",), "cached_k"),
    "window": Case(broken_cells.short_window, ("window", "sinks", "in_cache", "global", "pinned"), "attn_out"),
}


def test_every_factor_has_a_fault(lab: Lab) -> None:
    assert {factor.name for factor in lab.factors} == CASES.keys()


@pytest.mark.parametrize("factor", CASES)
def test_a_fault_of_one_level_is_seen_and_located(lab: Lab, factor: str) -> None:
    case = CASES[factor]
    cells = {True: [], False: []}
    for cell in lab.design().cells:
        names = {name: level.name for name, level in cell.items()}
        if names[factor] in case.levels or not case.meets(factor, names):
            cells[names[factor] in case.levels].append(cell)
    report = lab.run(cells[True][:10], case.fault)
    assert report.faults, [(dict(cell.factors), cell.gap, cell.bound) for cell in report.cells]
    if case.tensor is None:
        assert any(cell.reason for cell in report.faults)
    else:
        located = [cell.location for cell in report.faults if cell.location is not None]
        assert case.tensor in {at.tensor for at in located if at.layer == 0}, (located, report.faults)
    healthy = lab.run(cells[False][:3], case.fault)
    assert not healthy.faults, [(cell.factors, cell.location) for cell in healthy.faults]


@pytest.mark.slow
@pytest.mark.parametrize("factor", CASES)
def test_the_whole_design_points_at_the_level(lab: Lab, factor: str) -> None:
    case = CASES[factor]
    report = lab.run(lab.design().cells, case.fault)
    assert report.faults
    if not case.alone:
        return
    assert all(case.meets(factor, cell.factors) for cell in report.faults)
    if len(case.levels) == 1 and case.also is None and len(report.faults) > 1:
        assert (factor, case.levels[0]) in [(level.factor, level.level) for level in report.suspects()]
