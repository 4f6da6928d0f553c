"""The pages in Traditional Chinese say what the English ones do, with the same code, written as in Taiwan."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from doc_pages import FENCE, ROOT, TRANSLATED, blocks, title, translations

DOCS = ROOT / "docs"
TRANSLATIONS = translations()
PAGES = [page for page in TRANSLATIONS if page.is_relative_to(DOCS)]
CHINESE = [*TRANSLATIONS, DOCS / "glossary.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`[^`]+`")
HAN = r"[\u3400-\u9fff]"

# Words of mainland China that a conversion by character would leave, and those for which the glossary has another.
OTHER_WORDS = {
    "緩存": "快取",
    "內存": "記憶體",
    "帶寬": "頻寬",
    "信息": "資訊",
    "默認": "預設",
    "缺省": "預設",
    "網絡": "網路",
    "軟件": "軟體",
    "硬件": "硬體",
    "字節": "位元組",
    "字符": "字元",
    "變量": "變數",
    "數組": "陣列",
    "隊列": "佇列",
    "哈希": "雜湊",
    "令牌": "詞元",
    "代碼": "程式碼",
    "運行": "執行",
    "調用": "呼叫",
    "打印": "印出",
    "加載": "載入",
    "線程": "執行緒",
    "進程": "行程",
    "服務器": "伺服器",
    "鏈接": "連結",
    "硬盤": "硬碟",
    "算子": "運算子",
    "掩碼": "遮罩",
    "窗口": "視窗",
    "支持": "支援",
    "用戶": "使用者",
    "數據": "資料",
    "文件夾": "資料夾",
    "分叉": "分岔",
    "填補": "填充",
    "抽樣": "取樣",
    "歸一化": "正規化",
}
# Big5 has these too, as variants or by chance; nobody in Taiwan writes them in a text like this.
SIMPLIFIED_IN_BIG5 = frozenset(
    "万与么价优体儿党划厂后听圣坏异怀怜惊扑扰据机构柜气洁确离种网胜腊虫蜡触适着爲説裏衆綫麽啓"
)


def original(page: Path) -> Path:
    return page.with_name(page.name.removesuffix(TRANSLATED) + ".md")


def outside_of_blocks(page: Path) -> str:
    """A page without its fenced blocks."""
    kept, inside = [], False
    for line in page.read_text("utf-8").splitlines():
        if FENCE.match(line) or (inside and line.strip() == "```"):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def prose(page: Path) -> str:
    """What a reader reads: no markup, no addresses; `x` stands for code."""
    text = re.sub(r"<!--.*?-->|<[^>]+>", " ", outside_of_blocks(page), flags=re.DOTALL)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", CODE.sub("`x`", text)).replace("*", "")


def headings(page: Path) -> list[str]:
    return re.findall(r"^(#+) ", outside_of_blocks(page), re.MULTILINE)


def links(page: Path) -> Counter[str]:
    return Counter(LINK.findall(outside_of_blocks(page)))


def codes(page: Path) -> set[str]:
    return {re.sub(r"\s+", " ", code) for code in CODE.findall(outside_of_blocks(page))}


def test_every_lesson_is_there_in_both_languages() -> None:
    tutorials = [page for page in (DOCS / "tutorials").glob("*.md") if not page.name.endswith(TRANSLATED)]
    wanted = [*tutorials, DOCS / "index.md", DOCS / "quiz.md", DOCS / "misconceptions.md"]
    assert len(tutorials) >= 13
    assert [title(page) for page in wanted if not page.with_suffix(TRANSLATED).exists()] == []


def test_every_title_of_the_navigation_is_translated() -> None:
    def titles(entry: Any) -> set[str]:
        if isinstance(entry, dict):
            return set(entry) | {title for value in entry.values() for title in titles(value)}
        return {title for value in entry for title in titles(value)} if isinstance(entry, list) else set()

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    languages = next(plugin["i18n"]["languages"] for plugin in config["plugins"] if "i18n" in plugin)
    chinese = next(language["nav_translations"] for language in languages if language["locale"] == "zh-TW")
    assert set(chinese) == titles(config["nav"])


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_its_code_and_output_are_the_originals_to_the_byte(page: Path) -> None:
    ours, theirs = ([(b.language, b.text, b.marks) for b in blocks(p)] for p in (page, original(page)))
    assert ours == theirs


@pytest.mark.parametrize("page", TRANSLATIONS, ids=title)
def test_its_headings_have_the_originals_levels(page: Path) -> None:
    assert headings(page) == headings(original(page))


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_it_leads_where_the_original_leads(page: Path) -> None:
    assert links(page) == links(original(page))


@pytest.mark.parametrize("page", TRANSLATIONS, ids=title)
def test_its_links_resolve(page: Path) -> None:
    files = {target.partition("#")[0] for target in links(page) if not target.startswith(("http", "#"))}
    assert [target for target in files if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", TRANSLATIONS, ids=title)
def test_it_names_the_same_code(page: Path) -> None:
    """Each `name` of one language's prose is in the other's."""
    assert codes(page) == codes(original(page))


@pytest.mark.parametrize("page", TRANSLATIONS, ids=title)
def test_its_tables_have_the_originals_rows(page: Path) -> None:
    rows = [len(re.findall(r"^\|", outside_of_blocks(p), re.MULTILINE)) for p in (page, original(page))]
    assert rows[0] == rows[1]


def test_the_quiz_asks_as_many_questions() -> None:
    counts = [
        len(re.findall(r"^\?\?\? ", outside_of_blocks(DOCS / name), re.MULTILINE))
        for name in ("quiz.md", "quiz.zh-TW.md")
    ]
    assert counts[0] == counts[1] >= 20


def not_traditional(text: str) -> set[str]:
    """Characters that Taiwan does not write: those that Big5 has not got, and a few that it has."""
    return {c for c in re.findall(HAN, text) if c in SIMPLIFIED_IN_BIG5 or not c.encode("cp950", errors="ignore")}


@pytest.mark.parametrize("page", CHINESE, ids=title)
def test_its_characters_are_traditional(page: Path) -> None:
    assert not_traditional(page.read_text("utf-8")) == set()


@pytest.mark.parametrize("page", CHINESE, ids=title)
def test_its_words_are_those_of_taiwan_and_of_the_glossary(page: Path) -> None:
    text = prose(page)
    assert {word: better for word, better in OTHER_WORDS.items() if word in text} == {}


@pytest.mark.parametrize("page", CHINESE, ids=title)
def test_its_punctuation_is_full_width_and_latin_stands_apart(page: Path) -> None:
    text = prose(page)
    narrow = re.findall(rf".?{HAN}[,;:!?()].?|.?[,;:!?(]{HAN}.?|.?{HAN}\.(?:\s|$)", text)
    crowded = re.findall(rf".?{HAN}[A-Za-z0-9`].?|.?[A-Za-z0-9`%]{HAN}.?", text)
    assert narrow == []
    assert crowded == []


def test_lessons_call_things_as_the_glossary_does() -> None:
    """**中文**（english), where a term is first explained, is the glossary's row; so that one thing has one name."""
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \|", (DOCS / "glossary.md").read_text("utf-8"), re.MULTILINE)
    glossary = {english.lower(): re.sub("[（）]", "", chinese) for english, chinese in rows}
    introduced = [
        (glossary.get(english, glossary.get(english.removesuffix("s"))), chinese)
        for page in (DOCS / "tutorials").glob(f"*{TRANSLATED}")
        for chinese, english in re.findall(r"\*\*([^*]+)\*\*（([\w -]+)", page.read_text("utf-8").lower())
    ]
    known = [(row, chinese) for row, chinese in introduced if row is not None]
    assert len(known) >= 30
    assert [(row, chinese) for row, chinese in known if chinese not in row.lower()] == []


def test_simplified_characters_are_told_from_shared_ones() -> None:
    simplified, shared = set("缓内带宽显网络说这为时间语词过后体机"), set("位元組的記憶體裡只有一個值公里台干系余面")
    assert not_traditional("".join(simplified | shared)) == simplified
