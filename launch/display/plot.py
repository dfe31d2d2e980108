"""Plots of runs: panels of curves by policy, role or arm, with intervals over seeds and a shared legend."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from launch.display.frame import Metrics, mean_over_seeds
from launch.display.texts import algorithm_name
from launch.run_folder.frame import LAST_RESPONSE, MEAN, metrics_frame
from launch.run_folder.records import Update
from policies.files import atomic_file
from policies.models.model_names import AVERAGE_POLICY
from policies.settings.settings import Settings

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
"""The colour-blind safe palette of Okabe and Ito."""
INK, FAINT, GRID = "#333333", "#b8b8b8", "#e6e6e6"
FORMATS = tuple(FigureCanvasAgg.get_supported_filetypes())
WIDTH, HEIGHT = 4.6, 3.1
"""Size of a panel, in inches."""
LEFT, RIGHT, BOTTOM, TOP = 0.78, 0.13, 0.5, 0.35
"""Margins around the axes of a panel, in inches."""
LEGEND_LINE = 0.24
"""Height of a line of the legend, in inches."""
PANELS_PER_ROW = 3
POINT_OFFSET = 0.012
"""Horizontal offset between the points of two curves at the same update, as a share of the panel's width, so that
their error bars do not overlap."""
POINTS: dict[str, Any] = {"linewidth": 1.8, "markersize": 6, "markeredgecolor": "white", "markeredgewidth": 1.2}
STYLES: dict[str, dict[str, Any]] = {
    "train": {"linewidth": 1.1, "alpha": 0.45},
    "bare": {**POINTS, "marker": "o"},
    "last": {**POINTS, "marker": "D"},
    "exchanged": {"linestyle": (0, (2, 2)), "color": FAINT},
    "averaged": {"linestyle": (0, (1, 2)), "color": INK, "alpha": 0.45},
}
"""Line styles by kind of line and by event."""
KIND_LABELS = {"train": "training", "bare": "held out, bare query", "last": "held out, last answer of the chain"}
"""The kinds of lines of a curve, in the order in which they are drawn, and their labels."""
EVENT_LABELS = {"exchanged": "role exchange", "averaged": "averaging"}
PANELS = (
    ("task_reward", "Task reward", "per response"),
    ("kl", "KL to the initial policy", "nats per response"),
    ("combined_reward", "Combined reward", "task reward − {} · KL"),
)
"""Metrics, their headings and their units."""


class Line(NamedTuple):
    """A line of a panel."""

    label: str
    """Lines with the same label have the same colour."""
    kind: str
    """A key of `KIND_LABELS`. Training metrics are faint if evaluations are drawn over them."""
    values: pd.DataFrame
    """By x: `mean`, and the bounds of its interval, `low` and `high` (`mean_over_seeds`)."""


class Panel(NamedTuple):
    """A pair of axes."""

    title: str
    unit: str
    lines: list[Line]
    xlabel: str = "update"
    is_share: bool = False
    """Whether the values are shares, shown in percent."""


@dataclass(frozen=True)
class Plot:
    """Panels that share a legend."""

    title: str
    panels: Sequence[Panel]
    labels: Sequence[str]
    """The labels of the lines, in the order of their colours."""
    event_updates: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By key of `EVENT_LABELS`, the updates after which a vertical line is drawn."""

    @property
    def colours(self) -> dict[str, str]:
        """The colour of each label."""
        return {label: COLOURS[index % len(COLOURS)] for index, label in enumerate(self.labels)}

    def save(self, file: Path) -> None:
        """Writes the plot atomically; the suffix chooses the format, and an existing file is replaced."""
        with matplotlib.rc_context({"text.parse_math": False}), atomic_file(file) as unfinished:
            self.draw().savefig(unfinished, format=file.suffix.removeprefix(".").lower(), facecolor="white")

    def draw(self) -> Figure:
        """Draws the figure. The layout is computed here because a layout engine would take three times as long."""
        legend = self._legend()
        columns = min(len(self.panels), PANELS_PER_ROW)
        rows = math.ceil(len(self.panels) / columns)
        label_length = max(len(str(line.get_label())) for line in legend)
        legend_columns = max(1, int(13 * WIDTH * columns / (label_length + 8)))
        legend_height = LEGEND_LINE * math.ceil(len(legend) / legend_columns)
        width, height = WIDTH * columns, HEIGHT * rows + LEGEND_LINE + legend_height
        figure = Figure(figsize=(width, height), dpi=200)
        figure.subplots_adjust(
            left=LEFT / width,
            right=1 - RIGHT / width,
            bottom=(legend_height + BOTTOM) / height,
            top=1 - (LEGEND_LINE + TOP) / height,
            wspace=(LEFT + RIGHT) / (WIDTH - LEFT - RIGHT),
            hspace=(BOTTOM + TOP) / (HEIGHT - BOTTOM - TOP),
        )
        for index, panel in enumerate(self.panels):
            self._draw_panel(figure.add_subplot(rows, columns, index + 1), panel)
        figure.suptitle(self.title, fontsize=12, color=INK, x=0.01, ha="left", fontweight="bold")
        figure.legend(handles=legend, loc="lower left", ncols=legend_columns, frameon=False, fontsize=9, labelcolor=INK)
        return figure

    def _legend(self) -> list[Line2D]:
        """Returns an entry per label, kind and event; if each label has a kind of its own, one for both."""
        kinds = {(line.label, line.kind) for panel in self.panels for line in panel.lines}
        shown = [kind for kind in KIND_LABELS if kind in {kind for _, kind in kinds}]
        styles: dict[str, dict[str, Any]] = {label: {"linewidth": 2.2} for label in self.labels}
        if len(kinds) == len(shown) == len(self.labels) > 1:
            styles, shown = {label: STYLES[kind] for label, kind in kinds}, []
        legend = [Line2D([], [], color=self.colours[label], label=label, **styles[label]) for label in self.labels]
        for kind in shown if len(shown) > 1 else ():
            legend.append(Line2D([], [], color=INK, label=KIND_LABELS[kind], **STYLES[kind]))
        return legend + [Line2D([], [], label=EVENT_LABELS[event], **STYLES[event]) for event in self.event_updates]

    def _draw_panel(self, axes: Axes, panel: Panel) -> None:
        axes.set_title(panel.title, loc="left", fontsize=11, color=INK)
        axes.set_ylabel(panel.unit, fontsize=9, color=INK)
        axes.set_xlabel(panel.xlabel, fontsize=9, color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=panel.xlabel == "update"))
        axes.tick_params(labelsize=9, colors=INK, length=3)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        if panel.is_share:
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        for event, updates in self.event_updates.items():
            for update in updates:
                axes.axvline(update + 0.5, zorder=0, linewidth=0.8, **STYLES[event])
        points = [line for line in panel.lines if line.kind != "train"]
        evaluated = [x for line in points for x in line.values.index]
        has_bars = any(line.values["low"].notna().any() for line in points)
        offset = POINT_OFFSET * (max(evaluated) - min(evaluated)) if has_bars else 0.0
        for label, kind, values in panel.lines:
            colour = self.colours[label]
            if kind == "train":
                is_faint = any(line.label == label for line in points)
                style = STYLES[kind] if is_faint else {"linewidth": 1.6}
                axes.plot(values.index, values["mean"], color=colour, marker="." if len(values) < 3 else None, **style)
                axes.fill_between(values.index, values["low"], values["high"], color=colour, alpha=0.15, linewidth=0)
        for index, (label, kind, values) in enumerate(points):
            x, colour = values.index + offset * (index - (len(points) - 1) / 2), self.colours[label]
            axes.plot(x, values["mean"], color=colour, zorder=3, **STYLES[kind])
            axes.vlines(x, values["low"], values["high"], color=colour, linewidth=1.2, alpha=0.7)


class Curve(NamedTuple):
    """The data of one curve, in one colour: up to one line of each kind."""

    metrics: Metrics
    policy: str = MEAN
    """Whose training responses and held-out responses to the bare query are shown, by default the policies' mean."""
    role: str = ""
    """The role whose training responses are shown instead of the policy's, whichever policy had it."""
    kinds: tuple[str, ...] = ("train", "bare")

    def lines(self, metric: str, label: str) -> list[Line]:
        """Returns the lines that have values."""
        keys = {
            "train": ("train", metric, "" if self.role else self.policy, self.role),
            "bare": ("validation", metric, self.policy, ""),
            "last": ("validation", metric, "", LAST_RESPONSE),
        }
        frames = {kind: mean_over_seeds(self.metrics.get(*keys[kind])) for kind in KIND_LABELS if kind in self.kinds}
        return [Line(label, kind, frame) for kind, frame in frames.items() if frame["mean"].notna().any()]


def policy_curves(title: str, metrics: Metrics, settings: Settings) -> Plot:
    """Plots each policy of one run; or the roles of a chain, if one policy has all of them."""
    if len(settings.policy_ids) == 1 < settings.num_agents:
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
    return plot_curves(title, curves, [settings], _event_updates(metrics))


def plot_curves(
    title: str,
    curves: Mapping[str, Curve],
    settings: Sequence[Settings],
    event_updates: Mapping[str, Sequence[int]] | None = None,
) -> Plot:
    """Plots curves over updates, with a panel per metric; the KL has none without a reference."""
    coefs = {run_settings.report_kl_coef for run_settings in settings}
    coef = f"{coefs.pop():g}" if len(coefs) == 1 else "η"
    panels = []
    for metric, heading, unit in PANELS:
        lines = [line for label, curve in curves.items() for line in curve.lines(metric, label)]
        if lines or metric != "kl":
            panels.append(Panel(heading, unit.format(coef), lines))
    return Plot(title, panels, list(curves), event_updates or {})


def _event_updates(metrics: Metrics) -> dict[str, list[int]]:
    """Returns the updates after which each event happened in any of the runs, of events that did."""
    happened = {event: metrics.get("run", event, "") for event in EVENT_LABELS}
    updates = {
        event: sorted(set(values[values == 1].index.get_level_values("update"))) for event, values in happened.items()
    }
    return {event: numbers for event, numbers in updates.items() if numbers}


def draw_run(lines: Sequence[Update], settings: Settings, file: Path) -> None:
    """Draws the curves of one run into an image file."""
    metrics = Metrics({"run": metrics_frame(lines)}, {"run": settings.seed})
    names = ", ".join(Path(name).name for name in dict.fromkeys(settings.models.values()))
    title = f"{algorithm_name(settings)}  ·  {settings.task}  ·  {names}"
    policy_curves(title, metrics, settings).save(file)
