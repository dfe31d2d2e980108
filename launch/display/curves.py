"""Lines over updates or over what they cost: of policies, roles or arms, with intervals if they are of several runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    draw_runs,
    draw_training,
    mark_averagings,
    mark_exchanges,
    style,
    widened,
)
from launch.display.frame import FEWEST, MEAN, TOKEN_KL, Metrics, metric_rows, over_seeds
from launch.display.plot import Key, Panel, Plot
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
BANDS = 4
"""Lines of a panel that may have a band each."""
APART = 0.012
"""Share of a panel's width between the points of two lines at the same update."""
LIMITS = {"repetition": "max_repetition", TOKEN_KL: "max_token_kl"}
"""The settings that say from where on a figure is a sign of collapse, whatever it was before training."""
INTERVAL = "{}: 95 % interval of the mean over seeds (Student's t), from three seeds on. A panel's edge cuts wide ones."


@dataclass(frozen=True)
class Line:
    """What is drawn of a policy, a role or an arm: means by x, as `frame.over_seeds` returns them."""

    label: str
    colour: str
    trained: pd.DataFrame | None = None
    """Of training, drawn as a line."""
    held_out: pd.DataFrame | None = None
    """Of evaluations, drawn as points."""
    runs: Mapping[int, Sequence[float]] | None = None
    """Single runs by x."""

    @property
    def end(self) -> str:
        """Says where it ends."""
        means = self.trained if self.held_out is None else self.held_out
        return "" if means is None or means.empty else f"{self.label} ends at {means['mean'].iloc[-1]:.2f}"


class Member(NamedTuple):
    """Whose metrics a line shows: those of a policy, of a role, or by default the mean of the policies."""

    metrics: Metrics
    policy: str = MEAN
    role: str = ""
    trained: bool = True
    held_out: bool = True

    def line(self, label: str, colour: str, metric: str) -> Line:
        """Returns the line of a metric."""
        trained, held_out = (
            over_seeds(self.metrics.get(split, metric, self.policy, self.role)) if wanted else None
            for split, wanted in (("train", self.trained), ("validation", self.held_out))
        )
        return Line(label, colour, trained, None if held_out is None or held_out.empty else held_out)


def policy_curves(name: str, title: str, note: str, metrics: Metrics, settings: Settings) -> Plot:
    """Returns the curves of each policy of one run, or of runs that differ in their seed."""
    policies = [*settings.modules, *([AVERAGE] if AVERAGE in set(metrics.frame["policy"]) else [])]
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
    exchanged, averaged = ([] if events is None else _marked(events, event) for event in ("exchanged", "averaged"))
    panels, drawn = [], []
    for metric, heading, unit in figures:
        lines = [member.line(label, colours[label], metric) for label, member in members.items()]
        limit = max(getattr(each, LIMITS[metric]) for each in settings) if metric in LIMITS else None
        says = f"{heading}. {'; '.join(line.end for line in lines if line.end)}"
        unit = unit.format(coef)
        panels.append(line_panel(heading, unit, lines, says, limit=limit, exchanged=exchanged, averaged=averaged))
        drawn += lines
    legend = [Key(label, colour) for label, colour in colours.items()]
    if any(line.trained is not None and line.held_out is not None for line in drawn):
        legend += [Key("training", INK, "training"), Key("held out, bare query", INK, "held out")]
    legend += [Key("role exchange", FAINT, "exchange")] if exchanged else []
    legend += [Key("averaging", INK, "averaging")] if averaged else []
    bands = len(members) <= BANDS and any(line.trained is not None for line in drawn)
    bars = any(line.held_out is not None for line in drawn)
    note = with_interval(note, [member.metrics for member in members.values()], bands=bands, bars=bars)
    return Plot(name, title, note, panels, legend)


def with_interval(note: str, metrics: Sequence[Metrics], *, bands: bool = False, bars: bool = True) -> str:
    """Returns a plot's note, with what its bands or bars are, if anything drawn is of enough runs to have them."""
    drawn = " and ".join(name for name, are in (("bands", bands), ("bars", bars)) if are)
    several = any(len(each.seeds) >= FEWEST for each in metrics)
    return f"{note} {INTERVAL.format(drawn.capitalize())}" if drawn and several else note


def _marked(metrics: Metrics, event: str) -> list[int]:
    """Returns the updates after which something happened in any of the runs."""
    values = metrics.get("run", event, "")
    return sorted(set(values[values == 1].index.get_level_values("update")))


def line_panel(
    title: str,
    unit: str,
    lines: Sequence[Line],
    says: str,
    xlabel: str = "update",
    *,
    limit: float | None = None,
    exchanged: Sequence[int] = (),
    averaged: Sequence[int] = (),
    ticks: Sequence[str] | None = None,
) -> Panel:
    """Returns a panel of lines.

    Args:
        title: of the panel.
        unit: what stands at its y axis.
        lines: what is drawn.
        says: what it shows, in words.
        xlabel: what stands at its x axis; points of the same update are moved apart, so that their bars can be seen.
        limit: where a dashed line is drawn across.
        exchanged: updates that are followed by an exchange of roles.
        averaged: updates after which all LLMs moved to their mean.
        ticks: labels of x = 0, 1, ….
    """

    def draw(panel: Axes) -> None:
        style(panel, title, unit)
        panel.set_xlabel(xlabel, fontsize=9, color=INK)
        if limit is not None:
            panel.axhline(limit, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        intervals: list[tuple[Callable[[Axes, pd.DataFrame, str], None], pd.DataFrame, str]] = []
        for line in _apart(lines) if xlabel == "update" else lines:
            if line.trained is not None:
                draw_training(
                    panel, line.trained.index, line.trained["mean"], line.colour, faintly=line.held_out is not None
                )
                intervals += [(draw_band, line.trained, line.colour)] if len(lines) <= BANDS else []
            for x, values in (line.runs or {}).items():
                if len(values) > 1:
                    draw_runs(panel, [x] * len(values), values, line.colour)
            if line.held_out is not None:
                draw_evaluations(panel, line.held_out.index, line.held_out["mean"], line.colour)
                intervals.append((draw_bars, line.held_out, line.colour))
        ends = [end for _, means, _ in intervals for end in (*means["low"], *means["high"])]
        panel.set_ylim(widened(panel.get_ylim(), ends))  # all means, and intervals as far as they do not dwarf them
        mark_exchanges(panel, exchanged)
        mark_averagings(panel, averaged)
        for draw_interval, means, colour in intervals:
            draw_interval(panel, means, colour)
        if ticks is not None:
            panel.set_xticks(range(len(ticks)), ticks)
            panel.set_xlim(-0.4, len(ticks) - 0.6)

    return Panel(draw, says)


def _apart(lines: Sequence[Line]) -> list[Line]:
    """Moves the points of several lines a little to the side, so that their bars do not hide one another."""
    updates = [update for line in lines if line.held_out is not None for update in line.held_out.index]
    step = APART * (max(updates) - min(updates)) if updates else 0.0
    moved = []
    for number, line in enumerate(lines):
        if line.held_out is not None:
            x = line.held_out.index + step * (number - (len(lines) - 1) / 2)
            line = replace(line, held_out=line.held_out.set_axis(x))
        moved.append(line)
    return moved


def draw(updates: Sequence[Update], settings: Settings, file: Path) -> None:
    """Draws the curves of one run into a PNG, or another format that the file's ending names.

    Args:
        updates: the lines of `metrics.jsonl`.
        settings: of the run.
        file: where to; replaced if it exists.
    """
    metrics = Metrics([("run", settings.seed, *row) for row in metric_rows(updates)])
    policy_curves("curves", _title(settings), "", metrics, settings).save(file)


def _title(settings: Settings) -> str:
    names = ", ".join(Path(name).name for name in dict.fromkeys(settings.models.values()))
    return f"{method(settings)}  ·  {settings.task}  ·  {names}"


def method(settings: Settings) -> str:
    """Returns what a run's algorithm is called."""
    if settings.num_agents == 1:
        return f"{settings.algorithm}{f' by {len(settings.modules)} LLMs' * (len(settings.modules) > 1)}"
    agents = "" if settings.num_agents == 2 else f" of {settings.num_agents}"
    if len(settings.modules) != settings.num_agents:
        agents += f" by {len(settings.modules)} LLM{'s' * (len(settings.modules) > 1)}"
    learner = "" if settings.algorithm == "PPO" else f" with {settings.algorithm}"
    return f"CORY{agents}{learner}"
