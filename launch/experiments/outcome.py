"""Results of a search: how each trial ended, and the points (combinations of values), best first."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.console.errors import describe_error
from launch.display.tables import MAIN_METRICS
from launch.experiments.space import OBJECTIVE, SEED_KEY, TIME_KEY
from launch.run_folder.records import with_shown_kl
from policies.files import atomic_write
from policies.settings.settings import Settings
from policies.settings.yaml12 import to_cli

if TYPE_CHECKING:
    import pandas as pd
    from ray.tune.experiment import Trial

    from launch.experiments.search import Search

STATUS_DONE, STATUS_FAILED, STATUS_UNFINISHED = "done", "failed", "unfinished"


def trials_frame(trials: "Sequence[Trial]", search: "Search") -> "pd.DataFrame":
    """Returns a data frame with one row per trial: name, searched values, status, metrics."""
    import pandas as pd

    keys = dict.fromkeys([*search.axes, SEED_KEY])
    columns = ["trial", *keys, "status", TIME_KEY, *MAIN_METRICS, "exchanges", "seconds", "reason"]
    rows = [_trial_row(trial, search.settings, keys) for trial in trials]
    frame = pd.DataFrame(rows, columns=columns, dtype=object).sort_values("trial", ignore_index=True)
    return frame.astype(dict.fromkeys([*MAIN_METRICS, "seconds"], float))


def _trial_row(trial: "Trial", settings: Settings, keys: Iterable[str]) -> dict[str, Any]:
    last = trial.last_result or {}
    report, done, reason = last.get("cory", {}), last.get(TIME_KEY, 0), ""
    if trial.status == trial.ERROR:
        error, status = trial.get_pickled_error(), STATUS_FAILED
        reason = describe_error(error) if error else (trial.get_error() or "").strip().rpartition("\n")[2]
    elif trial.status != trial.TERMINATED:
        status = STATUS_UNFINISHED
    else:
        status = STATUS_DONE
    return {
        "trial": str(trial),
        **{key: trial.config["cory_settings"][key] for key in keys},
        "status": status,
        TIME_KEY: done,
        **(with_shown_kl(settings.selection_metrics(report)) if "evaluation" in report else {}),
        OBJECTIVE: last.get(OBJECTIVE),
        "exchanges": report.get("exchanges", 0),
        "seconds": last.get("time_total_s", 0.0),
        "reason": reason,
    }


def group_points(trials: "pd.DataFrame", keys: Sequence[str]) -> "list[pd.DataFrame]":
    """Groups trials by their values; complete points come first, each part ordered by mean objective, best first.

    A point is complete if all its trials are: they ran to their end and were evaluated there. The mean of an incomplete
    point covers only its lucky seeds, so it is not comparable with others.

    Returns:
        A frame per point, with the columns `complete` and `remark` added.
    """
    complete = (trials["status"] == STATUS_DONE) & trials[OBJECTIVE].notna()
    remarks = trials["trial"] + " " + trials["status"] + " after update " + trials[TIME_KEY].astype(str)
    trials = trials.assign(complete=complete, remark=remarks.where(trials["status"] != STATUS_DONE, ""))
    point_ids = trials[list(keys)].map(repr).agg(" ".join, axis="columns")

    def rank(point: "pd.DataFrame") -> tuple[bool, float]:
        values = point.loc[point["complete"], OBJECTIVE]
        return bool(point["complete"].all()), values.mean() if len(values) else -math.inf

    return sorted((point for _, point in trials.groupby(point_ids, sort=False)), key=rank, reverse=True)


def write_csv(trials: "pd.DataFrame", keys: Sequence[str], file: Path) -> None:
    """Writes one line per trial; missing values are empty."""
    texts = {key: trials[key].map(to_cli) for key in keys}
    atomic_write(file, trials.assign(**texts).to_csv(index=False, lineterminator="\n"))
