"""Curves over updates, by policy, role or arm, with intervals over seeds."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes

from launch.display.drawing import (
    FAINT,
    INK,
    choose_colours,
    draw_band,
    draw_bars,
    draw_evaluations,
    draw_training,
    style_panel,
)
from launch.display.frame import MEAN, MIN_SEEDS, TOKEN_KL, Metrics, mean_over_seeds, metric_rows
from launch.display.plot import LEGEND_STYLES, LegendEntry, Panel, Plot
from launch.display.texts import algorithm_name
from launch.run_folder.records import Update
from policies.models.model_names import AVERAGE_POLICY
from policies.settings.settings import Settings

MetricPanel = tuple[str, str, str]
"""A metric, its heading and its unit."""
PANELS: tuple[MetricPanel, ...] = (
    ("task_reward", "Task reward", "per response"),
    ("kl", "KL to the initial policy", "nats per response"),
    ("combined_reward", "Combined reward", "task reward − {} · KL"),
)
OPTIONAL_METRICS = ("kl", TOKEN_KL, "thought_cut_rate")
"""Metrics without a panel if no run measured them: KL without a reference, thoughts without `thinking`."""
POINT_OFFSET = 0.012
"""Horizontal offset between the points of two curves at the same update, as a share of the panel's width, so that
their error bars do not overlap."""
COLLAPSE_LIMITS = {"repetition": "max_repetition", TOKEN_KL: "max_token_kl"}
"""By metric, the setting with the limit beyond which it is a sign of collapse, whatever its value before training."""
INTERVAL_NOTE = "Bands and bars: 95 % interval of the mean over seeds (Student's t), if there are at least three."


class EventMark(NamedTuple):
    """An event drawn as a vertical line after each update at which it happened."""

    event: str
    label: str
    colour: str
    kind: str


EVENT_MARKS = (
    EventMark("exchanged", "role exchange", FAINT, "exchange"),
    EventMark("averaged", "averaging", INK, "averaging"),
)


class Curve(NamedTuple):
    """The data of one curve: the metrics of a policy, of a role, or by default the mean of the policies."""

    metrics: Metrics
    policy: str = MEAN
    role: str = ""
    show_train: bool = True
    show_validation: bool = True

    def means(self, metric: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Returns the training and validation means by update (`frame.mean_over_seeds`), empty if there are none."""
        train, validation = (
            mean_over_seeds(self.metrics.get(split if show else "none", metric, self.policy, self.role))
            for split, show in (("train", self.show_train), ("validation", self.show_validation))
        )
        return train, validation


def policy_curves(name: str, title: str, note: str, metrics: Metrics, settings: Settings) -> Plot:
    """Plots each policy of one run, or of runs that differ only in their seed."""
    policy_ids = [*settings.policy_ids, *([AVERAGE_POLICY] if AVERAGE_POLICY in set(metrics.frame["policy"]) else [])]
    curves = {policy_id: Curve(metrics, policy_id, show_train=policy_id != AVERAGE_POLICY) for policy_id in policy_ids}
    return plot_over_updates(name, title, note, curves, [settings], events=metrics)


def plot_over_updates(
    name: str,
    title: str,
    note: str,
    curves: Mapping[str, Curve],
    settings: Sequence[Settings],
    metric_panels: Sequence[MetricPanel] = PANELS,
    events: Metrics | None = None,
) -> Plot:
    """Plots curves over updates, with a panel per metric.

    Args:
        name: The plot's file name, without suffix.
        title: The plot's title.
        note: The caption, without the sentence about intervals.
        curves: By label.
        settings: Settings of the plotted runs.
        metric_panels: The metrics to plot.
        events: Metrics of the runs whose role exchanges and weight averagings are marked; None: no marks.
    """
    colours = dict(zip(curves, choose_colours(len(curves)), strict=True))
    coefs = {run_settings.report_kl_coef for run_settings in settings}
    coef = f"{coefs.pop():g}" if len(coefs) == 1 else "η"
    event_updates = {} if events is None else {mark: _event_updates(events, mark.event) for mark in EVENT_MARKS}
    event_updates = {mark: updates for mark, updates in event_updates.items() if updates}
    panels, kinds = [], set()
    for metric, heading, unit in metric_panels:
        means = {label: curve.means(metric) for label, curve in curves.items()}
        last_values = []
        for label, (train, validation) in means.items():
            kinds |= {kind for kind, frame in (("training", train), ("held out", validation)) if not frame.empty}
            if len(last := (train if validation.empty else validation)["mean"].dropna()):  # NaN: without responses
                last_values.append(f"{label} ends at {last.iloc[-1]:.2f}")
        if metric in OPTIONAL_METRICS and not last_values:
            continue
        limit = None
        if metric in COLLAPSE_LIMITS:
            limit = max(getattr(run_settings, COLLAPSE_LIMITS[metric]) for run_settings in settings)
        draw = partial(_draw_panel, heading, unit.format(coef), means, colours, limit, event_updates)
        panels.append(Panel(draw, f"{heading}. {'; '.join(last_values)}"))
    legend = [LegendEntry(label, colour) for label, colour in colours.items()]
    if len(kinds) > 1:
        legend += [LegendEntry("training", INK, "training"), LegendEntry("held out, bare query", INK, "held out")]
    legend += [LegendEntry(mark.label, mark.colour, mark.kind) for mark in event_updates]
    return Plot(name, title, with_interval_note(note, [curve.metrics for curve in curves.values()]), panels, legend)


def _draw_panel(
    title: str,
    unit: str,
    means: Mapping[str, tuple[pd.DataFrame, pd.DataFrame]],
    colours: Mapping[str, str],
    limit: float | None,
    event_updates: Mapping[EventMark, Sequence[int]],
    panel: Axes,
) -> None:
    """Draws a panel.

    Args:
        title: The panel's title.
        unit: Label of the y axis.
        means: By label, the training and the validation means.
        colours: By label.
        limit: Height of the dashed horizontal line; None: no line.
        event_updates: The updates after which each event happened.
        panel: The axes to draw on.
    """
    style_panel(panel, title, unit)
    if limit is not None:
        panel.axhline(limit, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    for mark, updates in event_updates.items():
        for update in updates:
            panel.axvline(update + 0.5, color=mark.colour, zorder=0, **{**LEGEND_STYLES[mark.kind], "linewidth": 0.8})
    evaluated_updates = [update for _, validation in means.values() for update in validation.index]
    step = POINT_OFFSET * (max(evaluated_updates) - min(evaluated_updates)) if evaluated_updates else 0.0
    for index, (label, (train, validation)) in enumerate(means.items()):
        if not train.empty:
            draw_training(panel, train.index, train["mean"], colours[label], faint=not validation.empty)
            draw_band(panel, train, colours[label])
        if not validation.empty:
            shifted = validation.set_axis(validation.index + step * (index - (len(means) - 1) / 2))
            draw_evaluations(panel, shifted.index, shifted["mean"], colours[label])
            draw_bars(panel, shifted, colours[label])


def with_interval_note(note: str, metrics: Sequence[Metrics]) -> str:
    """Adds the explanation of bands and bars to a plot's note if any of its metrics have enough seeds for intervals."""
    return f"{note} {INTERVAL_NOTE}".strip() if any(len(frame.seeds) >= MIN_SEEDS for frame in metrics) else note


def _event_updates(metrics: Metrics, event: str) -> list[int]:
    """Returns the updates after which an event happened in any of the runs."""
    values = metrics.get("run", event, "")
    return sorted(set(values[values == 1].index.get_level_values("update")))


def draw_curves(updates: Sequence[Update], settings: Settings, file: Path) -> None:
    """Draws the curves of one run into an image file.

    Args:
        updates: The lines of `metrics.jsonl`.
        settings: The run's settings.
        file: The image; its suffix chooses the format. An existing file is replaced.
    """
    metrics = Metrics([("run", settings.seed, *row) for row in metric_rows(updates)])
    names = ", ".join(Path(name).name for name in dict.fromkeys(settings.models.values()))
    title = f"{algorithm_name(settings)}  ·  {settings.task}  ·  {names}"
    policy_curves("curves", title, "", metrics, settings).save(file)
