"""`kvine eval` as it is typed: JSON, tables, plots, refusals and exit codes on a tiny model whose context is 96."""

from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
from tiny_model import CONTEXT, LAYERS, kv_bytes

POLICIES = "window=16; window=16,sinks=4,sink-rule=in-cache; kv-dtype=fp16"
NAMES = ["exact", "window=16", "window=16,sinks=4,sink-rule=in_cache", "kv-dtype=fp16"]
SHORT = ("--policies", POLICIES, "--tokens", 90, "--decode-steps", 3)


@pytest.fixture
def evaluate(kvine, tiny: Path):
    return lambda *options: kvine("eval", tiny, "--threads", 1, *options)


def test_json(evaluate) -> None:
    told = evaluate(*SHORT, "--json").json
    assert set(told) == {
        *("model", "dtype", "packings", "device", "context", "stride", "text_tokens", "policies", "refused"),
    }
    assert (told["dtype"], told["device"], told["packings"]) == ("fp32", "cpu", {})
    assert (told["context"], told["stride"], told["text_tokens"]) == (90, 90, 90)
    assert [one["name"] for one in told["policies"]] == NAMES
    for one in told["policies"]:
        assert {"name", "bytes", "ms", "perplexity", "kl", "top1", "mass_lost", "peak_bytes", "options"} <= set(one)
        assert one["tokens"] == 89 and one["ms"] > 0 and one["endless_perplexity"] is None
        assert one["peak_bytes"] >= one["bytes"] > 0 and len(one["mass_lost_by_layer"]) == LAYERS
    exact, window, sinks, half = told["policies"]
    assert len(exact["backends"]) == 1 and exact["backends"] == window["backends"]
    assert (exact["kl"], exact["top1"], exact["mass_lost"], exact["perplexity_increase"]) == (0, 1, 0, 0)
    assert exact["bytes"] == kv_bytes(89) and half["bytes"] == exact["bytes"] // 2
    assert window["kl"] > half["kl"] > 0 and window["mass_lost"] > sinks["mass_lost"] > half["mass_lost"] == 0
    assert "bytes" in window["non_dominated"] or "bytes" in half["non_dominated"]
    assert sinks["options"] == {
        "kv_dtype": "exact",
        "window": 16,
        "sinks": 4,
        "sink_rule": "in_cache",
        "global_tokens": [],
        "block_size": 32,
    }


def test_a_table(evaluate) -> None:
    said = " ".join(evaluate(*SHORT).out.split())
    for words in ("policy perplexity", "mass lost", "window=16, sinks=4, sink-rule=in_cache", "90 tokens, in one go"):
        assert words in said
    assert "endless" not in said


def test_a_text_longer_than_the_context_is_cut_and_what_has_no_end_goes_on(evaluate, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April. " * 8)
    ended = evaluate("--text", text, "--policies", POLICIES, "--context", 40, "--json")
    told = ended.json
    assert told["text_tokens"] == 280 and told["context"] == 40
    endless = [one["endless_perplexity"] for one in told["policies"]]
    assert endless[2] > 1 and endless[:2] == [None, None] and endless[3] is None
    said = evaluate("--text", text, "--policies", POLICIES).out
    assert f"{CONTEXT} at a time" in " ".join(said.split()) and "endless: perplexity of the whole text" in said


def test_what_is_refused_is_said_first_and_the_rest_is_measured(evaluate) -> None:
    ended = evaluate("--policies", "window=16; sinks=4; kv-dtype=int3", "--tokens", 40, "--json")
    assert [one["name"] for one in ended.json["policies"]] == ["exact", "window=16"]
    assert [one["name"] for one in ended.json["refused"]] == ["sinks=4", "kv-dtype=int3"]
    assert "Refused: sinks=4: Sinks need a window" in ended.err
    assert ended.err.index("Refused: kv-dtype=int3") < (ended.err + "reading by").index("reading by")


def test_a_sweep(evaluate) -> None:
    told = evaluate("--sweep", "--tokens", 64, "--json").json
    windows = {one["options"]["window"] for one in told["policies"]}
    assert windows == {None, 32, 16, 8} and len(told["policies"]) >= 9


def test_needles_and_streams(evaluate, tmp_path: Path) -> None:
    more = ("--needle", "--needle-lengths", "90", "--needle-depths", "0,100", "--streaming", "--streaming-window", 8)
    with patch("kvine.evidence.quality.needle.find_needles.__kwdefaults__", _with_facts()):
        told = evaluate(*SHORT, *more, "--json").json
        said = " ".join(evaluate(*SHORT, *more, "--plot", tmp_path / "e.svg").out.split())
    assert [(cell["policy"], cell["length"], cell["depth"]) for cell in told["needle"]] == [
        (name, 90, depth) for name in NAMES for depth in (0, 100)
    ]
    assert all(cell["facts"] == 1 and cell["loglik"] < 0 for cell in told["needle"])
    rows = told["streaming"]["rows"]
    assert rows[0]["name"] == "dense" and rows[-1]["name"] == "window computed anew"
    assert len(rows) == 6 and all(row["sampled_perplexity"] > 1 for row in rows)
    assert rows[-1]["perplexity"] is None and rows[0]["perplexity"] > 1
    for words in ("at 0 %", "at 100 %", "A fact hidden in other text: exact", "90 tokens in one go, at most 8 seen"):
        assert words in said
    assert "window computed anew" in _texts(tmp_path / "e-streaming.svg")


def _with_facts() -> dict[str, object]:
    from kvine.evidence.progress import silent
    from kvine.evidence.quality.needle import DEPTHS, LENGTHS, Fact

    return {"lengths": LENGTHS, "depths": DEPTHS, "facts": (Fact("It is", " b"),), "progress": silent}


def test_a_plot_names_every_policy_and_marks_the_best(evaluate, tmp_path: Path) -> None:
    evaluate(*SHORT, "--plot", tmp_path / "e.svg")
    texts = _texts(tmp_path / "e.svg")
    for words in ("exact", "window=16", "kv-dtype=fp16", "non-dominated", "MiB of K and V", "ms a decode step"):
        assert words in texts, words
    evaluate(*SHORT[:-1], 0, "--plot", tmp_path / "untimed.svg")
    assert "ms a decode step" not in _texts(tmp_path / "untimed.svg")


def _texts(path: Path) -> str:
    """A picture's words: matplotlib writes each as a comment beside its outlines."""
    root = ElementTree.parse(path, ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True)))
    return "\n".join(str(e.text) for e in root.iter() if e.tag is ElementTree.Comment)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policies", "width=3"), "choose among"),
        (("--policies", "sinks=4"), "No policy is left"),
        (("--policies", "exact", "--sweep"), "not both"),
        (("--text", "nowhere.txt"), "nowhere.txt cannot be read: No such file"),
        (("--text", "."), "cannot be read: Is a directory"),
        (("--tokens", "1"), "--tokens is 1"),
        (("--context", "1"), "--context is 1"),
        (("--context", str(CONTEXT + 1)), f"give 2 to {CONTEXT}"),
        (("--stride", "0"), "--stride is 0"),
        (("--stride", "200"), "--stride is 200"),
        (("--decode-steps", "-1"), "--decode-steps is -1"),
        (("--kv-memory", "lots"), "'lots' is not a size in bytes"),
        (("--kv-memory", "1KB"), "raise --kv-memory"),
        (("--needle-lengths", "a"), "is no list of numbers"),
        (("--needle-depths", "101"), "per cents from 0 to 100"),
        (("--needle",), "--needle-lengths"),
        (("--streaming",), "not far longer than a window of 256"),
        (("--streaming", "--streaming-window", "1"), "--streaming-window is 1"),
        (("--plot", "plot.pdf"), "end it in .svg or .png"),
        (("--backend", "magic"), "'magic' is unknown"),
    ],
)
def test_a_mistake_is_one_sentence_and_two(evaluate, options: tuple[str, ...], said: str) -> None:
    ended = evaluate("--tokens", 90, *options)
    assert ended.code == 2 and said in " ".join(ended.err.split()) and "Traceback" not in ended.err
    assert ended.out == ""


@pytest.mark.parametrize(("content", "said"), [(b"\xff\xfe\x00", "no text in UTF-8"), (b" \n", "is empty")])
def test_a_file_that_is_no_text_is_refused(evaluate, tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    ended = evaluate("--text", path)
    assert ended.code == 2 and said in " ".join(ended.err.split())


def test_a_text_of_one_token_is_refused(evaluate, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a")
    ended = evaluate("--text", path)
    assert ended.code == 2 and "too short" in ended.err


def test_ctrl_c_ends_with_130_and_leaves_no_plot(evaluate, tmp_path: Path) -> None:
    with patch("kvine.evidence.quality.scoring._read_piece", side_effect=KeyboardInterrupt):
        ended = evaluate(*SHORT, "--plot", tmp_path / "e.svg")
    assert ended.code == 130 and ended.out == "" and "Traceback" not in ended.err
    assert not (tmp_path / "e.svg").exists()
