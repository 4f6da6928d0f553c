"""Plots: real pictures in files, the same for the same figures, and every mistake said before any work."""

from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree

import pytest

from kvine.errors import ConfigError
from kvine.evidence.plots import check_plot, plot


def draw(path: Path) -> Path:
    with plot(path, title="Two panels", panels=2) as (left, right):
        left.plot([1, 2, 3], [1, 4, 9], label="square")
        left.legend()
        right.bar(["a", "b"], [1, 2])
    return path


def test_both_formats_are_what_their_names_say(tmp_path: Path) -> None:
    assert draw(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert ElementTree.parse(draw(tmp_path / "a.SVG")).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_the_same_figures_give_the_same_file(tmp_path: Path) -> None:
    assert draw(tmp_path / "a.svg").read_bytes() == draw(tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    ("name", "said"), [("plot.pdf", ".svg or .png"), ("plot", ".svg or .png"), ("none/plot.svg", "does not exist")]
)
def test_a_name_that_cannot_work_is_refused_before_any_work(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_plot(tmp_path / name)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "plot.svg").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        check_plot(tmp_path / "plot.svg")


def test_without_matplotlib_it_is_said_how_to_get_it(tmp_path: Path) -> None:
    with patch("importlib.util.find_spec", return_value=None), pytest.raises(ConfigError, match=r"kvine\[plot\]"):
        check_plot(tmp_path / "plot.svg")


def test_nothing_is_left_behind_where_drawing_fails(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    with pytest.raises(ZeroDivisionError), plot(path, title="Fails"):
        raise ZeroDivisionError
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device")
    with patch.object(Path, "write_bytes", side_effect=full), pytest.raises(ConfigError, match="No space left"):
        draw(tmp_path / "plot.svg")
