"""Pictures in files: what every plot needs, whichever command draws it. matplotlib is imported only here, and late.

A command calls `check_plot` before it begins to measure: minutes of work must not end in a folder that is missing.
"""

import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png")
PANEL_INCHES = (5.2, 3.8)  # width and height of one panel


def check_plot(path: Path) -> None:
    """Whether a plot can be written there, as far as that can be known before.

    Raises:
        ConfigError: for a name that ends in neither .svg nor .png, a folder that is missing, or no matplotlib.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"{path} is no name for a plot: end it in {' or '.join(FORMATS)}.")
    if not path.parent.is_dir():
        raise ConfigError(f"The folder {path.parent} does not exist: make it first, or write the plot elsewhere.")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name a file for the plot.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("Plots need matplotlib: pip install 'kvine[plot]'.")


@contextmanager
def plot(path: Path, *, title: str, panels: int = 1) -> Iterator[list["Axes"]]:
    """Panels side by side to draw on; written to `path` when the block ends, in whole or not at all.

    Args:
        path: ends in .svg or .png.
        title: above all panels.
        panels: how many.

    Raises:
        ConfigError: as `check_plot` does, and if the file cannot be written.
    """
    check_plot(path)
    import matplotlib
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {"svg.hashsalt": "kvine", "font.size": 9, "legend.frameon": False}
    settings |= {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    with matplotlib.rc_context(settings):  # the same figures give the same file
        figure = Figure((PANEL_INCHES[0] * panels, PANEL_INCHES[1]), layout="constrained", dpi=150)
        figure.suptitle(title)
        axes = figure.subplots(1, panels, squeeze=False)[0]
        yield list(axes)
        picture, kind = io.BytesIO(), path.suffix.lower()[1:]
        figure.savefig(picture, format=kind, metadata={"Date": None} if kind == "svg" else None)
    try:
        path.write_bytes(picture.getvalue())
    except OSError as error:
        raise ConfigError(f"The plot cannot be written to {path}: {error.strerror}.") from error
