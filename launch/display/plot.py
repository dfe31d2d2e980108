"""Plots: panels that share a legend, drawn by matplotlib."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from launch.display.drawing import AVERAGING_DASHES, EXCHANGE_DASHES, INK, POINT_STYLE, TRAINING_ALPHA, save_figure

WIDTH, HEIGHT = 4.6, 3.1
"""Size of a panel, in inches."""
LEFT, RIGHT, BOTTOM, TOP = 0.78, 0.13, 0.5, 0.35
"""Margins around the axes of a panel, in inches."""
LEGEND_LINE = 0.24
"""Height of a line of the legend, in inches."""
PANELS_PER_ROW = 3
"""Maximum number of panels side by side."""
LEGEND_STYLES: dict[str, dict[str, Any]] = {
    "train": {"linewidth": 1.1, "alpha": TRAINING_ALPHA},
    "bare": {"linewidth": 1.8, **POINT_STYLE},
    "last": {"linewidth": 1.8, **POINT_STYLE, "marker": "D"},
    "exchange": {"linewidth": 1.2, "linestyle": EXCHANGE_DASHES},
    "averaging": {"linewidth": 1.2, "linestyle": AVERAGING_DASHES, "alpha": TRAINING_ALPHA},
    "series": {"linewidth": 2.2},
}
"""Line styles by kind of legend entry."""


@dataclass(frozen=True)
class LegendEntry:
    """An entry of a legend."""

    label: str
    colour: str
    kind: str = "series"

    def line(self, x: Sequence[float] = (), y: Sequence[float] = ()) -> Line2D:
        """Returns a line in the entry's style."""
        return Line2D(x, y, color=self.colour, label=self.label, **LEGEND_STYLES[self.kind])


@dataclass(frozen=True)
class Plot:
    """Panels that share a legend."""

    title: str
    panels: Sequence[Callable[[Axes], None]]
    """Each draws one pair of axes."""
    legend: Sequence[LegendEntry] = ()

    def save(self, file: Path) -> None:
        """Writes the plot with its title; the suffix chooses the format, and an existing file is replaced."""
        with matplotlib.rc_context({"text.parse_math": False}):
            figure = self._draw()
            figure.suptitle(self.title, fontsize=12, color=INK, x=0.01, ha="left", fontweight="bold")
            save_figure(figure, file)

    def _draw(self) -> Figure:
        """Draws the figure. The layout is computed here because a layout engine would take three times as long."""
        columns = min(len(self.panels), PANELS_PER_ROW)
        rows = math.ceil(len(self.panels) / columns)
        label_length = max((len(entry.label) for entry in self.legend), default=0)
        legend_columns = max(1, int(13 * WIDTH * columns / (label_length + 8)))
        legend_height = LEGEND_LINE * math.ceil(len(self.legend) / legend_columns)
        width, height = WIDTH * columns, HEIGHT * rows + LEGEND_LINE + legend_height
        figure = Figure(figsize=(width, height), dpi=200)
        FigureCanvasAgg(figure)
        figure.subplots_adjust(
            left=LEFT / width,
            right=1 - RIGHT / width,
            bottom=(legend_height + BOTTOM) / height,
            top=1 - (LEGEND_LINE + TOP) / height,
            wspace=(LEFT + RIGHT) / (WIDTH - LEFT - RIGHT),
            hspace=(BOTTOM + TOP) / (HEIGHT - BOTTOM - TOP),
        )
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for panel, panel_axes in zip(self.panels, axes, strict=False):
            panel(panel_axes)
        for unused_axes in axes[len(self.panels) :]:
            unused_axes.set_axis_off()
        if handles := [entry.line() for entry in self.legend]:
            options: dict[str, Any] = {"frameon": False, "fontsize": 9, "labelcolor": INK}
            figure.legend(handles=handles, loc="lower left", ncols=legend_columns, **options)
        return figure
