"""The covering design, by an oracle that counts all pairs itself; and the open registry."""

import itertools
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from cell_lab import Lab

from kvine.evidence.cells import factors as registry
from kvine.evidence.cells.covering import cover
from kvine.evidence.cells.factors import Factor, Level, register, registered
from kvine.evidence.cells.setup import Prompt


def levels(*names: str, **options: object) -> tuple[Level, ...]:
    return tuple(Level(name, lambda setup: setup, name, **options) for name in names)


def met(cells) -> set[frozenset[tuple[str, str]]]:
    return {
        frozenset((name, level.name) for name, level in two)
        for cell in cells
        for two in itertools.combinations(cell.items(), 2)
    }


def test_every_pair_meets_in_far_fewer_cells_than_there_are() -> None:
    factors = [Factor(name, levels(*"pqrs"[: 2 + index % 3])) for index, name in enumerate("abcdefgh")]
    design = cover(factors, seed=1)
    wanted = {
        frozenset({(a.name, one.name), (b.name, other.name)})
        for a, b in itertools.combinations(factors, 2)
        for one, other in itertools.product(a.levels, b.levels)
    }
    assert met(design.cells) == wanted and design.pairs == len(wanted) and not design.refused
    assert 16 <= len(design.cells) <= 26, "16 is the least for two factors of 4; the product has 3,456"
    assert design.cells == cover(factors, seed=1).cells, "deterministic"
    assert design.cells != cover(factors, seed=2).cells
    assert all(level.name == "p" for level in design.cells[0].values()), "the plain cell comes first"


def test_what_cannot_be_combined_is_listed_with_its_reason() -> None:
    def refuse(values):
        if values.get("a") == "q" and values.get("b") == "q":
            return "two of them"
        if values.get("a") == "p" and values.get("b") == "q" and values.get("c") is not None:
            return "three of them"
        return None

    unfit = Level("z", lambda setup: setup, "z", unfit="not on this model")
    factors = [Factor("a", levels(*"pq"), refuse), Factor("b", levels(*"pq")), Factor("c", (*levels("p"), unfit))]
    design = cover(factors, seed=0)
    reasons = {frozenset(refusal.levels): refusal.reason for refusal in design.refused}
    assert reasons.pop(frozenset({("c", "z")})) == "not on this model"
    assert reasons.pop(frozenset({("a", "q"), ("b", "q")})) == "two of them"
    assert reasons.keys() == {frozenset({("a", "p"), ("b", "q")}), frozenset({("b", "q"), ("c", "p")})}
    assert all(cell["b"].name == "p" for cell in design.cells) and design.pairs == len(met(design.cells))


def test_a_pair_counts_only_where_both_make_a_difference() -> None:
    lamp = Factor("lamp", levels("off", "on"))
    shade = Factor("shade", levels("white", "red"), takes_effect=lambda values: values.get("lamp", "on") == "on")
    paper = Factor("paper", levels("thin", "thick"))
    cells = cover([lamp, shade, paper], seed=0).cells
    seen = {(cell["shade"].name, cell["paper"].name) for cell in cells if cell["lamp"].name == "on"}
    assert len(seen) == 4
    assert ("off", "red") in {(cell["lamp"].name, cell["shade"].name) for cell in cells}, "the two themselves meet too"


def test_the_standard_factors_are_covered_where_they_make_a_difference(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "llama", quick=False)
    design = lab.design()
    allowed = {
        frozenset({(a.name, one.name), (b.name, other.name)})
        for a, b in itertools.combinations(lab.factors, 2)
        for one, other in itertools.product(a.levels, b.levels)
        if one.unfit is None and other.unfit is None
    } - {frozenset(refusal.levels) for refusal in design.refused}
    assert met(design.cells) == allowed and design.pairs == len(allowed)
    beside = {
        (cell["mates"].name, cell["block size"].name)
        for cell in design.cells
        if cell["history"].name == "queued" and cell["memory"].name == "ample" and cell["mates"].name != "none"
    }
    assert len(beside) == 8, "mates are in one model call with the text for each block size"


def test_short_prompts_leave_much_impossible_and_take_no_time(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "llama", quick=False)
    scope = replace(lab.scope, prompts=(Prompt("two", (5, 6)),))
    began = time.process_time()
    design = cover(registered(scope), seed=0)
    assert time.process_time() - began < 10, "dead ends are seen early"
    assert design.cells and {cell["prefix"].name for cell in design.cells} == {"miss"}
    assert any(("feeding", "chunks of 7") in refusal.levels for refusal in design.refused)


def test_anyone_may_register_a_factor_or_further_levels(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "llama")
    with patch.object(registry, "_MAKERS", list(registry._MAKERS)):

        @register
        def window(scope) -> Factor:
            narrow = Level("two", lambda setup: replace(setup, cache=replace(setup.cache, window=2)), "two")
            return Factor("window", (narrow,))

        @register
        def running(scope) -> Factor:
            one = Level("one", lambda setup: replace(setup, engine=replace(setup.engine, max_running=1)), 1)
            return Factor("running", (*levels("many"), one))

        lab.factors = registered(lab.scope)
        by_name = {factor.name: [level.name for level in factor.levels] for factor in lab.factors}
        assert by_name["window"][-1] == "two" and by_name["window"][0] == "none"
        assert by_name["running"] == ["many", "one"]
        cells = [cell for cell in lab.design().cells if cell["window"].name == "two" or cell["running"].name == "one"]
        report = lab.run(cells[:4])
    assert [cell.verdict for cell in report.cells] == ["identical"] * 4
    with pytest.raises(KeyError):
        report.cells[0].factors["nothing"]
