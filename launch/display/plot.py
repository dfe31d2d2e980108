"""Plots of runs: panels of curves by policy, role or arm, with intervals over seeds and a shared legend."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from launch.display.frame import Metrics, mean_over_seeds
from launch.run_folder.frame import LAST_RESPONSE, MEAN, metrics_frame
from launch.run_folder.records import Update
from policies.files import atomic_file
from policies.models.model_names import AVERAGE_POLICY
from policies.settings.settings import Settings

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
"""The colour-blind safe palette of Okabe and Ito."""
INK = "#333333"
FORMATS = tuple(FigureCanvasAgg.get_supported_filetypes())
WIDTH, HEIGHT, LEGEND_LINE = 4.6, 3.1, 0.24
"""Size of a panel, and height of a line of the legend, in inches."""
RC: dict[str, Any] = {
    **{"text.parse_math": False, "font.size": 9, "legend.frameon": False, "axes.titlelocation": "left"},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y"},
    **{"grid.color": "#e6e6e6", "axes.axisbelow": True},
}
POINTS: dict[str, Any] = {"linewidth": 1.8, "markersize": 6, "markeredgecolor": "white", "markeredgewidth": 1.2}
STYLES: dict[str, dict[str, Any]] = {
    "train": {"linewidth": 1.1, "alpha": 0.5},
    "bare": {**POINTS, "marker": "o"},
    "last": {**POINTS, "marker": "D"},
    "exchanged": {"linewidth": 0.8, "linestyle": (0, (2, 2)), "color": "#b8b8b8"},
    "averaged": {"linewidth": 0.8, "linestyle": (0, (1, 2)), "color": INK, "alpha": 0.45},
}
"""Line styles by kind of line, in the order in which they are drawn, and by event."""
KIND_LABELS = {"train": "training", "bare": "held out, bare query", "last": "held out, last answer of the chain"}
EVENT_LABELS = {"exchanged": "role exchange", "averaged": "averaging"}
PANELS = (
    ("task_reward", "Task reward", "per response"),
    ("kl", "KL to the initial policy", "nats per response"),
    ("combined_reward", "Combined reward", "task reward − {} · KL"),
)


class Curve(NamedTuple):
    """The data of one curve, in one colour: up to one line of each kind."""

    metrics: Metrics
    policy: str = MEAN
    """Whose training responses and held-out responses to the bare query are shown, by default the policies' mean."""
    role: str = ""
    """The role whose training responses are shown instead of the policy's, whichever policy had it."""
    kinds: tuple[str, ...] = ("train", "bare")

    def lines(self, metric: str) -> dict[str, pd.DataFrame]:
        """Returns the lines that have values, as `mean_over_seeds` does, by kind."""
        keys = {
            "train": ("train", metric, "" if self.role else self.policy, self.role),
            "bare": ("validation", metric, self.policy, ""),
            "last": ("validation", metric, "", LAST_RESPONSE),
        }
        if metric == "kl" and self.metrics.get(*keys["train"]).isna().all():  # the policy did not score its responses
            keys["train"] = ("train", "kl_k3", *keys["train"][2:])
        frames = {kind: mean_over_seeds(self.metrics.get(*keys[kind])) for kind in KIND_LABELS if kind in self.kinds}
        return {kind: frame for kind, frame in frames.items() if frame["mean"].notna().any()}


def policy_curves(metrics: Metrics, settings: Settings) -> dict[str, Curve]:
    """Returns a curve of each policy of one run; or of the roles of a chain, if one policy has all of them."""
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
    return curves


def draw_curves(
    title: str, curves: Mapping[str, Curve], settings: Sequence[Settings], events: Mapping[str, Sequence[int]]
) -> Figure:
    """Draws curves over updates, with a panel per metric; the KL has none without a reference.

    Args:
        settings: Of the runs.
        events: By key of `EVENT_LABELS`, the updates after which a vertical line is drawn.
    """
    coefs = {run_settings.report_kl_coef for run_settings in settings}
    coef = f"{coefs.pop():g}" if len(coefs) == 1 else "η"
    metric_lines = {metric: {label: curve.lines(metric) for label, curve in curves.items()} for metric, *_ in PANELS}
    panels = [panel for panel in PANELS if panel[0] != "kl" or any(metric_lines["kl"].values())]
    colours = dict(zip(curves, itertools.cycle(COLOURS), strict=False))
    kinds = {kind for lines in metric_lines.values() for frames in lines.values() for kind in frames}
    legend = [Line2D([], [], color=colour, label=label, linewidth=2.2) for label, colour in colours.items()]
    for kind, label in KIND_LABELS.items() if len(kinds) > 1 else ():
        if kind in kinds:
            legend.append(Line2D([], [], color=INK, label=label, **STYLES[kind]))
    legend += [Line2D([], [], label=EVENT_LABELS[event], **STYLES[event]) for event in events]
    width, label_length = WIDTH * len(panels), max(len(str(line.get_label())) for line in legend)
    legend_columns = max(1, int(13 * width / (label_length + 8)))
    legend_height = LEGEND_LINE * math.ceil(len(legend) / legend_columns)
    height = HEIGHT + LEGEND_LINE + legend_height
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(width, height), dpi=200)
        # In inches. A layout engine would take three times as long as all the rest.
        bottom, top = (legend_height + 0.5) / height, 1 - (LEGEND_LINE + 0.35) / height
        figure.subplots_adjust(left=0.78 / width, right=1 - 0.13 / width, bottom=bottom, top=top, wspace=0.25)
        for index, (metric, heading, unit) in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), index + 1)
            axes.set(title=heading, xlabel="update", ylabel=unit.format(coef))
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            for event, updates in events.items():
                for update in updates:
                    axes.axvline(update + 0.5, zorder=0, **STYLES[event])
            for label, frames in metric_lines[metric].items():
                for kind, frame in frames.items():
                    marker = {"marker": "."} if len(frame) < 3 else {}  # a line of one point would be invisible
                    axes.plot(frame.index, frame["mean"], color=colours[label], **{**marker, **STYLES[kind]})
                    axes.fill_between(
                        frame.index, frame["low"], frame["high"], color=colours[label], alpha=0.15, linewidth=0
                    )
        figure.suptitle(title, fontsize=12, x=0.01, ha="left", fontweight="bold")
        figure.legend(handles=legend, loc="lower left", ncols=legend_columns)
    return figure


def save_figure(figure: Figure, file: Path) -> None:
    """Writes a picture atomically; the suffix chooses the format, and an existing file is replaced."""
    with matplotlib.rc_context(RC), atomic_file(file) as unfinished:  # ticks are only created now
        figure.savefig(unfinished, format=file.suffix.removeprefix(".").lower(), facecolor="white")


def draw_run(lines: Sequence[Update], settings: Settings, file: Path) -> None:
    """Draws the curves of one run into an image file."""
    metrics = Metrics({"run": metrics_frame(lines)})
    names = ", ".join(Path(name).name for name in dict.fromkeys(settings.models.values()))
    chain = f"{settings.num_agents} agents, " * (settings.num_agents > 1)
    title = f"{chain}{settings.algorithm}  ·  {settings.task}  ·  {names}"
    events: dict[str, list[int]] = {}
    for event in EVENT_LABELS:
        happened = metrics.get("run", event, "")
        if updates := list(happened[happened == 1].index.get_level_values("update")):
            events[event] = updates
    save_figure(draw_curves(title, policy_curves(metrics, settings), [settings], events), file)
