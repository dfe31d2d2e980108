"""A run's curves: task reward, KL and combined reward of each policy, with the role exchanges and averagings."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from launch.display.drawing import FAINT, INK, averagings, colours_of, curve, exchanges, points, style
from launch.display.plot import Key, Panel, Plot
from launch.run_folder.records import Update
from policies.models.model_names import AVERAGE
from policies.settings.settings import Settings

PANELS = (
    ("task_reward", "Task reward", "per response"),
    ("kl", "KL to the initial policy", "nats per response"),
    ("combined_reward", "Combined reward", "task reward − {} · KL"),
)
TRAINING, HELD_OUT = Key("training", INK, "training"), Key("held out, bare query", INK, "held out")
EXCHANGED = Key("role exchange", FAINT, "exchange")
AVERAGED = Key("averaging", INK, "averaging")
"""Entries of a legend, beside those of policies."""


def draw(updates: Sequence[Update], settings: Settings, file: Path) -> None:
    """Draws curves into a PNG, or another format that the file's ending names.

    Args:
        updates: the lines of `metrics.jsonl`.
        settings: of the run.
        file: where to; replaced if it exists.
    """
    exchanged = [line["update"] for line in updates if line.get("exchanged")]
    averaged = [line["update"] for line in updates if line.get("averaged")]
    marks = exchanged, averaged
    panels = [Panel(partial(_panel, updates, settings, marks, key, title, unit), title) for key, title, unit in PANELS]
    legend = [*(Key(*pair) for pair in _colours(updates, settings).items()), TRAINING, HELD_OUT]
    legend += [key for key, marked in ((EXCHANGED, exchanged), (AVERAGED, averaged)) if marked]
    Plot("curves", _title(settings), "", panels, legend).save(file)


def _panel(
    updates: Sequence[Update],
    settings: Settings,
    marks: tuple[Sequence[int], Sequence[int]],
    key: str,
    title: str,
    unit: str,
    panel: Axes,
) -> None:
    style(panel, title, unit.format(f"{settings.report_kl_coef:g}"))
    exchanges(panel, marks[0])
    averagings(panel, marks[1])
    trained = [line for line in updates if "policy" in line]
    evaluated = [line for line in updates if "evaluation" in line]
    for module, colour in _colours(updates, settings).items():
        if module != AVERAGE:
            figures = [_number(line["policy"][module][key]) for line in trained]
            curve(panel, [line["update"] for line in trained], figures, colour)
        figures = [_number(line["evaluation"].get(module, {}).get(key)) for line in evaluated]
        points(panel, [line["update"] for line in evaluated], figures, colour)


def _colours(updates: Sequence[Update], settings: Settings) -> dict[str, str]:
    """Returns the colour of each LLM, and of their mean where it was evaluated."""
    average = [AVERAGE] if any(AVERAGE in line.get("evaluation", {}) for line in updates) else []
    names = [*settings.modules, *average]
    return dict(zip(names, colours_of(len(names)), strict=True))


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # matplotlib leaves a gap at NaN


def _title(settings: Settings) -> str:
    alone = settings.num_agents == 1
    method = f"Single-agent {settings.algorithm}" if alone else f"CORY, {settings.num_agents} agents"
    if len(settings.modules) != settings.num_agents:
        method += f" played by {len(settings.modules)} LLM{'s' * (len(settings.modules) > 1)}"
    if not alone and not settings.critic:
        method += f" by {settings.algorithm}"
    names = ", ".join(Path(name).name for name in dict.fromkeys(settings.models.values()))
    return f"{method}  ·  {settings.task}  ·  {names}"
