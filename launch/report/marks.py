"""What plots are drawn with, beside what curves.py has: bands, bars, dots, and labels at the ends of lines."""

import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes

from launch.display.curves import FAINTLY, POINT
from launch.report.series import Series, drawn_interval
from launch.study.measures import Estimate

SPARE = 0.35
"""Share of a panel by which intervals may widen it to either side; those of few seeds could fill any."""
APART = 0.085
"""Share of a panel's height between two labels."""


def band(panel: Axes, series: Series, colour: str) -> None:
    """Draws the interval of a line."""
    panel.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)


def bars(panel: Axes, series: Series, colour: str) -> None:
    """Draws the intervals of points."""
    panel.vlines(series.x, series.low, series.high, color=colour, linewidth=1.2, alpha=0.7)


def dots(panel: Axes, x: Sequence[float], y: Sequence[float], colour: str) -> None:
    """Draws single runs."""
    panel.plot(x, y, linestyle="", marker="o", markersize=4, color=colour, alpha=FAINTLY, markeredgewidth=0)


def place(panel: Axes, x: Estimate, y: Estimate, colour: str) -> None:
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


def label_ends(panel: Axes, lines: Mapping[str, Series], colours: Mapping[str, str]) -> None:
    """Writes beside its last point what each line is, moved up or down where two labels would meet."""
    low, high = panel.get_ylim()
    ends = {
        label: (series.x[-1], (series.mean[-1] - low) / (high - low))
        for label, series in lines.items()
        if series.x and not math.isnan(series.mean[-1])
    }
    places = spread([height for _, height in ends.values()])
    for (label, (x, _)), place in zip(ends.items(), places, strict=True):
        panel.annotate(
            label,
            (x, place),
            (7, 0),
            xycoords=panel.get_xaxis_transform(),
            textcoords="offset points",
            color=colours[label],
            fontsize=9,
            va="center",
            annotation_clip=False,
        )


def spread(heights: Sequence[float]) -> list[float]:
    """Moves heights apart, to `APART` at least, each no further than that takes."""
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    groups: list[list[int]] = []
    for place in order:
        groups.append([place])
        while len(groups) > 1 and _middle(groups[-1], heights) - _middle(groups[-2], heights) < (
            APART * (len(groups[-1]) + len(groups[-2])) / 2
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = list(heights)
    for group in groups:
        for rank, place in enumerate(group):
            moved[place] = _middle(group, heights) + APART * (rank - (len(group) - 1) / 2)
    return moved


def _middle(group: Sequence[int], heights: Sequence[float]) -> float:
    return sum(heights[place] for place in group) / len(group)
