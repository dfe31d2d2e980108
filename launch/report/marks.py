"""What plots are drawn with, beside what curves.py has: bands, bars, dots and means."""

import math
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes

from launch.display.drawing import FAINTLY, POINT
from launch.evaluation.intervals import Estimate
from launch.report.series import Series, drawn_interval

SPARE = 0.35
"""Share of a panel by which intervals may widen it to either side; those of few seeds could fill any."""


def band(panel: Axes, series: Series, colour: str) -> None:
    """Draws the interval of a line."""
    panel.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)


def bars(panel: Axes, series: Series, colour: str) -> None:
    """Draws the intervals of points."""
    panel.vlines(series.x, series.low, series.high, color=colour, linewidth=1.2, alpha=0.7)


def dots(panel: Axes, x: Sequence[float], y: Sequence[float], colour: str) -> None:
    """Draws single runs."""
    panel.plot(x, y, linestyle="", marker="o", markersize=4, color=colour, alpha=FAINTLY, markeredgewidth=0)


def mean_in_plane(panel: Axes, x: Estimate, y: Estimate, colour: str) -> None:
    """Draws a mean in the plane, with the interval of each coordinate that is of enough seeds."""
    panel.plot(drawn_interval(x), [y.mean] * 2, color=colour, linewidth=1.2, alpha=0.7)
    panel.plot([x.mean] * 2, drawn_interval(y), color=colour, linewidth=1.2, alpha=0.7)
    panel.plot([x.mean], [y.mean], color=colour, **{**POINT, "markersize": 8}, zorder=4)


def limit_to(panel: Axes, drawn: Iterable[Series]) -> None:
    """Fixes the height of a panel: all means, and intervals as far as they do not dwarf them."""
    panel.set_ylim(widened(panel.get_ylim(), (end for series in drawn for end in (*series.low, *series.high))))


def widened(limits: tuple[float, float], ends: Iterable[float]) -> tuple[float, float]:
    """Returns limits that hold the ends of intervals too, as far as `SPARE` allows; NaN is none."""
    low, high = limits
    known = [low, high, *(end for end in ends if not math.isnan(end))]
    spare = SPARE * (high - low)
    return max(low - spare, min(known)), min(high + spare, max(known))
