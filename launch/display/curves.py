"""Draws a run's curves: task reward, KL and combined reward of each policy, with the role exchanges."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from launch.run_folder.records import Update
from policies.settings.settings import Settings

PANELS = (
    ("task_reward", "Task reward", "per response"),
    ("kl", "KL to the initial policy", "nats per response"),
    ("combined_reward", "Combined reward", "task reward − {} · KL"),
)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
"""Told apart by most colour-blind readers (Okabe and Ito)."""
INK, FAINT, GRID = "#333333", "#b8b8b8", "#e6e6e6"
FORMATS = tuple(FigureCanvasAgg.get_supported_filetypes())
"""Endings of the files that can be drawn."""
FAINTLY = 0.45
EXCHANGE: Any = (0, (2, 2))
"""The dashes of a role exchange."""
POINT: dict[str, Any] = {"marker": "o", "markersize": 6, "markeredgecolor": "white", "markeredgewidth": 1.2}


def draw(updates: Sequence[Update], settings: Settings, file: Path) -> None:
    """Draws curves into a PNG, or another format that the file's ending names.

    Args:
        updates: the lines of `metrics.jsonl`.
        settings: of the run.
        file: where to; replaced if it exists.
    """
    figure = Figure(figsize=(13, 4.3), dpi=150, layout="constrained")
    figure.set_layout_engine("constrained", wspace=0.06)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(PANELS))
    for panel, (key, title, unit) in zip(axes, PANELS, strict=True):
        style(panel, title, unit.format(f"{settings.report_kl_coef:g}"))
        exchanges(panel, [line["update"] for line in updates if line.get("exchanged")])
        for module, colour in zip(settings.modules, colours_of(settings.num_agents), strict=True):
            curve(panel, *_training(updates, module, key), colour)
            points(panel, *_held_out(updates, module, key), colour)
    figure.suptitle(_title(settings), fontsize=13, color=INK, x=0.006, ha="left", fontweight="bold")
    _legend(figure, settings, any(line.get("exchanged") for line in updates))
    save(figure, file)


def save(figure: Figure, file: Path) -> None:
    """Writes a figure in the format that the file's ending names, in one step; replaces the file if it exists."""
    beside = file.with_name(f".{file.stem}.new{file.suffix}")
    figure.savefig(beside, facecolor="white")
    beside.replace(file)


def _training(updates: Sequence[Update], module: str, key: str) -> tuple[list[int], list[float]]:
    lines = [line for line in updates if "policy" in line]
    return [line["update"] for line in lines], [_number(line["policy"][module][key]) for line in lines]


def _held_out(updates: Sequence[Update], module: str, key: str) -> tuple[list[int], list[float]]:
    lines = [line for line in updates if "evaluation" in line]
    return [line["update"] for line in lines], [_number(line["evaluation"][module][key]) for line in lines]


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # matplotlib leaves a gap at NaN


def curve(panel: Axes, x: Sequence[float], y: Sequence[float], colour: str, faintly: bool = True) -> None:
    """Draws figures of training, of which there is one per update, behind those of evaluations if there are any."""
    strength: dict[str, Any] = {"linewidth": 1.1, "alpha": FAINTLY} if faintly else {"linewidth": 1.6}
    panel.plot(x, y, color=colour, marker="." if len(x) < 3 else None, **strength)


def points(panel: Axes, x: Sequence[float], y: Sequence[float], colour: str) -> None:
    """Draws figures of held-out evaluations."""
    panel.plot(x, y, color=colour, linewidth=1.8, **POINT, zorder=3)


def exchanges(panel: Axes, updates: Sequence[int]) -> None:
    """Marks the role exchanges that follow these updates."""
    for update in updates:
        panel.axvline(update + 0.5, color=FAINT, linewidth=0.8, linestyle=EXCHANGE, zorder=0)


def style(panel: Axes, title: str, unit: str) -> None:
    """Gives a panel over updates its title, labels and grid."""
    panel.set_title(title, loc="left", fontsize=11, color=INK)
    panel.set_ylabel(unit, fontsize=9, color=INK)
    panel.set_xlabel("update", fontsize=9, color=INK)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.tick_params(labelsize=9, colors=INK, length=3)
    panel.grid(axis="y", color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(FAINT)


def _title(settings: Settings) -> str:
    alone = settings.num_agents == 1
    method = f"Single-agent {settings.algorithm}" if alone else f"CORY, {settings.num_agents} agents"
    if not alone and not settings.critic:
        method += f" by {settings.algorithm}"
    return f"{method}  ·  {settings.task}  ·  {Path(settings.model).name}"


def _legend(figure: Figure, settings: Settings, exchanged: bool) -> None:
    colours = colours_of(settings.num_agents)
    handles = [Line2D([], [], color=c, linewidth=2, label=m) for m, c in zip(settings.modules, colours, strict=True)]
    handles.append(Line2D([], [], color=INK, linewidth=1.1, alpha=FAINTLY, label="training"))
    handles.append(Line2D([], [], color=INK, linewidth=1.8, **POINT, label="held out, bare query"))
    if exchanged:
        handles.append(Line2D([], [], color=FAINT, linewidth=1.2, linestyle=EXCHANGE, label="role exchange"))
    figure.legend(
        handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9, labelcolor=INK
    )


def colours_of(count: int) -> list[str]:
    """Returns a colour per series."""
    return [COLOURS[index % len(COLOURS)] for index in range(count)]
