"""What a search found: a row per trial, a point per combination of values, and how sure its mean is."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from launch.console.configuration import Value
from launch.display.rows import show
from launch.evaluation.statistics import interval
from launch.run_folder.journal import replace_text
from launch.search.space import SEED, Axis, exact_value, show_value

if TYPE_CHECKING:
    from ray.tune.experiment import Trial

DONE, COLLAPSED, STOPPED, FAILED, UNFINISHED = "done", "collapsed", "stopped early", "failed", "unfinished"
WHOLE = (DONE, COLLAPSED)
"""Trials whose figures are of their end; those that a scheduler stopped are not comparable with them."""
Figure = float | None


class Row(NamedTuple):
    """A trial as it ended."""

    trial: str
    values: dict[str, Value]
    """Of the searched settings; under PBT the last ones."""
    seed: int
    status: str
    updates: int
    combined_reward: Figure
    """Held out, mean of the policies, with the search's fixed `eval_kl_coef`, at the last evaluation."""
    task_reward: Figure
    kl: Figure
    exchanges: int
    seconds: float
    reason: str
    """Why it failed."""


class Point(NamedTuple):
    """All trials with the same values, over seeds."""

    values: dict[str, Value]
    rows: list[Row]

    @property
    def whole(self) -> list[Row]:
        """The trials that ran to their end and were evaluated there."""
        return [row for row in self.rows if row.status in WHOLE and row.combined_reward is not None]

    def mean(self, name: str) -> Figure:
        """The mean of a figure over whole trials."""
        values = [value for row in self.whole if (value := getattr(row, name)) is not None]
        return float(np.mean(values)) if values else None


def rows_of(trials: "Sequence[Trial]", axes: Sequence[Axis], updates: int) -> list[Row]:
    """Returns the rows of a search's trials.

    Args:
        trials: as Tune leaves them.
        axes: what was searched.
        updates: of a whole trial.
    """
    rows = []
    for trial in trials:
        settings, last = trial.config["cory_settings"], trial.last_result or {}
        report = last.get("cory", {})
        mean = report.get("evaluation", {}).get("mean", {})
        # A warning that stood when a scheduler stopped the trial is not why it ended.
        collapsed = bool(report.get("collapsed")) and settings["stop_on_collapse"]
        status, why = _status(trial, int(last.get("updates", 0)), collapsed, updates)
        rows.append(
            Row(
                trial=str(trial),
                values={axis.key: settings[axis.key] for axis in axes},
                seed=settings[SEED],
                status=status,
                updates=int(last.get("updates", 0)),
                combined_reward=_known(last.get("combined_reward")),
                task_reward=_known(mean.get("task_reward")),
                kl=_known(mean.get("kl")),
                exchanges=int(report.get("exchanges", 0)),
                seconds=float(last.get("time_total_s", 0.0)),
                reason=why,
            )
        )
    return sorted(rows, key=lambda row: row.trial)


def _status(trial: "Trial", done: int, collapsed: bool, updates: int) -> tuple[str, str]:
    from launch.search.progress import why

    if trial.status == trial.ERROR:
        return FAILED, why(trial)
    if trial.status != trial.TERMINATED:
        return UNFINISHED, ""
    if done >= updates:
        return DONE, ""
    return (COLLAPSED if collapsed else STOPPED), ""


def _known(value: object) -> Figure:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def points_of(rows: Sequence[Row], apart: bool = False) -> list[Point]:
    """Groups trials by their values, those with the best mean first and those without any last.

    Args:
        rows: of all trials.
        apart: each trial is a point of its own, as under PBT, where clones are no independent trials.
    """
    groups: dict[str, Point] = {}
    for row in rows:
        groups.setdefault(row.trial if apart else repr(row.values), Point(row.values, [])).rows.append(row)

    def worth(point: Point) -> float:
        mean = point.mean("combined_reward")
        return -math.inf if mean is None else mean

    return sorted(groups.values(), key=worth, reverse=True)


def write_csv(rows: Sequence[Row], file: Path) -> None:
    """Writes a line per trial; what is not known is empty."""
    text = io.StringIO()
    keys = [key for key in rows[0].values if key != SEED] if rows else []
    figures = ("updates", "combined_reward", "task_reward", "kl", "exchanges", "seconds", "reason")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", *keys, SEED, "status", *figures])
    for row in rows:
        values = [exact_value(row.values[key]) for key in keys]
        found: Mapping[str, object] = row._asdict()
        writer.writerow([row.trial, *values, row.seed, row.status, *(found[name] for name in figures)])
    replace_text(file, text.getvalue())


def table(points: Sequence[Point]) -> Table:
    """Returns the points, best first, with the mean over their seeds."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    several = any(len(point.rows) > 1 for point in points)
    for key in points[0].values:
        made.add_column(key, no_wrap=True)
    if several:
        made.add_column("seeds", justify="right")
    for heading in ("combined", "task reward", "KL"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("", no_wrap=True)
    for point in points:
        ends = interval([row.combined_reward for row in point.whole if row.combined_reward is not None])
        combined = show(point.mean("combined_reward"), "{:+.3f}")
        made.add_row(
            *map(show_value, point.values.values()),
            *([str(len(point.whole))] if several else []),
            combined if ends is None else f"{combined} [{ends[0]:+.3f}, {ends[1]:+.3f}]",
            show(point.mean("task_reward"), "{:+.2f}"),
            show(point.mean("kl"), "{:.2f}"),
            ", ".join(_remark(row) for row in point.rows if row.status != DONE),
        )
    return made


def _remark(row: Row) -> str:
    if row.status in (STOPPED, COLLAPSED):
        return f"{row.trial} {row.status} at update {row.updates}, {show(row.combined_reward, '{:+.3f}')}"
    return f"{row.trial} {row.status}"
