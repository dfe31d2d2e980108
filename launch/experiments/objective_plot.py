"""Draws what a search found: the objective over each searched setting."""

from collections.abc import Sequence
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from launch.console.configuration import Value
from launch.display.drawing import COLOURS, INK, POINT, style
from launch.experiments.outcome import WHOLE, Point
from launch.experiments.space import LOG, Axis, show_point

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
        lines = _lines(points, axis)
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


def _lines(points: Sequence[Point], axis: Axis) -> list[list[Point]]:
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


def _position(axis: Axis, value: Value) -> float:
    """Returns where a value stands: listed ones each as far from the next."""
    return float(axis.values.index(value)) if axis.scale is None else cast(float, value)
