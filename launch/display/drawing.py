"""Drawing primitives of plots: colours, axes, lines, points, intervals, and saving a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    import pandas as pd

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
"""The colour-blind safe palette of Okabe and Ito."""
INK, FAINT, GRID = "#333333", "#b8b8b8", "#e6e6e6"
FORMATS = tuple(FigureCanvasAgg.get_supported_filetypes())
"""Supported image file suffixes."""
TRAINING_ALPHA = 0.45
EXCHANGE_DASHES: Any = (0, (2, 2))
"""Line style of a role exchange."""
AVERAGING_DASHES: Any = (0, (1, 2))
"""Line style of a weight averaging."""
POINT_STYLE: dict[str, Any] = {"marker": "o", "markersize": 6, "markeredgecolor": "white", "markeredgewidth": 1.2}


def save_figure(figure: Figure, file: Path) -> None:
    """Writes a figure atomically; the file's suffix chooses the format, and an existing file is replaced."""
    temporary = file.with_name(f".{file.stem}.new{file.suffix}")
    figure.savefig(temporary, facecolor="white")
    temporary.replace(file)


def draw_training(panel: Axes, x: Sequence[float], y: Sequence[float], colour: str, faint: bool = True) -> None:
    """Draws a training metric, which has a value per update; faint if evaluations are drawn over it."""
    line_style: dict[str, Any] = {"linewidth": 1.1, "alpha": TRAINING_ALPHA} if faint else {"linewidth": 1.6}
    panel.plot(x, y, color=colour, marker="." if len(x) < 3 else None, **line_style)


def style_panel(panel: Axes, title: str, unit: str, xlabel: str = "update") -> None:
    """Sets a panel's title, labels and grid."""
    panel.set_title(title, loc="left", fontsize=11, color=INK)
    panel.set_ylabel(unit, fontsize=9, color=INK)
    panel.set_xlabel(xlabel, fontsize=9, color=INK)
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=xlabel == "update"))
    panel.tick_params(labelsize=9, colors=INK, length=3)
    panel.grid(axis="y", color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(FAINT)


def choose_colours(count: int) -> list[str]:
    """Returns a colour per series."""
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def draw_band(panel: Axes, means: "pd.DataFrame", colour: str) -> None:
    """Draws the intervals of a line as a band."""
    panel.fill_between(means.index, means["low"], means["high"], color=colour, alpha=0.15, linewidth=0)


def draw_bars(panel: Axes, means: "pd.DataFrame", colour: str) -> None:
    """Draws the intervals of points as vertical bars."""
    panel.vlines(means.index, means["low"], means["high"], color=colour, linewidth=1.2, alpha=0.7)
