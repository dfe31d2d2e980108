"""Curves over updates, by policy, role or arm, with intervals over seeds."""

from collections.abc import Callable, Mapping, Sequence
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
    draw_training,
    style_panel,
)
from launch.display.frame import LAST_RESPONSE, MEAN, Metrics, mean_over_seeds, metric_rows
from launch.display.plot import LEGEND_STYLES, LegendEntry, Plot
from launch.display.tables import BARE_KL
from launch.display.texts import algorithm_name
from launch.run_folder.records import Update
from policies.models.model_names import AVERAGE_POLICY
from policies.settings.settings import Settings

PANELS = (
    ("task_reward", "Task reward", "per response"),
    ("kl", "KL to the initial policy", "nats per response"),
    ("combined_reward", "Combined reward", "task reward − {} · KL"),
)
"""Metrics, their headings and their units."""
POINT_OFFSET = 0.012
"""Horizontal offset between the points of two curves at the same update, as a share of the panel's width, so that
their error bars do not overlap."""


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


SERIES_LABELS = {"train": "training", "bare": "held out, bare query", "last": "held out, last answer of the chain"}
"""The kinds of series in a curve, in the order in which they are drawn, and their labels."""
Series = dict[str, pd.DataFrame]
"""By kind, the mean over seeds by update (`frame.mean_over_seeds`)."""


class Curve(NamedTuple):
    """The data of one curve, in one colour: up to one series of each kind."""

    metrics: Metrics
    policy: str = MEAN
    """Whose training responses and held-out responses to the bare query are shown, by default the policies' mean."""
    role: str = ""
    """The role whose training responses are shown instead of the policy's, whichever policy had it."""
    kinds: tuple[str, ...] = ("train", "bare")

    def series(self, metric: str) -> Series:
        """Returns the series that have values."""
        # Earlier versions named the KL of last answers `kl`.
        has_bare_kl = self.metrics.get("validation", BARE_KL, "", LAST_RESPONSE).notna().any()
        keys = {
            "train": ("train", metric, "" if self.role else self.policy, self.role),
            "bare": ("validation", metric, self.policy, ""),
            "last": ("validation", BARE_KL if metric == "kl" and has_bare_kl else metric, "", LAST_RESPONSE),
        }
        frames = {kind: mean_over_seeds(self.metrics.get(*keys[kind])) for kind in SERIES_LABELS if kind in self.kinds}
        return {kind: frame for kind, frame in frames.items() if frame["mean"].notna().any()}


def policy_curves(title: str, metrics: Metrics, settings: Settings) -> Plot:
    """Plots each policy of one run; or the roles that one policy has."""
    if has_shared_policy(settings):
        first, last = settings.agents[0], settings.agents[-1]
        kinds = {first: ("train", "bare"), last: ("train", "last")}
        curves = {
            role: Curve(metrics, settings.policy_ids[0], role, kinds.get(role, ("train",))) for role in settings.agents
        }
    else:
        curves = {policy_id: Curve(metrics, policy_id) for policy_id in settings.policy_ids}
        if LAST_RESPONSE in set(metrics.frame["role"]):
            curves[LAST_RESPONSE] = Curve(metrics, kinds=("last",))
    if AVERAGE_POLICY in set(metrics.frame["policy"]):
        curves[AVERAGE_POLICY] = Curve(metrics, AVERAGE_POLICY, kinds=("bare",))
    return plot_over_updates(title, curves, [settings], events=metrics)


def has_shared_policy(settings: Settings) -> bool:
    """Returns whether one policy has all roles of a chain."""
    return len(settings.policy_ids) == 1 < settings.num_agents


def plot_over_updates(
    title: str, curves: Mapping[str, Curve], settings: Sequence[Settings], events: Metrics | None = None
) -> Plot:
    """Plots curves over updates, with a panel per metric; the KL has none without a reference.

    Args:
        title: The plot's title.
        curves: By label.
        settings: Settings of the plotted runs.
        events: Metrics of the runs whose role exchanges and weight averagings are marked; None: no marks.
    """
    colours = dict(zip(curves, choose_colours(len(curves)), strict=True))
    coefs = {run_settings.report_kl_coef for run_settings in settings}
    coef = f"{coefs.pop():g}" if len(coefs) == 1 else "η"
    event_updates = {} if events is None else {mark: _event_updates(events, mark.event) for mark in EVENT_MARKS}
    event_updates = {mark: updates for mark, updates in event_updates.items() if updates}
    panels: list[Callable[[Axes], None]] = []
    kinds: set[str] = set()
    for metric, heading, unit in PANELS:
        series = {label: curve.series(metric) for label, curve in curves.items()}
        if metric == "kl" and not any(series.values()):
            continue
        kinds |= {kind for frames in series.values() for kind in frames}
        panels.append(partial(_draw_panel, heading, unit.format(coef), series, colours, event_updates))
    legend = [LegendEntry(label, colour) for label, colour in colours.items()]
    if len(kinds) > 1:
        legend += [LegendEntry(label, INK, kind) for kind, label in SERIES_LABELS.items() if kind in kinds]
    legend += [LegendEntry(mark.label, mark.colour, mark.kind) for mark in event_updates]
    return Plot(title, panels, legend)


def _draw_panel(
    title: str,
    unit: str,
    series: Mapping[str, Series],
    colours: Mapping[str, str],
    event_updates: Mapping[EventMark, Sequence[int]],
    panel: Axes,
) -> None:
    """Draws a panel.

    Args:
        title: The panel's title.
        unit: Label of the y axis.
        series: By label.
        colours: By label.
        event_updates: The updates after which each event happened.
        panel: The axes to draw on.
    """
    style_panel(panel, title, unit)
    for mark, updates in event_updates.items():
        for update in updates:
            panel.axvline(update + 0.5, color=mark.colour, zorder=0, **{**LEGEND_STYLES[mark.kind], "linewidth": 0.8})
    for label, frames in series.items():
        if (train := frames.get("train")) is not None:
            draw_training(panel, train.index, train["mean"], colours[label], faint=len(frames) > 1)
            draw_band(panel, train, colours[label])
    points = [(label, kind, frames[kind]) for label, frames in series.items() for kind in frames if kind != "train"]
    evaluated_updates = [update for *_, frame in points for update in frame.index]
    step = POINT_OFFSET * (max(evaluated_updates) - min(evaluated_updates)) if points else 0.0
    for index, (label, kind, frame) in enumerate(points):
        shifted = frame.set_axis(frame.index + step * (index - (len(points) - 1) / 2))
        panel.plot(shifted.index, shifted["mean"], color=colours[label], **LEGEND_STYLES[kind], zorder=3)
        draw_bars(panel, shifted, colours[label])


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
    policy_curves(title, metrics, settings).save(file)
