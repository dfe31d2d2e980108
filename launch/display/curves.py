"""Lines over updates: of policies, roles or arms, with intervals if they are of several runs."""

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
from policies.models.model_names import AVERAGE
from policies.settings.settings import Settings

MetricPanel = tuple[str, str, str]
"""A metric, its heading and its unit."""
PANELS: tuple[MetricPanel, ...] = (
    ("task_reward", "Task reward", "per response"),
    ("kl", "KL to the initial policy", "nats per response"),
    ("combined_reward", "Combined reward", "task reward − {} · KL"),
)
POINT_OFFSET = 0.012
"""Share of a panel's width between the points of two lines at the same update, so that no bar hides another."""
COLLAPSE_LIMITS = {"repetition": "max_repetition", TOKEN_KL: "max_token_kl"}
"""The settings that say from where on a figure is a sign of collapse, whatever it was before training."""
INTERVAL_NOTE = "Bands and bars: 95 % interval of the mean over seeds (Student's t), from three seeds on."


class EventMark(NamedTuple):
    """What is marked by a line across, at the updates after which it happened."""

    event: str
    label: str
    colour: str
    kind: str


EVENT_MARKS = (
    EventMark("exchanged", "role exchange", FAINT, "exchange"),
    EventMark("averaged", "averaging", INK, "averaging"),
)


class Curve(NamedTuple):
    """Whose metrics a line shows: those of a policy, of a role, or by default the mean of the policies."""

    metrics: Metrics
    policy: str = MEAN
    role: str = ""
    trained: bool = True
    held_out: bool = True

    def means(self, metric: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Returns the means of training and of evaluations by update (`frame.over_seeds`); empty if there are none."""
        trained, held_out = (
            mean_over_seeds(self.metrics.get(split if wanted else "none", metric, self.policy, self.role))
            for split, wanted in (("train", self.trained), ("validation", self.held_out))
        )
        return trained, held_out


def policy_curves(name: str, title: str, note: str, metrics: Metrics, settings: Settings) -> Plot:
    """Returns the curves of each policy of one run, or of runs that differ in their seed."""
    policies = [*settings.policy_ids, *([AVERAGE] if AVERAGE in set(metrics.frame["policy"]) else [])]
    members = {policy: Curve(metrics, policy, trained=policy != AVERAGE) for policy in policies}
    return plot_over_updates(name, title, note, members, [settings], events=metrics)


def plot_over_updates(
    name: str,
    title: str,
    note: str,
    members: Mapping[str, Curve],
    settings: Sequence[Settings],
    figures: Sequence[MetricPanel] = PANELS,
    events: Metrics | None = None,
) -> Plot:
    """Returns curves over updates, a panel per figure.

    Args:
        name: of the plot.
        title: of the plot.
        note: what there is to say but for intervals.
        members: what has a line, by its label.
        settings: of the runs that are drawn.
        figures: what is drawn of them.
        events: of the runs whose role exchanges and averagings are marked, if any.
    """
    colours = dict(zip(members, choose_colours(len(members)), strict=True))
    coefs = {each.report_kl_coef for each in settings}
    coef = f"{coefs.pop():g}" if len(coefs) == 1 else "η"
    marked = {
        mark: updates for mark in EVENT_MARKS if events is not None and (updates := _event_updates(events, mark.event))
    }
    panels, kinds = [], set()
    for metric, heading, unit in figures:
        lines = {label: member.means(metric) for label, member in members.items()}
        ends = []
        for label, (trained, held_out) in lines.items():
            kinds |= {kind for kind, means in (("training", trained), ("held out", held_out)) if not means.empty}
            if len(means := trained if held_out.empty else held_out):
                ends.append(f"{label} ends at {means['mean'].iloc[-1]:.2f}")
        limit = max(getattr(each, COLLAPSE_LIMITS[metric]) for each in settings) if metric in COLLAPSE_LIMITS else None
        draw = partial(_draw_lines, heading, unit.format(coef), lines, colours, limit, marked)
        panels.append(Panel(draw, f"{heading}. {'; '.join(ends)}"))
    legend = [LegendEntry(label, colour) for label, colour in colours.items()]
    if len(kinds) > 1:
        legend += [LegendEntry("training", INK, "training"), LegendEntry("held out, bare query", INK, "held out")]
    legend += [LegendEntry(mark.label, mark.colour, mark.kind) for mark in marked]
    return Plot(name, title, with_interval_note(note, [member.metrics for member in members.values()]), panels, legend)


def _draw_lines(
    title: str,
    unit: str,
    lines: Mapping[str, tuple[pd.DataFrame, pd.DataFrame]],
    colours: Mapping[str, str],
    limit: float | None,
    marked: Mapping[EventMark, Sequence[int]],
    panel: Axes,
) -> None:
    """Draws a panel.

    Args:
        title: of the panel.
        unit: what stands at its y axis.
        lines: by label, the means of training and of evaluations.
        colours: by label.
        limit: where a dashed line is drawn across.
        marked: updates that are followed by what a mark stands for.
        panel: where to.
    """
    style_panel(panel, title, unit)
    if limit is not None:
        panel.axhline(limit, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    for mark, updates in marked.items():
        for update in updates:
            panel.axvline(update + 0.5, color=mark.colour, zorder=0, **{**LEGEND_STYLES[mark.kind], "linewidth": 0.8})
    measured = [update for _, held_out in lines.values() for update in held_out.index]
    step = POINT_OFFSET * (max(measured) - min(measured)) if measured else 0.0
    for number, (label, (trained, held_out)) in enumerate(lines.items()):
        if not trained.empty:
            draw_training(panel, trained.index, trained["mean"], colours[label], faintly=not held_out.empty)
            draw_band(panel, trained, colours[label])
        if not held_out.empty:
            moved = held_out.set_axis(held_out.index + step * (number - (len(lines) - 1) / 2))
            draw_evaluations(panel, moved.index, moved["mean"], colours[label])
            draw_bars(panel, moved, colours[label])


def with_interval_note(note: str, metrics: Sequence[Metrics]) -> str:
    """Returns a plot's note, with what its bands or bars are if anything drawn is of enough runs to have them."""
    return f"{note} {INTERVAL_NOTE}".strip() if any(len(each.seeds) >= MIN_SEEDS for each in metrics) else note


def _event_updates(metrics: Metrics, event: str) -> list[int]:
    """Returns the updates after which something happened in any of the runs."""
    values = metrics.get("run", event, "")
    return sorted(set(values[values == 1].index.get_level_values("update")))


def draw_curves(updates: Sequence[Update], settings: Settings, file: Path) -> None:
    """Draws the curves of one run into a PNG, or another format that the file's ending names.

    Args:
        updates: the lines of `metrics.jsonl`.
        settings: of the run.
        file: where to; replaced if it exists.
    """
    metrics = Metrics([("run", settings.seed, *row) for row in metric_rows(updates)])
    names = ", ".join(Path(name).name for name in dict.fromkeys(settings.models.values()))
    title = f"{algorithm_name(settings)}  ·  {settings.task}  ·  {names}"
    policy_curves("curves", title, "", metrics, settings).save(file)
