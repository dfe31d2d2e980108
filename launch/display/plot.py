"""Plots, panels with a legend: drawn by matplotlib, as SVG in a page or as a picture for a paper."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from launch.display.drawing import AVERAGING, EXCHANGE, FAINTLY, INK, POINT, save

WIDTH, HEIGHT = 4.6, 3.1
"""Inches of a panel: at the width of a phone its letters are as large as the page's."""
ROW = 3
"""Panels side by side in a picture."""
KEYS: dict[str, dict[str, Any]] = {
    "training": {"linewidth": 1.1, "alpha": FAINTLY},
    "held out": {"linewidth": 1.8, **POINT},
    "exchange": {"linewidth": 1.2, "linestyle": EXCHANGE},
    "averaging": {"linewidth": 1.2, "linestyle": AVERAGING, "alpha": FAINTLY},
    "series": {"linewidth": 2.2},
}
"""How a legend shows what a plot holds."""
_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "cory", "text.parse_math": False}
_UNSAID = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    draw: Callable[[Axes], None]
    says: str
    """What it shows, for a reader who does not see it."""
    height: float = HEIGHT
    left: float = 0.78
    """Inches for what stands to the left of the axes."""

    def svg(self) -> Markup:
        """Returns it as an element of an HTML page."""
        figure = Figure(figsize=(WIDTH, self.height))
        figure.subplots_adjust(  # a layout engine would take three times as long
            left=self.left / WIDTH,
            right=1 - 0.13 / WIDTH,
            bottom=0.46 / self.height,
            top=1 - 0.3 / self.height,
        )
        with matplotlib.rc_context(_SETTINGS):
            self.draw(figure.subplots())
            return _as_element(figure)


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    label: str
    colour: str
    kind: str = "series"

    def svg(self) -> Markup:
        """Returns its sample as an element of an HTML page."""
        return _sample(self.colour, self.kind)


@dataclass(frozen=True)
class Plot:
    """Panels that share a legend."""

    name: str
    """Of its picture."""
    title: str
    note: str
    panels: Sequence[Panel]
    legend: Sequence[Key] = ()

    def save(self, file: Path) -> None:
        """Draws it into a file in the format that its ending names; replaces the file if it exists."""
        columns = min(len(self.panels), ROW)
        rows = math.ceil(len(self.panels) / columns)
        height = max(panel.height for panel in self.panels) * rows + 0.7
        with matplotlib.rc_context(_SETTINGS):
            figure = Figure(figsize=(WIDTH * columns, height), dpi=200, layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.subplots(rows, columns, squeeze=False).ravel()
            for panel, drawn in zip(self.panels, axes, strict=False):
                panel.draw(drawn)
            for empty in axes[len(self.panels) :]:
                empty.set_axis_off()
            figure.suptitle(self.title, fontsize=12, color=INK, x=0.01, ha="left", fontweight="bold")
            handles = [Line2D([], [], color=key.colour, label=key.label, **KEYS[key.kind]) for key in self.legend]
            if handles:
                widest = max(len(key.label) for key in self.legend)
                figure.legend(
                    handles=handles,
                    loc="outside lower left",
                    ncols=max(1, int(13 * WIDTH * columns / (widest + 8))),
                    frameon=False,
                    fontsize=9,
                    labelcolor=INK,
                )
            save(figure, file)


@lru_cache
def _sample(colour: str, kind: str) -> Markup:
    figure = Figure(figsize=(0.36, 0.17))
    figure.add_artist(Line2D([0.1, 0.5, 0.9], [0.5] * 3, color=colour, **KEYS[kind]))
    with matplotlib.rc_context(_SETTINGS):
        return _as_element(figure)


def _as_element(figure: Figure) -> Markup:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata=_UNSAID)
    return Markup(text.getvalue()[text.getvalue().index("<svg") :])  # without the head of a file
