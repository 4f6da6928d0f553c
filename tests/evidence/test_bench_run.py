"""A whole bench on a tiny model, Kvine beside the transformers of this Python, each in its own process."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tiny_models import write_checkpoint, write_tokenizer

from kvine.errors import ConfigError, ContextLengthError, KvineError
from kvine.evidence.bench.machine import Machine
from kvine.evidence.bench.picture import _draw_times, draw_bench
from kvine.evidence.bench.players import Peer
from kvine.evidence.bench.report import Bench
from kvine.evidence.bench.run import run_bench
from kvine.evidence.bench.settings import WHAT, Settings, prompts_for
from kvine.hub import ModelSource
from kvine.text.tokenizer import load_tokenizer

SETTINGS = Settings(repeats=1, tokens=4, batches=(1, 3), context=40, dtype="fp32", device="cpu", threads=1)
MACHINE = Machine("a slow one", 1, 1e6, 1e9, "fp32")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("tiny")
    write_tokenizer(folder)
    return write_checkpoint(folder, "llama")


@pytest.fixture(autouse=True)
def quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvine.evidence.bench.run.measure_machine", lambda dtype, device, threads: MACHINE)


@pytest.fixture(scope="module")
def outcome(source: ModelSource) -> Bench:
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvine.evidence.bench.run.measure_machine", lambda dtype, device, threads: MACHINE)
        bench = run_bench(source, SETTINGS, [Peer("transformers"), Peer("vllm")], tell=told.append)
    assert [text.split(",")[0] for text in told] == ["vllm: not installed"]
    return bench


def test_each_figure_is_there_for_each_engine(outcome: Bench) -> None:
    expected = [
        ("ready", 0, 1),
        ("prefill", 40, 1),
        ("decode", 7, 1),
        ("decode", 40, 1),
        ("batch", 7, 1),
        ("batch", 7, 3),
        ("prefix_hit", 40, 1),
        ("peak_memory", 40, 1),
    ]
    for engine in ("kvine", "transformers"):
        rows = [row for row in outcome.rows if row.engine == engine]
        assert [(row.what, row.context, row.batch) for row in rows] == expected
        assert all(row.low <= row.value <= row.high and row.value > 0 and row.weights == "fp32" for row in rows)
        assert all((row.floor is None) == (row.what == "ready") for row in rows)
        assert all((row.kvine_ratio is None) == (engine == "kvine") for row in rows)
    ours, theirs = (row for row in outcome.rows if row.what == "prefill")
    assert theirs.kvine_ratio == ours.value / theirs.value


def test_floors_follow_from_the_machine(outcome: Bench) -> None:
    decode = next(row for row in outcome.rows if row.what == "decode" and row.context == 40)
    linear = 3 * (64 * (4 + 2 + 2 + 4) * 16 + 3 * 64 * 128)
    weights = 4 * (linear + 131 * 64) + 4 * 64 * 7  # what is multiplied, and norms
    kv = 3 * 2 * 16 * 2 * 4  # of a token
    assert decode.floor == pytest.approx((weights + 42 * kv) / MACHINE.read_bytes_per_s * 1e3)
    assert decode.bound == "read" and decode.share == decode.floor / decode.value
    memory = next(row for row in outcome.rows if row.what == "peak_memory")
    assert memory.floor == weights + 4 * 131 * 64 + 40 * kv


def test_both_write_the_same(outcome: Bench) -> None:
    kvine, transformers = outcome.entrants
    assert (kvine.name, kvine.same_tokens, transformers.name, transformers.same_tokens) == (
        "kvine",
        None,
        "transformers",
        16,
    )


def test_the_cache_is_compared_with_doing_without(outcome: Bench) -> None:
    free = outcome.cache_free
    assert free is not None and free.context == 40 and free.speedup == free.cache_free_ms / free.cached_ms > 0


def test_it_is_drawn(outcome: Bench, tmp_path: Path) -> None:
    draw_bench(outcome, tmp_path / "bench.svg")
    assert "<svg" in (tmp_path / "bench.svg").read_text()


def test_times_are_points_with_lines_from_their_floors(outcome: Bench) -> None:
    """A bar on a logarithmic axis would be as long as the axis happens to have it."""
    panel = Figure().subplots()
    rows = [row for row in outcome.rows if row.what in ("ready", "prefill", "decode", "prefix_hit")]
    _draw_times(panel, rows, {"kvine": "tab:blue", "transformers": "tab:orange"})
    assert not panel.patches and panel.get_xscale() == "log"
    drawn = [(line.get_marker(), [float(x) for x in line.get_xdata()]) for line in panel.get_lines()]
    to_ms = [1e3 if row.unit == "s" else 1.0 for row in rows]
    assert [x for marker, x in drawn if marker == "o"] == [[r.value * ms] for r, ms in zip(rows, to_ms, strict=True)]
    for row, ms in zip(rows, to_ms, strict=True):
        assert row.floor is None or ("None", [row.floor * ms, row.value * ms]) in drawn


@pytest.mark.parametrize("kept", [("decode",), ("batch",)])
def test_a_picture_has_panels_only_for_what_was_measured(kept: tuple[str, ...], outcome: Bench, tmp_path: Path) -> None:
    rows = tuple(row for row in outcome.rows if row.what in kept)
    assert rows
    draw_bench(replace(outcome, rows=rows), tmp_path / "bench.svg")
    assert (tmp_path / "bench.svg").read_text().count('<g id="axes_') == 1


def test_prompts_fit_the_model(source: ModelSource) -> None:
    tokenizer = load_tokenizer(source)
    prompts = prompts_for(tokenizer, Settings(tokens=64), 512)
    assert len(prompts.long) == 512 - 64 and prompts.was_cut and len(prompts.short) == 7
    assert len(prompts_for(tokenizer, Settings(context=100), 512).long) == 100
    several = prompts.several(64)
    assert len({tuple(ids) for ids in several}) == 64 and all(ids[1:] == prompts.short[1:] for ids in several)
    with pytest.raises(ContextLengthError, match="fewer --tokens"):
        prompts_for(tokenizer, Settings(tokens=510), 512)


def test_mistakes_are_sentences(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KvineError, match="weights 'q3' is unknown"):
        run_bench(source, Settings(what=("decode",), device="cpu", weights="q3"))
    monkeypatch.setattr("kvine.evidence.bench.run.planned_device", lambda name: "cuda")
    with pytest.raises(ConfigError, match="on the CPU only"):
        run_bench(source, Settings(), [Peer("vllm")])
    assert set(Settings().what) == set(WHAT)
