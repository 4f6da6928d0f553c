"""`kvine experiment` as it is typed: JSON, tables, plots and exit codes of each command on a tiny model."""

from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvine.evidence.experiments.scenes import Scene
from kvine.evidence.experiments.trial import Outcome, Trial

GROWING = ("cache", "--grow", "both", "--prompt-sizes", "4,8", "--output-sizes", "2,4", "--repeats", "1")
WALLS = ("walls", "--batches", "1,3", "--contexts", "8,40", "--steps", "1")
WINDOW = ("window", "--window", "8", "--turns", "0", "--edge", "16")
MEANING = ("meaning", "--first", "an oak", "--second", "my old oak", "--word", "oak")
BITS = ("bits", "--tokens", "40", "--block-size", "8", "--bits", "4,2")
ENDLESS = ("endless", "--passage", "0", "--tokens", "150", "--window", "20", "--places", "3", "--piece", "40")
SHORT = (Scene("tiny", "Ruby is here.", "Hello.", "Who?", "It is", " Ruby"),)


@pytest.fixture
def experiment(kvine, tiny: Path):
    """Runs a command; scenes are short, for the model's context holds 96 characters, and no trial starts a process."""

    def run(command: str, *options: object):
        with ExitStack() as stack:
            stack.enter_context(default("window.run_window_experiment", scenes=SHORT))
            stack.enter_context(default("cache.run_cache_experiment", measure=no_process))
            return kvine("experiment", command, "-m", tiny, "--threads", 1, *options)

    return run


def default(function: str, **values: object) -> Any:
    """Other defaults for a function's keyword arguments, for a while."""
    module, name = function.split(".")
    target = getattr(import_module(f"kvine.evidence.experiments.{module}"), name)
    return patch.object(target, "__kwdefaults__", {**target.__kwdefaults__, **values})


def no_process(trial: Trial, on_token: Callable[[int], None]) -> Outcome:
    total = 90.0 if trial.path == "cache-free" else 30.0
    return Outcome(total, 20.0, 5.0, 1000, 3000, "fp32", "cpu", [1, 2])


@pytest.mark.parametrize("command", [GROWING, WALLS, WINDOW, MEANING, BITS, ENDLESS])
def test_weights_are_kept_as_asked(experiment, command: tuple[str, ...]) -> None:
    """All matrices but the two of `down`, whose rows are of 48 numbers."""
    packed = (*command, "--weights", "q8")
    assert experiment(*packed, "--json").json["packings"] == {"Q8_0": 13}
    assert "fp32 (Q8_0 weights) on cpu" in " ".join(experiment(*packed).out.split())
    assert experiment(*command, "--json").json["packings"] == {}


def test_a_trial_is_told_how_weights_are_kept(experiment) -> None:
    told = []

    def measure(trial: Trial, on_token: Callable[[int], None]) -> Outcome:
        told.append(trial.weights)
        return Outcome(90.0, 20.0, 5.0, 1000, 3000, "fp32", "cpu", [1, 2])

    with patch(f"{__name__}.no_process", measure):
        experiment("cache", "--repeats", 1, "--tokens", 2, "--weights", "q4", "--json")
    assert told == ["q4", "q4"]


def test_growing_curves_for_machines(experiment) -> None:
    report = experiment(*GROWING, "--json").json
    assert [(row["path"], row["logits"]) for row in report["rows"]] == [("cache-free", "all"), ("cached", "all")]
    assert {"total_ms", "prefill_ms", "decode_ms", "peak_bytes"} <= report["rows"][0].keys()
    assert report["speedup"] == report["rows"][0]["total_ms"] / report["rows"][1]["total_ms"]
    prompt, output = report["curves"]
    assert (prompt["grow"], prompt["fixed_tokens"], output["grow"], output["fixed_tokens"]) == (
        "prompt",
        5,
        "output",
        1,
    )
    point = output["points"][1]
    assert (point["path"], point["size"], point["length"]) == ("cache-free", 4, 4)
    assert point["step"]["pairs"] == 10 * report["heads"] and point["total"]["pairs"] == 20 * report["heads"]
    assert point["step"]["rectangle"] == 16 * report["heads"] and point["step"]["bytes"] > 0
    fits = {(fit["path"], fit["per"], fit["what"]): fit for fit in output["fits"]}
    assert len(fits) == 16 and fits["cache-free", "total", "time"]["theory"] == 3
    assert {"exponent", "r2", "low", "high"} <= fits["cached", "step", "pairs"].keys()
    assert report["balance"]["cached_bytes"] > 0


def test_growing_curves_for_people(experiment) -> None:
    shown = experiment(*GROWING).out
    assert "4 × 4 = 16 pairs without a cache, of which a mask leaves 10; with one it scores 1 × 4" in shown.replace(
        "\n", " "
    )
    assert "Exponents over 2 to 4 tokens" in shown and "theory" in shown


def test_walls_for_machines_and_people(experiment) -> None:
    report = experiment(*WALLS, "--json").json
    assert [(cell["batch"], cell["context"]) for cell in report["cells"]] == [(1, 8), (1, 40), (3, 8), (3, 40)]
    last = report["cells"][-1]
    assert last["kv_bytes"] == 3 * 41 * 2 * 2 * 2 * 8 * 4 and last["tokens_per_second"] == 3 / last["ms"] * 1e3
    assert [crossover["batch"] for crossover in report["crossovers"]] == [1, 3]
    shown = experiment(*WALLS).out
    assert "40 tokens" in shown and "tokens/s" in shown and f"K/V {last['kv_share']:.0%}" in shown


def test_window_for_machines_and_people(experiment) -> None:
    report = experiment(*WINDOW, "--json").json
    assert [row["visible_tokens"] for row in report["rows"][2:4]] == [8, 12] and len(report["rows"]) == 5
    assert all(0 < row["probability"] < 1 and row["scenes"][0]["rank"] >= 1 for row in report["rows"])
    assert [(edge["query"], edge["lost"]) for edge in report["edges"]] == [(15, []), (16, [0]), (19, []), (20, [4])]
    assert report["first_key"]["first_to_miss"] == 0 < report["first_key"]["last_to_see"]
    shown = experiment(*WINDOW).out
    assert "window and 4 sinks" in shown and "key 0" in shown and "Checked in the model" in shown


def test_meaning_for_machines_and_people(experiment) -> None:
    report = experiment(*MEANING, "--json").json
    assert [token["piece"] for token in report["tokens"]] == ["o", "a", "k"]
    assert [token["positions"] for token in report["tokens"]] == [[3, 7], [4, 8], [5, 9]]
    first, second = report["layers"]
    assert (
        first["key"]["relative"] < 1e-6 < second["key"]["relative"]
        and report["layers"] == report["tokens"][-1]["layers"]
    )
    shown = experiment(*MEANING).out
    assert "oak is 3 tokens" in shown and "█" in shown and "positions 5 and 9" in shown
    told = " ".join(shown.split())
    for name in ("K apart and V apart: how different", "1-cos: ", "rotated K: ", "others K and others V: "):
        assert name in told, "each column is explained"


def test_meaning_fits_80_columns(experiment) -> None:
    with patch("kvine.cli.terminal.PIPED_WIDTH", 80):
        shown = experiment(*MEANING).out.splitlines()
    assert max(map(len, shown)) <= 80 and not any("…" in line for line in shown)


def test_bits_for_machines_and_people(experiment, tmp_path: Path) -> None:
    report = experiment(*BITS, "--json").json
    assert (report["tokens"], report["block_size"]) == (40, 8)
    keys = [(row["part"], row["bits"], row["grouping"]) for row in report["rows"]]
    assert keys == [(p, b, g) for p in ("key", "value") for b in (4, 2) for g in ("channel", "token")]
    for row in report["rows"]:
        assert len(row["layers"]) == 2 and 0 < row["numbers"] < 1 and row["outputs"] > 0
        assert (row["scores"] is None) == (row["weights"] is None) == (row["part"] == "value")
    shown = " ".join(experiment(*BITS, "--layers").out.split())
    for words in ("keys 4 channel", "Errors of the outputs by layer", "Keys in 2 bits: by ", "Values in 4 bits: by "):
        assert words in shown
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April. " * 3)
    of_text = experiment(*BITS, "--text", text, "--json").json
    assert of_text["tokens"] == 40 and of_text["rows"] != report["rows"]


def test_endless_for_machines_and_people(experiment) -> None:
    report = experiment(*ENDLESS, "--json").json
    assert (report["tokens"], report["context"], report["piece_tokens"]) == (150, 96, 40)
    assert [row["name"] for row in report["rows"]] == ["window=20,sinks=4,sink-rule=in_cache", "window=24"]
    for row in report["rows"]:
        assert [piece["start"] for piece in row["pieces"]] == [0, 55, 110] and "ids" not in row
        assert all(piece["perplexity"] > 1 and piece["held"] <= row["planned_bytes"] for piece in row["pieces"])
    shown = " ".join(experiment(*ENDLESS).out.split())
    assert "150 tokens of one text; the model's context is 96" in shown and "It ends in: " in shown


@pytest.mark.parametrize(
    "command",
    [GROWING, WALLS, WINDOW, MEANING, BITS, ENDLESS, ("cache", "--prompt", "oak", "--tokens", "2", "--repeats", "1")],
    ids=lambda command: " ".join(command[:2]),
)
def test_every_experiment_draws(experiment, tmp_path: Path, command: tuple[str, ...]) -> None:
    path = tmp_path / "plot.svg"
    ended = experiment(*command, "--plot", path)
    assert ended.code == 0, ended.err
    assert b"</svg>" in path.read_bytes()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("cache", "--grow", "prompt", "--prompt", "oak"), "--prompt-sizes"),
        (("cache", "--grow", "prompt", "--logits", "both"), "--logits last"),
        (("cache", "--grow", "prompt", "--prompt-sizes", "4;8"), "list of numbers"),
        (("cache", "--grow", "output", "--output-sizes", "4,400"), "context is 96"),
        (("cache", "--plot", "x.pdf"), ".svg or .png"),
        (("walls", "--batches", "0"), "whole numbers from 1"),
        (("walls", "--contexts", "96"), "context of 96"),
        (("window", "--window", "90", "--turns", "0"), "lower window"),
        (("meaning", "--word", "elm"), "does not hold 'elm'"),
        (("bits", "--tokens", "200"), "fit the model's context of 96: lower --tokens"),
        (("bits", "--bits", "3"), "--bits takes 8, 4, 2"),
        (("bits", "--bits", "four"), "list of numbers"),
        (("bits", "--text", "nowhere.txt"), "nowhere.txt cannot be read"),
        (("endless", "--tokens", "100"), "no room for 12 parts of 512"),
        (("endless", "--seed", "-1", "--passage", "32", "--piece", "32", "--places", "2"), "seed must be"),
        (("endless", "--passage", "100"), "--piece is 512, and a turn writes 100 tokens"),
        (("meaning", "--plot", "nowhere/x.svg"), "does not exist"),
    ],
)
def test_a_users_mistake_is_a_sentence(experiment, options: tuple[str, ...], said: str) -> None:
    ended = experiment(*options)
    assert ended.code == 2 and ended.out == "" and said in ended.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--edge", 0), ("--edge", -3), ("--edge", 10**12), ("--window", 0), ("--turns", -1), ("--turns", 100_000)],
)
def test_what_no_window_can_be_is_refused_before_a_model_is_looked_for(kvine, option: str, value: int) -> None:
    ended = kvine("experiment", "window", "-m", "./nowhere", option, value)
    assert ended.code == 2 and ended.out == ""
    assert ended.err.startswith(f"Error: {option} is {value:,}, ") and ended.err.count("\n") == 1


def test_ctrl_c_ends_an_experiment_with_130_and_leaves_no_plot(experiment, tmp_path: Path) -> None:
    with patch("kvine.evidence.experiments.walls.time_step", side_effect=KeyboardInterrupt):
        ended = experiment(*WALLS, "--plot", tmp_path / "plot.svg")
    assert ended.code == 130 and ended.out == "" and "Traceback" not in ended.err
    assert not list(tmp_path.iterdir())
