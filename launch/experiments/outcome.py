"""What a search found: how each trial ended, a point per combination of values, and how sure its mean is."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from rich.table import Table

from launch.console.configuration import Value
from launch.display.statistics import Estimate, mean_ci
from launch.display.tables import FINE, MAIN, show, shown, table
from launch.experiments.space import SEED, Axis, exact_value
from launch.run_folder.journal import replace_text

if TYPE_CHECKING:
    from ray.tune.experiment import Trial

    from launch.experiments.trials import Trials

DONE, COLLAPSED, STOPPED, FAILED, UNFINISHED = "done", "collapsed", "stopped early", "failed", "unfinished"
WHOLE = (DONE, COLLAPSED)
"""Trials whose figures are of their end; those that a scheduler stopped are not comparable with them."""
Figure = float | None


class TrialResult(NamedTuple):
    """A trial as it ended."""

    trial: str
    values: dict[str, Value]
    """Of the searched settings; under PBT the last ones."""
    seed: int
    status: str
    updates: int
    combined_reward: Figure
    """Held out, as `select_by` says, with the search's fixed `eval_kl_coef`, at the last evaluation."""
    task_reward: Figure
    kl: Figure
    exchanges: int
    seconds: float
    reason: str
    """Why it failed."""


class Point(NamedTuple):
    """All trials with the same values, over seeds."""

    values: dict[str, Value]
    trials: list[TrialResult]

    @property
    def whole(self) -> list[TrialResult]:
        """The trials that ran to their end and were evaluated there."""
        return [trial for trial in self.trials if trial.status in WHOLE and trial.combined_reward is not None]

    @property
    def complete(self) -> bool:
        """All of them did. Else its mean is that of the seeds that were lucky, so no other point's compares with it."""
        return len(self.whole) == len(self.trials)

    def estimate(self, name: str) -> Estimate | None:
        """The mean of a figure over whole trials."""
        estimate = mean_ci(getattr(trial, name) for trial in self.whole)
        return estimate if estimate.n else None


def collect_results(
    ended: "Sequence[Trial]", trials: "Trials", axes: Sequence[Axis], statuses: Mapping[str, str]
) -> list[TrialResult]:
    """Returns how a search's trials ended.

    Args:
        ended: as Tune leaves them.
        trials: what is known of them.
        axes: what was searched.
        statuses: of trials, by their id, before Tune ended and called all of them finished.
    """
    settings = trials.settings
    results = []
    for trial in ended:
        own, last = trials.values[trial.trial_id], trial.last_result or {}
        report = last.get("cory", {})
        figures = settings.choosing(report) if "evaluation" in report else {}
        # A warning that stood when a scheduler stopped the trial is not why it ended.
        collapsed = bool(report.get("collapsed")) and own.get("stop_on_collapse", settings.stop_on_collapse)
        done = int(last.get("updates", 0))
        status = statuses.get(trial.trial_id, trial.status)
        status, why = _status(trial, status, bool(collapsed), done, settings.updates)
        results.append(
            TrialResult(
                trial=str(trial),
                values={axis.key: own[axis.key] for axis in axes},
                seed=cast(int, own[SEED]),
                status=status,
                updates=done,
                combined_reward=_known(last.get("combined_reward")),
                task_reward=_known(figures.get("task_reward")),
                kl=_known(figures.get("kl")),
                exchanges=int(report.get("exchanges", 0)),
                seconds=float(last.get("time_total_s", 0.0)),
                reason=why,
            )
        )
    return sorted(results, key=lambda result: result.trial)


def _status(trial: "Trial", status: str, collapsed: bool, done: int, updates: int) -> tuple[str, str]:
    from launch.experiments.trials import failure

    if status == trial.ERROR:
        return FAILED, failure(trial)
    if status != trial.TERMINATED:
        return UNFINISHED, ""
    if done >= updates:
        return DONE, ""
    return (COLLAPSED if collapsed else STOPPED), ""


def _known(value: object) -> Figure:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def group_points(results: Sequence[TrialResult], apart: bool = False) -> list[Point]:
    """Groups trials by their values: complete points by their mean, best first, then the others likewise.

    Args:
        results: of all trials.
        apart: each trial is a point of its own, as under PBT, where clones are no independent trials.
    """
    groups: dict[str, Point] = {}
    for result in results:
        key = result.trial if apart else repr(result.values)
        groups.setdefault(key, Point(result.values, [])).trials.append(result)

    def selection_score(point: Point) -> tuple[bool, float]:
        estimate = point.estimate("combined_reward")
        return point.complete, -math.inf if estimate is None else estimate.mean

    return sorted(groups.values(), key=selection_score, reverse=True)


def write_csv(results: Sequence[TrialResult], file: Path) -> None:
    """Writes a line per trial; what is not known is empty."""
    text = io.StringIO()
    keys = [key for key in results[0].values if key != SEED] if results else []
    writer = csv.DictWriter(text, ["trial", *keys, *TrialResult._fields[2:]], lineterminator="\n")
    writer.writeheader()
    for result in results:
        row = {**result._asdict(), **{key: exact_value(result.values[key]) for key in keys}}
        writer.writerow({name: row[name] for name in writer.fieldnames})
    replace_text(file, text.getvalue())


def points_table(points: Sequence[Point], axes: Sequence[Axis]) -> Table:
    """Returns the points, best first, with the mean over their seeds; of combined rewards with its interval."""
    several = any(len(point.trials) > 1 for point in points)
    figures = ("combined_reward", *(key for key in MAIN if key != "combined_reward"))
    rows = table(
        [axis.key for axis in axes], [*(["seeds"] if several else []), *(shown(key).heading for key in figures)]
    )
    rows.add_column("", no_wrap=True)
    for point in points:
        count = f"{len(point.whole)}" if point.complete else f"{len(point.whole)} of {len(point.trials)}"
        combined, *others = [point.estimate(key) for key in figures]
        rows.add_row(
            *(axis.label(point.values[axis.key]) for axis in axes),
            *([count] if several else []),
            "-" if combined is None else combined.shown(FINE["combined_reward"]),
            *(show(estimate and estimate.mean, FINE[key]) for key, estimate in zip(figures[1:], others, strict=True)),
            ", ".join(_remark(trial) for trial in point.trials if trial.status != DONE),
        )
    return rows


def _remark(trial: TrialResult) -> str:
    if trial.status in (STOPPED, COLLAPSED):
        combined = show(trial.combined_reward, FINE["combined_reward"])
        return f"{trial.trial} {trial.status} at update {trial.updates}, {combined}"
    return f"{trial.trial} {trial.status}"
