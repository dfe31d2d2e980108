"""Draws what a search found: the objective over each searched setting, and parallel coordinates."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from launch.console.configuration import Value
from launch.display.drawing import COLOURS, FAINT, INK, POINT, style
from launch.search.outcome import WHOLE, Point, TrialResult
from launch.search.space import LOG, Axis, show_point

OBJECTIVE = "held-out combined reward"


def draw_objective(points: Sequence[Point], axes: Sequence[Axis], apart: bool = False) -> Figure:
    """Draws the objective over each searched setting: a dot per trial, and over listed values means with intervals.

    A line joins points that differ in that setting alone, of which several have a colour each.

    Args:
        points: of all trials. One that was stopped early is a cross; only complete points have a mean.
        axes: what was searched, a panel each.
        apart: draw no means, as under PBT, where clones are no independent trials.
    """
    figure = Figure(figsize=(max(4.6 * len(axes), 6.0), 4.3), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
    for panel, axis in zip(panels, axes, strict=True):
        style(panel, "", "")
        panel.set_xlabel(axis.key, fontsize=10, color=INK)
        lines = _lines(points, axis, axes)
        told_apart = 1 < len(lines) <= len(COLOURS)
        for number, line in enumerate(lines):
            colour = COLOURS[number if told_apart else 0]
            label = show_point({key: value for key, value in line[0].values.items() if key != axis.key})
            for trial in [trial for point in line for trial in point.trials if trial.combined_reward is not None]:
                shape: dict[str, Any] = {"marker": "o", "s": 16} if trial.status in WHOLE else {"marker": "x", "s": 22}
                x = _position(axis, trial.values[axis.key])
                panel.scatter([x], [trial.combined_reward], color=colour, alpha=0.45, linewidths=1, **shape)
            if axis.scale is None and not apart and len(lines) <= len(COLOURS):
                _means(panel, [point for point in line if point.complete], axis, colour, label)
            elif told_apart:
                panel.scatter([], [], s=16, color=colour, label=label)
        if axis.scale is None:
            panel.set_xticks(range(len(axis.values)), [axis.label(value) for value in axis.values])
            panel.set_xlim(-0.5, len(axis.values) - 0.5)
        elif axis.scale == LOG:
            panel.set_xscale("log")
        if told_apart:
            panel.legend(fontsize=8, labelcolor=INK, frameon=False)
    panels[0].set_ylabel(OBJECTIVE, fontsize=10, color=INK)
    note = ("" if apart else "line: mean over seeds, 95 % interval · ") + "dot: a trial · cross: stopped early"
    figure.suptitle(note, fontsize=9, color=INK, x=0.01, ha="left")
    return figure


def _lines(points: Sequence[Point], axis: Axis, axes: Sequence[Axis]) -> list[list[Point]]:
    """Groups points so that those of a group differ in one setting alone."""
    lines: dict[str, list[Point]] = {}
    for point in points:
        others = {key: value for key, value in point.values.items() if key != axis.key}
        lines.setdefault(repr(others), []).append(point)
    return list(lines.values())


def _means(panel: Axes, points: Sequence[Point], axis: Axis, colour: str, label: str) -> None:
    found = sorted(
        (_position(axis, point.values[axis.key]), estimate)
        for point in points
        if (estimate := point.estimate("combined_reward")) is not None
    )
    panel.errorbar(
        [x for x, _ in found],
        [estimate.mean for _, estimate in found],
        yerr=[0.0 if estimate.low is None else estimate.mean - estimate.low for _, estimate in found],
        color=colour,
        label=label,
        linewidth=1.8,
        capsize=4,
        **POINT,
        zorder=3,
    )


def draw_parallel(trials: Sequence[TrialResult], axes: Sequence[Axis]) -> Figure:
    """Draws a line per trial through its values and its objective, which colours it.

    Args:
        trials: all. Those that failed or were stopped early are thin.
        axes: what was searched, an upright each.
    """
    known = [(trial.combined_reward, trial) for trial in trials if trial.combined_reward is not None]
    figure = Figure(figsize=(max(2.6 * (len(axes) + 1), 6.0), 4.3), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    panel.set_axis_off()
    worth = [combined for combined, _ in known]
    low, high = (min(worth), max(worth)) if worth else (0.0, 1.0)
    span = Normalize(low, high if high > low else low + 1e-9)
    colours = colormaps["viridis"]
    for upright, axis in enumerate(axes):
        _upright(panel, upright, axis.key, {axis.label(value): _height(axis, value) for value in axis.values})
    _upright(panel, len(axes), OBJECTIVE, {f"{low:+.3f}": 0.0, f"{high:+.3f}": 1.0}, right=True)
    for combined, trial in sorted(known, key=lambda pair: pair[0]):
        share = float(span(combined))
        heights = [*(_height(axis, trial.values[axis.key]) for axis in axes), share]
        width = 2.0 if trial.status in WHOLE else 0.7
        panel.plot(range(len(heights)), heights, color=colours(share), linewidth=width, alpha=0.8)
    panel.set_xlim(-0.4, len(axes) + 0.5)
    panel.set_ylim(-0.12, 1.15)
    return figure


def _upright(panel: Axes, x: int, title: str, labels: Mapping[str, float], right: bool = False) -> None:
    panel.plot([x, x], [0, 1], color=FAINT, linewidth=1.2, zorder=0)
    panel.text(x, 1.08, title, ha="center", fontsize=9, color=INK, fontweight="bold")
    for text, height in labels.items():
        beside, side = (x + 0.04, "left") if right else (x - 0.04, "right")
        panel.text(beside, height, text, ha=side, va="center", fontsize=8, color=INK)


def _position(axis: Axis, value: Value) -> float:
    """Returns where a value stands: listed ones each as far from the next."""
    return float(axis.values.index(value)) if axis.scale is None else cast(float, value)


def _height(axis: Axis, value: Value) -> float:
    """Returns where a value stands between 0 and 1."""
    if axis.scale is None:
        return _position(axis, value) / max(len(axis.values) - 1, 1)
    numbers = np.array([*axis.ends, value], dtype=float)
    low, high, here = np.log(numbers) if axis.scale == LOG else numbers
    return float((here - low) / (high - low))
