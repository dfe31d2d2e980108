"""Plots of a report: drawn by matplotlib, as SVG that takes a page's colours and fonts, or as PNG for a paper."""

import io
import math
import re
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

from launch.display.curves import COLOURS, EXCHANGE, FAINT, FAINTLY, GRID, INK, POINT

WIDTH, HEIGHT = 4.6, 3.1
"""Inches of a panel: at the width of a phone its letters are as large as the page's."""
LETTER = 0.085
"""Inches of a letter in a plot, about."""
ROW = 3
"""Panels side by side in a PNG."""
KEYS: dict[str, dict[str, Any]] = {
    "training": {"linewidth": 1.1, "alpha": FAINTLY},
    "held out": {"linewidth": 1.8, **POINT},
    "exchange": {"linewidth": 1.2, "linestyle": EXCHANGE},
    "series": {"linewidth": 2.2},
}
"""How a legend shows what a plot holds."""
_VARIABLES = {
    **{colour.lower(): f"var(--series-{place})" for place, colour in enumerate(COLOURS)},
    INK: "currentColor",
    FAINT: "var(--faint)",
    GRID: "var(--grid)",
    "#ffffff": "var(--paper)",
}
_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "cory", "text.parse_math": False}


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    draw: Callable[[Axes], None]
    says: str
    """What it shows, for a reader who does not see it."""
    height: float = HEIGHT
    left: float = 0.78
    """Inches for what stands to the left of the axes."""
    beside: int = 0
    """Letters that stand to their right."""

    def svg(self) -> Markup:
        """Returns it as an element of an HTML page."""
        figure = Figure(figsize=(WIDTH, self.height))
        figure.subplots_adjust(  # a layout engine would take three times as long
            left=self.left / WIDTH,
            right=1 - (0.13 + LETTER * self.beside) / WIDTH,
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
    """Of its PNG."""
    title: str
    note: str
    panels: Sequence[Panel]
    legend: Sequence[Key] = ()

    def save(self, folder: Path) -> Path:
        """Draws it into a PNG, and returns which."""
        columns = min(len(self.panels), ROW)
        rows = math.ceil(len(self.panels) / columns)
        height = max(panel.height for panel in self.panels) * rows + 0.7
        with matplotlib.rc_context(_SETTINGS):
            figure = Figure(figsize=(WIDTH * columns, height), dpi=200, layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.subplots(rows, columns, squeeze=False).ravel()
            for panel, place in zip(self.panels, axes, strict=False):
                panel.draw(place)
            for place in axes[len(self.panels) :]:
                place.set_axis_off()
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
            file = folder / f"{self.name}.png"
            beside = folder / f".{self.name}.new.png"
            figure.savefig(beside, facecolor="white")
            beside.replace(file)
        return file


@lru_cache
def _sample(colour: str, kind: str) -> Markup:
    figure = Figure(figsize=(0.36, 0.17))
    figure.add_artist(Line2D([0.1, 0.5, 0.9], [0.5] * 3, color=colour, **KEYS[kind]))
    with matplotlib.rc_context(_SETTINGS):
        return _as_element(figure)


def _as_element(figure: Figure) -> Markup:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return Markup(_for_page(text.getvalue()))


def _for_page(svg: str) -> str:
    """Takes from an SVG file what stands for itself alone: namespaces, ids, sizes, fonts and colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", r"<svg \1 aria-hidden='true'>", svg, count=1)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    return re.sub(r"<[^>]*>", lambda tag: _tag_for_page(tag[0]), svg)


def _tag_for_page(tag: str) -> str:
    tag = re.sub(r'<g id="[^"]*"', "<g", tag)
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    tag = re.sub(r"(\.\d\d)\d+", r"\1", tag)
    return re.sub("|".join(_VARIABLES), lambda found: _VARIABLES[found[0]], tag)
