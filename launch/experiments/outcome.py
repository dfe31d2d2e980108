"""What a search found: how each trial ended, and its points, the combinations of values, best first."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.console.errors import describe_error
from launch.display.tables import FINE, format_number
from launch.experiments.space import OBJECTIVE, SEED_KEY, TIME_KEY, Axis, to_axis_text
from launch.run_folder.journal import atomic_write

if TYPE_CHECKING:
    import pandas as pd
    from ray.tune.experiment import Trial

    from launch.experiments.trials import Trials

STATUS_DONE, STATUS_COLLAPSED, STATUS_STOPPED, STATUS_FAILED, STATUS_UNFINISHED = "done", "collapsed", "stopped early", "failed", "unfinished"
COMPLETE_STATUSES = (STATUS_DONE, STATUS_COLLAPSED)
"""Trials whose figures are of their end; those that a scheduler stopped are not comparable with them."""
OUTCOME_METRICS = (OBJECTIVE, "task_reward", "kl")
"""Held out, as `select_by` says, with the search's fixed `eval_kl_coef`, at the last evaluation."""


def trials_frame(
    ended: "Sequence[Trial]", trials: "Trials", axes: Sequence[Axis], statuses: Mapping[str, str]
) -> "pd.DataFrame":
    """Returns how a search's trials ended, a row each: name, searched values (under PBT the last ones), and figures.

    Args:
        ended: as Tune leaves them.
        trials: what is known of them.
        axes: what was searched.
        statuses: of trials, by their id, before Tune ended and called all of them finished.
    """
    import pandas as pd

    keys = dict.fromkeys([*(axis.key for axis in axes), SEED_KEY])
    columns = ["trial", *keys, "status", TIME_KEY, *OUTCOME_METRICS, "exchanges", "seconds", "reason"]
    rows = [_row(trial, statuses.get(trial.trial_id, trial.status), trials) for trial in ended]
    frame = pd.DataFrame(rows, columns=columns, dtype=object).sort_values("trial", ignore_index=True)
    return frame.astype(dict.fromkeys([*OUTCOME_METRICS, "seconds"], float))


def _row(trial: "Trial", status: str, trials: "Trials") -> dict[str, Any]:
    settings = trials.settings.model_copy(update=trials.values[trial.trial_id])
    last = trial.last_result or {}
    report, done, why = last.get("cory", {}), last.get(TIME_KEY, 0), ""
    if status == trial.ERROR:
        error = trial.get_pickled_error()
        status, why = STATUS_FAILED, describe_error(error) if error else (trial.get_error() or "").strip().rpartition("\n")[2]
    elif status != trial.TERMINATED:
        status = STATUS_UNFINISHED
    elif done >= settings.num_updates:
        status = STATUS_DONE
    else:  # a warning that stood when a scheduler stopped the trial is not why it ended
        status = STATUS_COLLAPSED if report.get("collapsed") and settings.stop_on_collapse else STATUS_STOPPED
    return {
        "trial": str(trial),
        **trials.values[trial.trial_id],
        "status": status,
        TIME_KEY: done,
        **(settings.selection_metrics(report) if "evaluation" in report else {}),
        OBJECTIVE: last.get(OBJECTIVE),
        "exchanges": report.get("exchanges", 0),
        "seconds": last.get("time_total_s", 0.0),
        "reason": why,
    }


def group_points(trials: "pd.DataFrame", keys: Sequence[str], apart: bool = False) -> "list[pd.DataFrame]":
    """Groups trials by their values: complete points by their mean, best first, then the others likewise.

    A point is complete if all its trials are `whole`: ran to their end and were evaluated there. Else its mean is that
    of the seeds that were lucky, so no other point's compares with it.

    Args:
        trials: of `collect_results`.
        keys: the searched settings.
        apart: each trial is a point of its own, as under PBT, where clones are no independent trials.
    """
    whole = trials["status"].isin(COMPLETE_STATUSES) & trials[OBJECTIVE].notna()
    trials = trials.assign(whole=whole, remark=[_remark(trial) for _, trial in trials.iterrows()])
    by = trials["trial"] if apart else trials[list(keys)].map(repr).agg(" ".join, axis="columns")

    def rank(point: "pd.DataFrame") -> tuple[bool, float]:
        values = point.loc[point["whole"], OBJECTIVE]
        return bool(point["whole"].all()), values.mean() if len(values) else -math.inf

    return sorted((point for _, point in trials.groupby(by, sort=False)), key=rank, reverse=True)


def _remark(trial: Mapping[str, Any]) -> str:
    if trial["status"] in (STATUS_STOPPED, STATUS_COLLAPSED):
        reached = format_number(trial[OBJECTIVE], FINE[OBJECTIVE])
        return f"{trial['trial']} {trial['status']} at update {trial[TIME_KEY]}, {reached}"
    return "" if trial["status"] == STATUS_DONE else f"{trial['trial']} {trial['status']}"


def write_csv(trials: "pd.DataFrame", keys: Sequence[str], file: Path) -> None:
    """Writes a line per trial; what is not known is empty."""
    exact = {key: trials[key].map(to_axis_text) for key in keys}
    atomic_write(file, trials.assign(**exact).to_csv(index=False, lineterminator="\n"))
