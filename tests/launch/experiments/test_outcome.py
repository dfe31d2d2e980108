"""The results of a search: points, intervals and the file."""

import csv
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from ray.tune.experiment import Trial
from rich.console import Console

from launch.experiments.outcome import group_points, trials_frame, write_csv
from launch.experiments.search import Search
from launch.experiments.space import format_setting_value, read_axes
from launch.experiments.tables import points_table
from policies.settings.settings import Settings
from tests.paper import make_settings, paper_settings

KEYS = ["exchange_period", "lr"]
AXES = read_axes(["exchange_period=1,5,null", "lr=1e-6,1e-4"])


def result(number: int, period: int | None, seed: int, combined: float, status: str = "done") -> dict[str, Any]:
    return {
        "trial": f"trial_{number:05d}",
        "exchange_period": period,
        "lr": 1e-5,
        "seed": seed,
        "status": status,
        "updates": 9 if status == "done" else 3,
        "combined_reward": combined,
        "task_reward": combined + 1,
        "kl": 2.0,
        "exchanges": 0,
        "seconds": 90.0,
        "reason": "Out of memory." if status == "failed" else "",
    }


RESULTS = pd.DataFrame(
    [
        result(0, 1, 0, 0.1),
        result(1, 5, 0, 0.4),
        result(2, None, 0, math.nan, "failed"),
        result(3, 1, 1, 0.2),
        result(4, 5, 1, 0.6),
        result(5, None, 1, 0.9, "unfinished"),
        result(6, 1, 2, 0.3),
        result(7, 5, 2, math.nan),
    ]
).astype({"exchange_period": object})
RESULTS["exchange_period"] = pd.Series([1, 5, None, 1, 5, None, 1, 5], dtype=object)


def means(points: list[pd.DataFrame]) -> list[float]:
    return [point.loc[point["complete"], "combined_reward"].mean() for point in points]


def test_complete_points_are_ordered_by_mean_before_incomplete_points() -> None:
    points = group_points(RESULTS, KEYS)
    assert [point.iloc[0]["exchange_period"] for point in points] == [1, 5, None]
    assert means(points) == pytest.approx([0.2, 0.5, math.nan], nan_ok=True)
    counts = [(point["complete"].sum(), point["complete"].all()) for point in points]
    assert counts == [(3, True), (2, False), (0, False)]


def test_the_table_shows_failed_and_unfinished_trials() -> None:
    points = [([*map(format_setting_value, point.iloc[0][KEYS])], point) for point in group_points(RESULTS, KEYS)]
    console = Console(width=170)
    with console.capture() as capture:
        console.print(points_table(KEYS, points))
    first, second, last = (line.split() for line in capture.get().splitlines()[2:])
    assert first == ["1", "1e-05", "3", "+1.20", "±", "0.25", "2.00", "±", "0.00", "+0.200", "±", "0.248", "1.5"]
    assert second[:5] == ["5", "1e-05", "2", "of", "3"]
    assert " ".join(last).endswith("trial_00002 failed after update 3, trial_00005 unfinished after update 3")


def trial_row(settings: Settings, last: dict[str, Any], status: str = Trial.TERMINATED) -> "pd.Series[Any]":
    config = {"cory_settings": settings.model_dump() | {"seed": 0, "exchange_period": 5, "lr": 1e-5}}
    trial = Trial("cory", stub=True, trial_id="t", config=config, trial_name_creator=lambda trial: "trial_00000")
    trial.set_status(status)
    trial.run_metadata.last_result = last
    return trials_frame([trial], Search(settings, AXES)).iloc[0]


@pytest.mark.parametrize(
    ("status", "last", "shown"),
    [
        (Trial.TERMINATED, {"updates": 9}, "done"),
        (Trial.RUNNING, {"updates": 3}, "unfinished"),
        (Trial.PAUSED, {"updates": 3}, "unfinished"),
        (Trial.PENDING, {}, "unfinished"),
        (Trial.ERROR, {"updates": 3}, "failed"),
    ],
)
def test_the_status_of_a_trial_says_how_it_ended(status: str, last: dict[str, Any], shown: str) -> None:
    row = trial_row(paper_settings(num_updates=9), last, status)
    assert (row["trial"], row["lr"], row["exchange_period"]) == ("trial_00000", 1e-5, 5)
    assert (row["status"], row["updates"]) == (shown, last.get("updates", 0))


@pytest.mark.parametrize(("select_by", "task_reward"), [("bare", 1.0), ("chain", 2.0), ("mean", 3.0)])
def test_the_metrics_of_a_trial_are_those_of_select_by(select_by: str, task_reward: float) -> None:
    settings = make_settings({"select_by": select_by, "eval_average": True, "backend": "transformers"})
    evaluation = {"mean": {"task_reward": 1.0, "kl": 1.0}, "llm_mean": {"task_reward": 3.0, "kl": 3.0}}
    report = {"evaluation": evaluation, "last_response": {"task_reward": 2.0, "bare_kl": 2.0, "in_chain_kl": 9.0}}
    row = trial_row(settings, {"updates": 3, "combined_reward": 0.5, "cory": report})
    assert (row["task_reward"], row["kl"]) == (task_reward, task_reward)


def test_the_file_contains_every_trial(tmp_path: Path) -> None:
    write_csv(RESULTS, KEYS, tmp_path / "results.csv")
    lines = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [line["trial"] for line in lines] == list(RESULTS["trial"])
    assert [line["exchange_period"] for line in lines][:3] == ["1", "5", "null"]
    assert (lines[2]["status"], lines[2]["combined_reward"], lines[2]["reason"]) == (
        "failed",
        "",
        "Out of memory.",
    )


def test_a_search_without_trials_has_a_file_too(tmp_path: Path) -> None:
    empty = trials_frame([], Search(paper_settings(), AXES))
    write_csv(empty, KEYS, tmp_path / "results.csv")
    assert (tmp_path / "results.csv").read_text().startswith("trial,exchange_period,lr,seed,status,updates,")
