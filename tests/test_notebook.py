"""HTML for notebooks: what is escaped, and how cells are written."""

from kvine.notebook import Html, bar, page, table


def test_everything_but_html_is_escaped() -> None:
    shown = page("a < b", table("<i>", ("<c>", "n"), [("<r>", "&"), (Html("<br>"), None)]), bar(0.5, "<1>"))
    assert "<p>a &lt; b</p>" in shown and "<caption>&lt;i&gt;</caption>" in shown
    assert '<th scope="col">&lt;c&gt;</th>' in shown and '<th scope="row">&lt;r&gt;</th><td>&amp;</td>' in shown
    assert '<th scope="row"><br></th><td></td>' in shown and "&lt;1&gt;<span" in shown


def test_numbers_are_aligned_and_written_for_people() -> None:
    shown = table("t", ("name", "count", "share"), [("a", 12345, 0.123456), ("b", None, 2.0)])
    assert '<th scope="col" class="number">count</th>' in shown
    assert '<td class="number">12,345</td><td class="number">0.1235</td>' in shown
    assert '<td class="number"></td><td class="number">2</td>' in shown


def test_a_bar_stays_within_its_width() -> None:
    assert [bar(share, "").rsplit("width:")[1].split("em")[0] for share in (-1, 0, 0.5, 7)] == [
        *("0.00", "0.00", "8.00", "16.00"),
    ]
