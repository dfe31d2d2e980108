"""Plots, panels with a legend: drawn by matplotlib, as SVG in a page or as a picture for a paper."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from launch.display.drawing import AVERAGING_DASHES, EXCHANGE_DASHES, INK, POINT_STYLE, TRAINING_ALPHA, save_figure

WIDTH, HEIGHT = 4.6, 3.1
"""Inches of a panel."""
LEFT, RIGHT, BOTTOM, TOP = 0.78, 0.13, 0.5, 0.35
"""Inches around the axes of a panel."""
LEGEND_LINE = 0.24
"""Inches of a line of the legend."""
PANELS_PER_ROW = 3
"""Panels side by side."""
LEGEND_STYLES: dict[str, dict[str, Any]] = {
    "training": {"linewidth": 1.1, "alpha": TRAINING_ALPHA},
    "held out": {"linewidth": 1.8, **POINT_STYLE},
    "exchange": {"linewidth": 1.2, "linestyle": EXCHANGE_DASHES},
    "averaging": {"linewidth": 1.2, "linestyle": AVERAGING_DASHES, "alpha": TRAINING_ALPHA},
    "series": {"linewidth": 2.2},
}
"""How a legend shows what a plot holds."""
_RC = {"svg.fonttype": "none", "svg.hashsalt": "cory", "text.parse_math": False}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    draw: Callable[[Axes], None]
    says: str
    """What it shows, for a reader who does not see it."""


@dataclass(frozen=True)
class LegendEntry:
    """An entry of a legend."""

    label: str
    colour: str
    kind: str = "series"


@dataclass(frozen=True)
class Plot:
    """Panels that share a legend."""

    name: str
    """Of its picture."""
    title: str
    note: str
    panels: Sequence[Panel]
    legend: Sequence[LegendEntry] = ()
    height: float = HEIGHT
    """Inches of a panel."""

    def svg(self) -> Markup:
        """Returns it as an element of an HTML page."""
        text = io.StringIO()
        with matplotlib.rc_context(_RC):
            self._draw(0.0).savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
        return Markup(text.getvalue()[text.getvalue().index("<svg") :])  # without the head of a file

    def save(self, file: Path) -> None:
        """Draws it, with its title, in the format that the file's ending names; replaces the file if it exists."""
        with matplotlib.rc_context(_RC):
            figure = self._draw(LEGEND_LINE)
            figure.suptitle(self.title, fontsize=12, color=INK, x=0.01, ha="left", fontweight="bold")
            save_figure(figure, file)

    def _draw(self, above: float) -> Figure:
        """Returns the figure, with so many inches above it. A layout engine would take three times as long."""
        columns = min(len(self.panels), PANELS_PER_ROW)
        rows = math.ceil(len(self.panels) / columns)
        letters = max((len(key.label) for key in self.legend), default=0)
        keys_in_line = max(1, int(13 * WIDTH * columns / (letters + 8)))
        below = LEGEND_LINE * math.ceil(len(self.legend) / keys_in_line)
        width, height = WIDTH * columns, self.height * rows + above + below
        figure = Figure(figsize=(width, height), dpi=200)
        FigureCanvasAgg(figure)
        figure.subplots_adjust(
            left=LEFT / width,
            right=1 - RIGHT / width,
            bottom=(below + BOTTOM) / height,
            top=1 - (above + TOP) / height,
            wspace=(LEFT + RIGHT) / (WIDTH - LEFT - RIGHT),
            hspace=(BOTTOM + TOP) / (self.height - BOTTOM - TOP),
        )
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for panel, drawn in zip(self.panels, axes, strict=False):
            panel.draw(drawn)
        for empty in axes[len(self.panels) :]:
            empty.set_axis_off()
        handles = [Line2D([], [], color=key.colour, label=key.label, **LEGEND_STYLES[key.kind]) for key in self.legend]
        if handles:
            options: dict[str, Any] = {"frameon": False, "fontsize": 9, "labelcolor": INK}
            figure.legend(handles=handles, loc="lower left", ncols=keys_in_line, **options)
        return figure
