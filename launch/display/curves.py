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
    colours_of,
    draw_band,
    draw_bars,
    draw_evaluations,
    draw_training,
    style,
)
from launch.display.frame import FEWEST, MEAN, TOKEN_KL, Metrics, metric_rows, over_seeds
from launch.display.plot import KEYS, Key, Panel, Plot
from launch.display.texts import algorithm_name
from launch.run_folder.records import Update
from policies.models.model_names import AVERAGE
from policies.settings.settings import Settings

Figure = tuple[str, str, str]
"""A metric, its heading and its unit."""
PANELS: tuple[Figure, ...] = (
    ("task_reward", "Task reward", "per response"),
    ("kl", "KL to the initial policy", "nats per response"),
    ("combined_reward", "Combined reward", "task reward − {} · KL"),
)
APART = 0.012
"""Share of a panel's width between the points of two lines at the same update, so that no bar hides another."""
LIMITS = {"repetition": "max_repetition", TOKEN_KL: "max_token_kl"}
"""The settings that say from where on a figure is a sign of collapse, whatever it was before training."""
INTERVAL = "Bands and bars: 95 % interval of the mean over seeds (Student's t), from three seeds on."


class Mark(NamedTuple):
    """What is marked by a line across, at the updates after which it happened."""

    event: str
    label: str
    colour: str
    kind: str


MARKS = (
    Mark("exchanged", "role exchange", FAINT, "exchange"),
    Mark("averaged", "averaging", INK, "averaging"),
)


class Member(NamedTuple):
    """Whose metrics a line shows: those of a policy, of a role, or by default the mean of the policies."""

    metrics: Metrics
    policy: str = MEAN
    role: str = ""
    trained: bool = True
    held_out: bool = True

    def means(self, metric: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Returns the means of training and of evaluations by update (`frame.over_seeds`); empty if there are none."""
        trained, held_out = (
            over_seeds(self.metrics.get(split if wanted else "none", metric, self.policy, self.role))
            for split, wanted in (("train", self.trained), ("validation", self.held_out))
        )
        return trained, held_out


def policy_curves(name: str, title: str, note: str, metrics: Metrics, settings: Settings) -> Plot:
    """Returns the curves of each policy of one run, or of runs that differ in their seed."""
    policies = [*settings.policy_ids, *([AVERAGE] if AVERAGE in set(metrics.frame["policy"]) else [])]
    members = {policy: Member(metrics, policy, trained=policy != AVERAGE) for policy in policies}
    return over_updates(name, title, note, members, [settings], events=metrics)


def over_updates(
    name: str,
    title: str,
    note: str,
    members: Mapping[str, Member],
    settings: Sequence[Settings],
    figures: Sequence[Figure] = PANELS,
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
    colours = dict(zip(members, colours_of(len(members)), strict=True))
    coefs = {each.report_kl_coef for each in settings}
    coef = f"{coefs.pop():g}" if len(coefs) == 1 else "η"
    marked = {mark: updates for mark in MARKS if events is not None and (updates := _marked(events, mark.event))}
    panels, kinds = [], set()
    for metric, heading, unit in figures:
        lines = {label: member.means(metric) for label, member in members.items()}
        ends = []
        for label, (trained, held_out) in lines.items():
            kinds |= {kind for kind, means in (("training", trained), ("held out", held_out)) if not means.empty}
            if len(means := trained if held_out.empty else held_out):
                ends.append(f"{label} ends at {means['mean'].iloc[-1]:.2f}")
        limit = max(getattr(each, LIMITS[metric]) for each in settings) if metric in LIMITS else None
        draw = partial(_draw_lines, heading, unit.format(coef), lines, colours, limit, marked)
        panels.append(Panel(draw, f"{heading}. {'; '.join(ends)}"))
    legend = [Key(label, colour) for label, colour in colours.items()]
    if len(kinds) > 1:
        legend += [Key("training", INK, "training"), Key("held out, bare query", INK, "held out")]
    legend += [Key(mark.label, mark.colour, mark.kind) for mark in marked]
    return Plot(name, title, with_interval(note, [member.metrics for member in members.values()]), panels, legend)


def _draw_lines(
    title: str,
    unit: str,
    lines: Mapping[str, tuple[pd.DataFrame, pd.DataFrame]],
    colours: Mapping[str, str],
    limit: float | None,
    marked: Mapping[Mark, Sequence[int]],
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
    style(panel, title, unit)
    if limit is not None:
        panel.axhline(limit, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    for mark, updates in marked.items():
        for update in updates:
            panel.axvline(update + 0.5, color=mark.colour, zorder=0, **{**KEYS[mark.kind], "linewidth": 0.8})
    measured = [update for _, held_out in lines.values() for update in held_out.index]
    step = APART * (max(measured) - min(measured)) if measured else 0.0
    for number, (label, (trained, held_out)) in enumerate(lines.items()):
        if not trained.empty:
            draw_training(panel, trained.index, trained["mean"], colours[label], faintly=not held_out.empty)
            draw_band(panel, trained, colours[label])
        if not held_out.empty:
            moved = held_out.set_axis(held_out.index + step * (number - (len(lines) - 1) / 2))
            draw_evaluations(panel, moved.index, moved["mean"], colours[label])
            draw_bars(panel, moved, colours[label])


def with_interval(note: str, metrics: Sequence[Metrics]) -> str:
    """Returns a plot's note, with what its bands or bars are if anything drawn is of enough runs to have them."""
    return f"{note} {INTERVAL}".strip() if any(len(each.seeds) >= FEWEST for each in metrics) else note


def _marked(metrics: Metrics, event: str) -> list[int]:
    """Returns the updates after which something happened in any of the runs."""
    values = metrics.get("run", event, "")
    return sorted(set(values[values == 1].index.get_level_values("update")))


def draw(updates: Sequence[Update], settings: Settings, file: Path) -> None:
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
