"""The progress output of a search, with Tune's trials but without its processes."""

import io
from pathlib import Path
from typing import Any

import pytest
from ray.tune.experiment import Trial

from launch.display.terminal import ProgressPrinter
from launch.experiments.callbacks import ProgressCallback
from launch.experiments.search import read_reports
from launch.experiments.trials import Trials
from launch.run_folder.journal import Journal
from tests.paper import paper_settings


def trial() -> Trial:
    return Trial("Cory", stub=True, trial_id="a_00000")


def make_callback(journal: Journal, progress: ProgressPrinter, updates: int) -> ProgressCallback:
    trials = Trials(journal.path.parent, paper_settings(num_updates=updates), ["lr"], lambda settings: settings)
    trials.values["a_00000"] = {"lr": 1e-4, "seed": 0}
    return ProgressCallback(journal, progress, trials)


def result(update: int) -> dict[str, Any]:
    figures = {"task_reward": 0.1, "kl": 0.0, "combined_reward": 0.1}
    report = {"update": update, "samples": [], "evaluation": {"mean": figures}}
    return {"updates": update, "combined_reward": 0.1, "cory": report}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "reports.jsonl", "updates")


def test_an_update_is_printed_with_the_values_of_its_trial_at_that_time(journal: Journal, tmp_path: Path) -> None:
    output = io.StringIO()
    callback = make_callback(journal, ProgressPrinter(output, 2), 2)
    callback.on_trial_start(0, [], trial())
    callback.on_trial_result(1, [], trial(), result(1))
    callback.trials.values["a_00000"] = {"lr": 2e-4, "seed": 1}  # as PBT does once the member waits
    callback.on_trial_start(1, [], trial())
    callback.on_trial_result(2, [], trial(), result(2))
    first, second = output.getvalue().splitlines()
    assert "lr=0.0001 seed=0" in first and "lr=0.0002 seed=1" in second
    assert [report["values"]["lr"] for report in read_reports(tmp_path)] == [1e-4, 2e-4]


def test_an_update_that_a_resumed_trial_repeats_counts_once(journal: Journal) -> None:
    make_callback(journal, ProgressPrinter(io.StringIO(), 3), 3).on_trial_result(1, [], trial(), result(1))
    output = io.StringIO()
    callback = make_callback(journal, ProgressPrinter(output, 3, done=1), 3)
    for update in (1, 2, 2, 3):
        callback.on_trial_result(1, [], trial(), result(update))
    assert output.getvalue().splitlines()[-1].endswith("0:00 left")
