"""Draws what a search found: the objective over each searched setting, and parallel coordinates."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from launch.console.configuration import Value
from launch.display.curves import COLOURS, FAINT, INK, POINT
from launch.evaluation.statistics import interval
from launch.search.outcome import WHOLE, Row
from launch.search.space import LOG, Axis, show_value

OBJECTIVE = "held-out combined reward"


def draw_objective(rows: Sequence[Row], axes: Sequence[Axis], file: Path, apart: bool = False) -> None:
    """Draws the objective over each searched setting: a dot per trial, and over listed values means with intervals.

    Args:
        rows: of all trials. One that was stopped early is a cross.
        axes: what was searched, a panel each.
        file: where to; replaced if it exists.
        apart: draw no means, as under PBT, where clones are no independent trials.
    """
    figure = Figure(figsize=(max(4.6 * len(axes), 6.0), 4.3), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
    for panel, axis in zip(panels, axes, strict=True):
        _style(panel)
        panel.set_xlabel(axis.key, fontsize=10, color=INK)
        places = _places(axis)
        for row in rows:
            if row.combined_reward is not None:
                ended = row.status in WHOLE
                shape: dict[str, Any] = {"marker": "o", "s": 16} if ended else {"marker": "x", "s": 22}
                x = places[show_value(row.values[axis.key])] if places else row.values[axis.key]
                panel.scatter([x], [row.combined_reward], color=COLOURS[0], alpha=0.45, linewidths=1, **shape)
        if places:
            _means(panel, [] if apart else rows, axis, places)
            panel.set_xticks(list(places.values()), list(places))
            panel.set_xlim(-0.5, len(places) - 0.5)
        elif axis.scale == LOG:
            panel.set_xscale("log")
    panels[0].set_ylabel(OBJECTIVE, fontsize=10, color=INK)
    note = ("" if apart else "line: mean, 95 % interval · ") + "dot: a trial · cross: stopped early"
    figure.suptitle(note, fontsize=9, color=INK, x=0.01, ha="left")
    figure.savefig(file, facecolor="white")


def _means(panel: Axes, rows: Sequence[Row], axis: Axis, places: Mapping[str, float]) -> None:
    x, means, low, high = [], [], [], []
    for label, place in places.items():
        found = [
            row.combined_reward
            for row in rows
            if show_value(row.values[axis.key]) == label and row.status in WHOLE and row.combined_reward is not None
        ]
        if found:
            mean = float(np.mean(found))
            ends = interval(found) or (mean, mean)
            x.append(place)
            means.append(mean)
            low.append(mean - ends[0])
            high.append(ends[1] - mean)
    panel.errorbar(x, means, yerr=[low, high], color=COLOURS[0], linewidth=1.8, capsize=4, **POINT, zorder=3)


def draw_parallel(rows: Sequence[Row], axes: Sequence[Axis], file: Path) -> None:
    """Draws a line per trial through its values and its objective, which colours it.

    Args:
        rows: of all trials. Those that failed or were stopped early are thin.
        axes: what was searched, an upright each.
        file: where to; replaced if it exists.
    """
    known = [row for row in rows if row.combined_reward is not None]
    figure = Figure(figsize=(max(2.6 * (len(axes) + 1), 6.0), 4.3), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    panel.set_axis_off()
    worth = [row.combined_reward for row in known if row.combined_reward is not None]
    low, high = (min(worth), max(worth)) if worth else (0.0, 1.0)
    span = Normalize(low, high if high > low else low + 1e-9)
    colours = colormaps["viridis"]
    for upright, axis in enumerate(axes):
        _upright(panel, upright, axis.key, {show_value(value): _height(axis, value) for value in axis.values})
    _upright(panel, len(axes), OBJECTIVE, {f"{low:+.3f}": 0.0, f"{high:+.3f}": 1.0}, right=True)
    for row in sorted(known, key=lambda row: row.combined_reward or 0.0):
        share = float(span(row.combined_reward or 0.0))
        heights = [*(_height(axis, row.values[axis.key]) for axis in axes), share]
        width = 2.0 if row.status in WHOLE else 0.7
        panel.plot(range(len(heights)), heights, color=colours(share), linewidth=width, alpha=0.8)
    panel.set_xlim(-0.4, len(axes) + 0.5)
    panel.set_ylim(-0.12, 1.15)
    figure.savefig(file, facecolor="white")


def _upright(panel: Axes, x: int, title: str, labels: Mapping[str, float], right: bool = False) -> None:
    panel.plot([x, x], [0, 1], color=FAINT, linewidth=1.2, zorder=0)
    panel.text(x, 1.08, title, ha="center", fontsize=9, color=INK, fontweight="bold")
    for text, height in labels.items():
        place, side = (x + 0.04, "left") if right else (x - 0.04, "right")
        panel.text(place, height, text, ha=side, va="center", fontsize=8, color=INK)


def _places(axis: Axis) -> dict[str, float]:
    """Where listed values stand, each as far from the next; none of a range."""
    return {} if axis.scale is not None else {show_value(value): float(i) for i, value in enumerate(axis.values)}


def _height(axis: Axis, value: Value) -> float:
    """Returns where a value stands between 0 and 1."""
    places = _places(axis)
    if places:
        return places[show_value(value)] / max(len(places) - 1, 1)
    numbers = np.array([*axis.ends, value], dtype=float)
    low, high, here = np.log(numbers) if axis.scale == LOG else numbers
    return float((here - low) / (high - low))


def _style(panel: Axes) -> None:
    panel.tick_params(labelsize=9, colors=INK, length=3)
    panel.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(FAINT)
