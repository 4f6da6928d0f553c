"""What `kvine traps` and docs/traps.md show is what the code and the recorded samples are."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import typer
from typer.testing import CliRunner, Result

from kvine.cli.app import Commands
from kvine.cli.traps import traps
from kvine.evidence.traps.catalogue import TRAPS
from kvine.evidence.traps.kinds import KINDS
from kvine.evidence.traps.page import FILE, render
from kvine.evidence.traps.places import kind_named
from kvine.evidence.traps.samples import load_samples
from kvine.evidence.traps.stories import STORIES

ROOT = Path(__file__).parents[2]
# Faults of which the point is that the text alone does not show them, at least not in 32 tokens.
SILENT = {"position-off-by-one-everywhere", "cache-narrower-than-intended"}


def run(*arguments: str) -> Result:
    app = typer.Typer(cls=Commands)
    app.command()(traps)
    app.callback()(lambda: None)  # a group, as `kvine` is
    return CliRunner().invoke(app, ["traps", *arguments])


def without_indentation(code: str) -> str:
    return "\n".join(line.strip() for line in code.splitlines())


def test_the_page_is_what_the_generator_writes() -> None:
    assert FILE.read_text(encoding="utf-8") == render(), "run `python -m kvine.evidence.traps.page`"


@pytest.mark.parametrize("name", TRAPS)
def test_the_right_code_is_the_engines(name: str) -> None:
    trap = TRAPS[name]
    source = (ROOT / trap.file).read_text(encoding="utf-8")
    assert without_indentation(trap.right) in without_indentation(source)


def test_every_trap_has_a_sample_of_its_own() -> None:
    samples = load_samples()
    assert samples.keys() == TRAPS.keys()
    for name, sample in samples.items():
        story = STORIES[TRAPS[name].story]
        assert (sample.what, sample.prompt) == (story.what, story.prompt)
        if name not in SILENT:
            assert sample.broken != sample.healthy, name


def test_the_list_names_all_without_loading_a_model() -> None:
    listed = json.loads(run("--json").stdout)["traps"]
    assert [trap["name"] for trap in listed] == list(TRAPS)
    assert all(trap["wrong_code"] and trap["symptom"] and trap["right_code"] for trap in listed)
    shown = run()
    assert shown.exit_code == 0 and "kv-heads-tiled" in shown.stdout


def test_one_trap_is_shown_with_wrong_and_right_code() -> None:
    shown = run("kv-heads-tiled")
    assert shown.exit_code == 0
    assert "x.repeat(" in shown.stdout and "repeat_interleave" in shown.stdout and "healthy" in shown.stdout


@pytest.mark.parametrize("name", TRAPS)
def test_no_code_is_cropped_at_80_columns(name: str) -> None:
    with patch("kvine.cli.terminal.PIPED_WIDTH", 80):
        shown = run(name).stdout.splitlines()
    assert max(map(len, shown)) <= 80
    printed = "".join("".join(line.strip("│").split()) for line in shown)
    for line in (*TRAPS[name].wrong.splitlines(), *TRAPS[name].right.splitlines()):
        assert "".join(line.split()) in printed, line


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_that_an_examination_names_is_explained(name: str) -> None:
    shown = run(name)
    assert shown.exit_code == 0, shown.stderr
    assert "Where to look" in shown.stdout and all(str(place) in shown.stdout for place in kind_named(name).places)
    (kind,) = json.loads(run(name, "--json").stdout)["kinds"]
    assert kind["name"] == name and kind["meaning"] == KINDS[name] and kind["places"]


def test_a_misspelt_name_gets_the_nearest() -> None:
    assert "Did you mean values-misaligned?" in run("value-misaligned").stderr
    assert "Did you mean kv-heads-tiled?" in run("kv-head-tiled").stderr


def test_a_name_that_there_is_not_is_a_users_mistake() -> None:
    result = run("no-such-trap")
    assert result.exit_code == 2 and "There is no trap named 'no-such-trap'" in result.stderr
