"""Searches through Tune, with a trial that costs nothing."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from ray import tune

from launch.cluster.placement import make_node
from launch.console.errors import CommandError
from launch.experiments.search import Search
from launch.experiments.space import read_axes
from launch.experiments.tuning import check_trial_placement, run_trials
from tests.paper import paper_settings
from tests.policies.conftest import ray_session

__all__ = ["ray_session"]


class Climb(tune.Trainable):
    """Each update adds the learning rate to the reward.

    A trial with the learning rate 0.4 fails in update 4, and one with 0.6 when it starts. One with 0.2 stops the search
    in update 4, once.
    """

    def setup(self, config: dict[str, Any]) -> None:
        if config["cory_settings"]["lr"] == 0.6:
            raise RuntimeError("This trial does not start.")
        self.config, self.settings = config, config["cory_settings"]
        self.reward = 0.0

    def step(self) -> dict[str, Any]:
        if self.settings["lr"] == 0.2 and self.iteration == 3 and "stopped" in self.config:
            file = Path(self.config["stopped"])
            if not file.exists():
                os.kill(self.config["driver"], signal.SIGUSR1)  # as `request_stop` does
            file.touch()
        if self.settings["lr"] == 0.4 and self.iteration == 3:
            raise RuntimeError("This trial fails.")
        self.reward += self.settings["lr"]
        updates = self.iteration + 1
        done = updates == self.settings["num_updates"]
        return {"updates": updates, "combined_reward": self.reward, "done": done, "cory": {"update": updates}}

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "reward").write_text(str(self.reward))

    def load_checkpoint(self, folder: str) -> None:
        self.reward = float((Path(folder) / "reward").read_text())


def make_search(*over: str) -> Search:
    settings = paper_settings(num_updates=6, eval_every=2, checkpoint_every=2, backend="transformers")
    return Search(settings, read_axes(over), concurrent=1)


def run_climb(folder: Path, search: Search, trainable: Any = Climb, **config: Any) -> pd.DataFrame:
    """Runs or resumes a search as `cory tune` does."""
    return run_trials(trainable, {"cory_settings": search.space(lambda settings: settings), **config}, search, folder)


def read_progress(trial: Path) -> tuple[list[int], list[float]]:
    """Returns the updates that a trial reported, and their rewards."""
    with (trial / "progress.csv").open() as file:
        reports = list(csv.DictReader(file))
    return [int(report["updates"]) for report in reports], [float(report["combined_reward"]) for report in reports]


@pytest.mark.slow
def test_a_stopped_search_resumes_its_trials_from_their_checkpoints_and_a_failed_one_stops_no_other(
    ray_session: None, tmp_path: Path
) -> None:
    search = make_search("lr=0.1,0.2,0.4,0.6")
    stopping = {"driver": os.getpid(), "stopped": str(tmp_path / "stopped")}
    frame = run_climb(tmp_path / "climb", search, **stopping)
    assert list(frame["status"])[:2] == ["done", "unfinished"] and "failed" not in list(frame["status"])

    frame = run_climb(tmp_path / "climb", search, **stopping)
    assert list(frame["lr"]) == [0.1, 0.2, 0.4, 0.6]
    assert list(frame["status"]) == ["done", "done", "failed", "failed"]
    assert list(frame["reason"]) == [
        "",
        "",
        *(f"RuntimeError: This trial {error}." for error in ("fails", "does not start")),
    ]
    assert frame["combined_reward"][1] == pytest.approx(6 * 0.2)
    updates, rewards = read_progress(tmp_path / "climb" / "trial_00001")
    assert updates.count(1) == 1 and sorted(set(updates)) == list(range(1, 7))
    assert rewards == pytest.approx([0.2 * update for update in updates])

    again = run_climb(tmp_path / "climb", search, **stopping)
    assert list(again["status"]) == list(frame["status"])


def test_a_search_that_does_not_fit_on_the_cluster_is_rejected() -> None:
    nodes = [make_node("a", {"CPU": 3.0}), make_node("b", {"CPU": 1.0})]
    settings = paper_settings(backend="transformers", num_runners=0)
    check_trial_placement([settings], nodes)
    with pytest.raises(
        CommandError,
        match=r"no room for 1 of 1 driver: node a has 0 GPUs left; .*\. Request fewer processes",
    ):
        check_trial_placement([settings, settings.model_copy(update={"gpus_per_learner": 0.5})], nodes)
