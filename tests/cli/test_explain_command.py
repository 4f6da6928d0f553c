"""`kvine explain` as it is typed: tables of 80 columns, one JSON object, and a sentence for every mistake."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Kvine
from rich.cells import cell_len
from rich.console import Console
from tiny_model import CONTEXT, HEAD_DIM, KV_HEADS, LAYERS, VOCABULARY

from kvine import LLM, CacheConfig
from kvine.cli.explain import MOST_BARS, explanation_view, toy_view
from kvine.hub import ModelSource
from kvine.toy import attend

PROMPT = "The cache [/b]"


@pytest.fixture
def explain(kvine: Kvine, tiny: Path) -> Kvine:
    return lambda *arguments, **more: kvine("explain", "-m", tiny, "--threads", 1, *arguments, **more)


def lines_at_80_columns(*view: object) -> list[str]:
    console = Console(width=80, highlight=False, force_terminal=False)
    with console.capture() as captured:
        for renderable in view:
            console.print(renderable)
    return captured.get().splitlines()


def test_json_is_one_object_with_everything(explain: Kvine):
    found = explain(PROMPT, "--steps", 2, "--layer", 1, "--head", 3, "--top", 4, "--json").json
    assert "".join(token["text"] for token in found["tokens"]) == PROMPT
    view = found["attention"]
    assert (view["layer"], view["head"], view["kv_head"], view["position"]) == (1, 3, 1, len(PROMPT) - 1)
    assert len(view["weights"]) == len(PROMPT) and sum(view["weights"]) == pytest.approx(1, abs=1e-6)
    assert found["groups"][0]["k_shape"] == [1, KV_HEADS, len(PROMPT), HEAD_DIM]
    assert len(found["candidates"]) == 4 and len(found["steps"]) == 2
    step = found["steps"][1]
    seen = len(PROMPT) + 2
    assert step["read"]["k_bytes"] == LAYERS * KV_HEADS * HEAD_DIM * 4 * seen
    assert step["cache_free"]["k"]["numbers"] == seen * step["computed"]["k"]["numbers"]


def test_tables_say_the_same(explain: Kvine):
    found = explain(PROMPT, "--steps", 1, "--json").json
    shown = explain(PROMPT, "--steps", 1)
    assert shown.code == 0 and shown.err == ""
    for token, weight in zip(found["tokens"], found["attention"]["weights"], strict=True):
        row = [
            line
            for line in shown.out.splitlines()
            if line.split()[:2] == [str(token["position"]), str(token["token_id"])]
        ]
        assert f"{weight:.4f}" in row[0] and repr(token["text"]) in row[0]
    assert "mean over all heads of all layers" in shown.out and f"Position {len(PROMPT)}: " in shown.out
    assert "Queries are not cached" in shown.out and "read K" in shown.out


def test_the_cache_options_are_those_of_the_run(explain: Kvine):
    options = ("--window", 6, "--sinks", 2, "--kv-dtype", "fp16", "--block-size", 2, "--steps", 1)
    found = explain("abcdefghijklmno", *options, "--json").json
    assert found["attention"]["visible"] == [True] * 2 + [False] * 7 + [True] * 6
    assert found["groups"][0]["stored_as"] == "fp16"
    assert found["steps"][0]["read"]["k_bytes"] == LAYERS * KV_HEADS * HEAD_DIM * 2 * 8
    assert explain("abcdefghijklmno", *options).out.count("not seen") == 7


def test_a_chat_and_stdin(explain: Kvine):
    tokens = explain("--chat", "Hi", "--steps", 0, "--json").json["tokens"]
    assert [(t["text"], t["special"]) for t in tokens][:3] == [("<|user|>", True), ("H", False), ("i", False)]
    assert "<|user|> " in explain("--chat", "Hi", "--steps", 0).out, "without quotes"
    found = explain("-", "--steps", 0, "--json", stdin="from stdin").json
    assert "".join(token["text"] for token in found["tokens"]) == "from stdin"


def test_a_long_prompt_shows_its_heaviest_positions(explain: Kvine):
    prompt = "abcdefghij" * 6
    shown = explain(prompt, "--steps", 0)
    assert f"{60 - MOST_BARS} other positions have" in shown.out
    rows = [line for line in shown.out.splitlines() if "'" in line and "." in line]
    assert len(rows) >= MOST_BARS


def test_80_columns_are_enough_whatever_the_tokens_are(tiny: Path):
    llm = LLM(ModelSource("tiny", tiny, "safetensors", None), dtype="fp32", threads=1, cache=CacheConfig(window=6))
    explanation = llm.explain("xyz", steps=1)
    texts = ("我咬了一口蘋果，很甜，可是太貴了", "\x1b[31m\n\t[bold]x[/nothing]", "w" * 100)
    tokens = [replace(t, text=text) for t, text in zip(explanation.tokens, texts, strict=True)]
    candidates = tuple(replace(c, text=texts[i % 3]) for i, c in enumerate(explanation.candidates))
    explanation = replace(explanation, tokens=tuple(tokens), candidates=candidates)
    lines = lines_at_80_columns(*explanation_view(explanation))
    assert max(map(cell_len, lines)) <= 80
    shown = "\n".join(lines)
    assert "'我咬了一口蘋果" in shown and r"'\x1b[31m\n\t[bold]" in shown and "\x1b" not in shown and "…" in shown
    rows = lines[lines.index(next(line for line in lines if "weight" in line)) + 1 :][:3]
    weights = [f"{weight:.4f}" for weight in explanation.attention().weights]
    starts = {cell_len(row[: row.index(weight)]) for row, weight in zip(rows, weights, strict=True)}
    assert len(starts) == 1, "columns stay aligned"
    assert max(map(cell_len, lines_at_80_columns(*toy_view(attend())))) <= 80


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((PROMPT, "--layer", 99), f"layers 0 to {LAYERS - 1}, and no layer 99"),
        ((PROMPT, "--head", 99), "no query head 99"),
        ((PROMPT, "--steps", -1), "steps is -1"),
        ((PROMPT, "--top", 0), "top is 0"),
        (("",), "The prompt has no tokens"),
        ((), "Give a prompt"),
        (("x" * CONTEXT,), f"do not fit the model's context of {CONTEXT}"),
        ((PROMPT, "--kv-memory", "1KiB"), "Raise kv_memory"),
        ((PROMPT, "--position", 1), "give --toy as well"),
        ((PROMPT, "--toy"), "leave out the prompt"),
        (("--toy", "--layer", 0), "leave out the prompt"),
        (("--toy", "--position", 4), "positions 0 to 3"),
        (("--toy", "--q-scale", "nan"), "out of range"),
    ],
)
def test_a_mistake_is_one_sentence(explain: Kvine, arguments: tuple[object, ...], sentence: str):
    ended = explain(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("Error: ") and ended.err.count("\n") == 1 and sentence in ended.err


def test_the_toy(kvine: Kvine):
    found = kvine("explain", "--toy", "--position", 1, "--q-scale", 0, "--json").json
    assert found["weights"] == [0.5, 0.5, 0, 0] and {"scores", "scaled", "output"} <= found.keys()
    found = kvine("explain", "--toy", "--position", 1, "--q-scale", 0, "--mask", "off", "--json").json
    assert found["weights"] == [0.25] * 4
    shown = kvine("explain", "--toy", "--position", 2)
    assert shown.code == 0 and shown.out.count("█") > 3 and "−∞" in shown.out and "output = " in shown.out
    assert kvine("explain", "--toy", "--mask", "maybe").code == 2


def test_the_toy_shows_at_once_what_a_mask_hides(kvine: Kvine):
    assert kvine("explain", "--toy").out == kvine("explain", "--toy", "--position", 2).out
    assert kvine("explain", "--toy", "--json").json["masked"].count(None) == 1


def test_the_toy_does_not_wait_for_torch():
    code = "import sys; sys.argv[1:] = ['explain', '--toy']; from kvine.cli.app import app; app(standalone_mode=False)"
    code += "; sys.exit('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and "output = " in ended.stdout, ended.stderr


def test_special_tokens_have_their_names(tiny: Path):
    llm = LLM(ModelSource("tiny", tiny, "safetensors", None), dtype="fp32", threads=1)
    lines = lines_at_80_columns(*explanation_view(llm.explain([VOCABULARY["<|end|>"], VOCABULARY["Ċ"]], steps=0)))
    assert any("<|end|> " in line and "'<|end|>'" not in line for line in lines)
    assert any(r"'\n'" in line for line in lines)
