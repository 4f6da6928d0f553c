"""Every fault is caught and named for what it is, no healthy engine raises an alarm, and unknown changes are caught."""

from pathlib import Path

import pytest
from healthy_engines import examine_healthy, random_configuration
from score_trap_mutants import score
from tiny_models import write_checkpoint
from trap_mutants import MUTANTS

from kvine.evidence.traps.catalogue import TRAPS
from kvine.evidence.traps.examine import Lab, examine
from kvine.evidence.traps.inject import inject
from kvine.evidence.traps.kinds import KINDS
from kvine.evidence.traps.seams import broken, healthy
from kvine.hub import resolve

KINDS_OF_MODEL = ("llama", "qwen3", "gemma3")
SOME_MUTANTS = list(MUTANTS)[::6]
# What other architectures have and Llama has not: QK-norm, post-norms, layers with windows of their own.
ELSEWHERE = (
    "position-off-by-one-everywhere",
    "left-padding-attended",
    "kv-heads-tiled",
    "window-one-long",
    "bits-reinterpreted",
)


@pytest.fixture(scope="module")
def labs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lab]:
    return {kind: Lab(write_checkpoint(tmp_path_factory.mktemp(kind), kind)) for kind in KINDS_OF_MODEL}


def assert_named(lab: Lab, name: str) -> None:
    finding = examine(lab, broken(TRAPS[name].fault))
    assert finding.caught
    assert finding.named_as == name, finding
    assert finding.position is not None and (finding.layer is not None or finding.probe == "crop")


@pytest.mark.parametrize("name", TRAPS)
def test_each_fault_is_named_in_llama(labs: dict[str, Lab], name: str) -> None:
    assert_named(labs["llama"], name)


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_faults_are_named_in_other_architectures(labs: dict[str, Lab], kind: str, name: str) -> None:
    assert_named(labs[kind], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAPS.keys() - set(ELSEWHERE))
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_each_fault_is_named_in_other_architectures(labs: dict[str, Lab], kind: str, name: str) -> None:
    assert_named(labs[kind], name)


def test_every_name_of_a_trap_is_a_kind() -> None:
    assert TRAPS.keys() <= KINDS.keys()


@pytest.mark.parametrize("seed", range(3))
def test_healthy_engines_raise_no_alarm(tmp_path: Path, seed: int) -> None:
    configuration = random_configuration(seed)
    finding = examine_healthy(tmp_path, configuration)
    assert not finding.caught, (configuration, finding)


@pytest.mark.slow
def test_200_healthy_engines_raise_no_alarm(tmp_path: Path) -> None:
    alarms = []
    for seed in range(200):
        configuration = random_configuration(seed)
        finding = examine_healthy(tmp_path / str(seed), configuration)
        alarms += [(configuration, finding)] if finding.caught else []
    assert not alarms


@pytest.mark.parametrize(("kind", "weights"), [("llama", "q8"), ("gemma3", "q4")])
def test_packed_weights_raise_no_alarm_and_hide_no_fault(tmp_path: Path, kind: str, weights: str) -> None:
    lab = Lab(write_checkpoint(tmp_path, kind), weights=weights)
    assert lab.model().packings and not examine(lab, healthy).caught
    for name in ("position-off-by-one-everywhere", "kv-heads-tiled", "bits-reinterpreted"):
        assert_named(lab, name)


@pytest.mark.parametrize("name", SOME_MUTANTS)
def test_changes_that_it_was_not_written_for_are_caught(labs: dict[str, Lab], name: str) -> None:
    assert score(labs["llama"], MUTANTS[name]).finding.caught


@pytest.mark.slow
def test_the_score_on_unknown_mutants_is_what_the_page_says(labs: dict[str, Lab]) -> None:
    scores = [score(labs["llama"], mutant) for mutant in MUTANTS.values()]
    caught, sensible = sum(s.finding.caught for s in scores), sum(s.is_sensible for s in scores)
    page = (Path(__file__).parents[2] / "docs" / "traps.md").read_text(encoding="utf-8")
    assert f"{caught} of {len(scores)} caught, {sensible} of {len(scores)} sensibly named" in page


@pytest.mark.slow
def test_all_faults_are_named_on_smollm2() -> None:
    report = inject(Lab(resolve("smollm2-135m")), list(TRAPS.values()))
    assert report.ok, [(i.trap.name, i.finding) for i in report.injections if not i.ok] or report.healthy
    assert len(report.injections) == len(TRAPS)


def test_the_examination_learns_nothing_of_what_was_injected() -> None:
    """It is handed a function, and its modules know no fault."""
    import ast

    folder = Path(__file__).parents[2] / "kvine" / "evidence" / "traps"
    faults = {"attention_faults", "cache_faults", "catalogue", "seams", "inject", "stories"}
    for name in ("examine", "symptoms", "reads", "writes", "scene", "textbook", "probes", "bench", "kinds"):
        tree = ast.parse((folder / f"{name}.py").read_text())
        modules = {
            node.module.split(".")[-1] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
        }
        assert not modules & faults, name


def test_a_healthy_report_is_wrong_where_the_name_is(labs: dict[str, Lab]) -> None:
    """The command fails if a fault is called by another one's name."""
    from dataclasses import replace

    trap = replace(TRAPS["position-stuck-at-0"], fault=TRAPS["position-stuck-at-1"].fault)
    report = inject(labs["llama"], [trap])
    assert not report.ok and report.injections[0].finding.caught
    unharmed = inject(labs["llama"], [replace(trap, fault=lambda parts: parts)])
    assert not unharmed.ok and not unharmed.injections[0].finding.caught
    assert not unharmed.healthy.caught
