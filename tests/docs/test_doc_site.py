"""The site: it builds without a warning, needs no network, and has what it promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from doc_pages import ROOT, TRANSLATED, pages

FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=\"(?:https?:)?//|<link[^>]*rel=\"?(?:stylesheet|preconnect|icon)[^>]*//"
    r"|@import\s+(?:url\()?[\"']?(?:https?:)?//|url\([\"']?(?:https?:)?//"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_nothing_is_fetched_when_a_page_is_read(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    fetching = [
        f"{path.relative_to(site)}: {m[0]}" for path in files for m in FETCHED.finditer(path.read_text("utf-8"))
    ]
    assert not fetching, "\n".join(fetching)


def test_every_command_has_its_options_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "cli.html").read_text("utf-8")
    commands = ("generate", "chat", "pull", "models", "verify", "traps", "plan", "explain", "eval", "experiment cache")
    for words in commands:
        assert f"<code>kvine {words}</code>" in page
    assert "--sink-rule" in page


def test_the_public_names_are_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text("utf-8")
    for name in ("LLM", "Generation", "SamplingParams", "CacheConfig", "EngineConfig", "SteppedCache", "KvineError"):
        assert re.search(rf'id="kvine\.[\w.]*\.{name}"', page), name


def test_each_page_leads_to_the_other_language(site: Path) -> None:
    for page, there in (("tutorials/index.html", "../zh-TW/tutorials/index.html"), ("quiz.html", "zh-TW/quiz.html")):
        assert f'href="{there}" hreflang="zh-TW"' in (site / page).read_text("utf-8")
        assert (site / "zh-TW" / page).exists()


def test_every_page_is_in_the_navigation() -> None:
    def leaves(entry: object) -> list[str]:
        if isinstance(entry, dict):
            return [leaf for value in entry.values() for leaf in leaves(value)]
        return [leaf for value in entry for leaf in leaves(value)] if isinstance(entry, list) else [str(entry)]

    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    nav = leaves(yaml.safe_load(text)["nav"])
    docs = ROOT / "docs"
    there = {str(page.relative_to(docs)) for page in docs.rglob("*.md") if not page.name.endswith(".zh-TW.md")}
    assert there == set(nav)
    assert len(nav) == len(set(nav))


def test_what_teaches_is_there_in_both_languages() -> None:
    docs = ROOT / "docs"
    taught = [page for page in pages() if page.parent == docs / "tutorials" or page.name in ("index.md", "quiz.md")]
    assert len(taught) > 12
    assert not [str(page) for page in taught if not page.with_suffix(TRANSLATED).exists()]


def test_the_glossary_has_both_languages() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    rows = [line.strip("|").split("|") for line in text.splitlines() if re.match(r"\| \*\*", line)]
    assert len(rows) >= 60
    for term, chinese, meaning in rows:
        assert re.search(r"[A-Za-z]", term), term
        assert re.search(r"[\u4e00-\u9fff]", chinese), term
        english, _, mandarin = meaning.partition("<br>")
        assert re.search(r"[a-z]{3}", english) and re.search(r"[\u4e00-\u9fff]", mandarin), term
    assert [row[0].lower() for row in rows] == sorted(row[0].lower() for row in rows)


def test_each_question_of_the_quiz_is_answered_with_something_to_run() -> None:
    text = (ROOT / "docs" / "quiz.md").read_text("utf-8")
    questions = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    assert len(questions) >= 20
    for question in questions:
        assert question.count("\n??? ") == 1, question
        answer = question.partition("\n??? ")[2]
        assert re.search(r"^    ```(python|console)$", answer, re.MULTILINE), question
