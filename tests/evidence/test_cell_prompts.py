"""Prompts of cells: built in, from files of lines, of JSON, and of recorded runs."""

import json
from pathlib import Path

import pytest

from kvine.errors import RequestError
from kvine.evidence.cells.prompts import TWO_BLOCKS, Source, built_in, encode, read_prompts


def encoder(prompt: str | list[int]) -> list[int]:
    return prompt if isinstance(prompt, list) else [ord(c) % 50 for c in prompt]


def test_built_in_prompts_are_what_they_are_called() -> None:
    prompts = {prompt.name: prompt for prompt in encode(built_in(quick=False), encoder)}
    assert len(prompts) == 8
    assert len(prompts["one token"].ids) == 1 and len(prompts["two blocks"].ids) == TWO_BLOCKS == 64
    assert {prompt.name for prompt in encode(built_in(quick=True), encoder)} < prompts.keys()


def test_prompts_of_which_a_tokenizer_makes_the_same_are_read_once() -> None:
    prompts = encode([Source("a", "x"), Source("b", [ord("x") % 50]), Source("c", "x", (1, 2))], encoder)
    assert [prompt.name for prompt in prompts] == ["a", "c"]


def test_lines_and_recorded_runs(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    run = {"model": "m", "text": "!", "prompt_ids": [3, 4], "token_ids": [5, 6]}
    path.write_text("Hello there\n\n" + json.dumps({"prompt": "{code"}) + "\n" + json.dumps(run) + "\n")
    assert read_prompts(path) == [
        Source("line 1", "Hello there"),
        Source("line 3", "{code"),
        Source("line 4", [3, 4], (5, 6)),
    ]
    path.write_text(json.dumps(run, indent=2))
    assert read_prompts(path) == [Source("run", [3, 4], (5, 6))]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no prompt"),
        ("a\n{no json", "line 2, begins like JSON"),
        ('{"text": "no prompt"}', "recorded prompt is"),
        ('{"prompt_ids": [1, "2"]}', "recorded prompt is"),
        ('{"prompt": "a", "token_ids": "b"}', "token_ids is a list"),
        (b"\xff\xfe", "UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused(tmp_path: Path, content: str | bytes | None, said: str) -> None:
    path = tmp_path / "prompts"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RequestError, match=said):
        read_prompts(path)


def test_a_prompt_that_the_model_cannot_read_is_named() -> None:
    def refuse(prompt: object) -> list[int]:
        raise RequestError("no tokens")

    with pytest.raises(RequestError, match="'line 7': no tokens"):
        encode([Source("line 7", "")], refuse)
