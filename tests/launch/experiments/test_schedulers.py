"""Population-based training, stopping and resuming through Tune, with a trial that costs nothing."""

from __future__ import annotations

import csv
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.train._internal.session import _TrainingResult
from ray.train._internal.storage import StorageContext
from ray.tune import Checkpoint
from ray.tune.experiment import Trial

from launch.cluster.placement import make_node
from launch.console.errors import CommandError
from launch.console.interrupts import Interrupts
from launch.experiments.callbacks import StopCallback
from launch.experiments.schedulers import FifoScheduler
from launch.experiments.search import Search, check_trial_placement
from launch.experiments.space import read_axes
from launch.experiments.trials import Trials
from launch.experiments.tuning import make_scheduler, run_trials
from tests.paper import paper_settings
from tests.policies.conftest import ray_session

__all__ = ["ray_session"]


class Climb(tune.Trainable):
    """Each update adds the learning rate to the reward. A trial with the learning rate 0.4 fails in update 4."""

    def setup(self, config: dict[str, Any]) -> None:
        self.settings = config["cory_settings"]
        self.reward = 0.0

    def step(self) -> dict[str, Any]:
        if self.settings["lr"] == 0.4 and self.iteration == 3:
            raise RuntimeError("This trial fails.")
        self.reward += self.settings["lr"]
        return {"updates": self.iteration + 1, "combined_reward": self.reward}

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "reward").write_text(str(self.reward))

    def load_checkpoint(self, folder: str) -> None:
        self.reward = float((Path(folder) / "reward").read_text())


def run_climb(
    folder: Path,
    search: Search,
    space: dict[str, Any],
    *callbacks: tune.Callback,
    interrupts: Interrupts | None = None,
    trainable: Any = Climb,
) -> tuple[list[Trial], StopCallback]:
    """Runs a search as `cory tune` does."""
    folder.mkdir(exist_ok=True)
    trials = Trials(folder, search.settings, [axis.key for axis in search.axes], lambda settings: settings)
    stop = StopCallback(interrupts or Interrupts(lambda: None))
    scheduler = make_scheduler(search, trials, stop.requested)
    return run_trials(trainable, space, folder, search, scheduler, stop, callbacks), stop


def pbt_search(samples: int, **settings: Any) -> Search:
    axes = read_axes(["lr=uniform:0.001:1"])
    return Search(paper_settings(**settings), axes, "pbt", samples, seeds=1, concurrent=None)


@pytest.mark.slow
def test_the_worst_member_becomes_a_clone_of_the_best_and_members_do_not_wait_for_a_failed_trial(
    ray_session: None, tmp_path: Path
) -> None:
    space = {"seed": 0, "lr": tune.grid_search([0.5, 0.4, 0.01])}
    trials, _ = run_climb(
        tmp_path / "climb",
        pbt_search(3, num_updates=8, eval_every=2),
        {"cory_settings": space},
        trainable=tune.with_resources(Climb, {"cpu": 2}),  # two of the three trials fit at a time
    )
    assert [(trial.status, trial.last_result["updates"]) for trial in trials] == [
        ("TERMINATED", 8),
        ("ERROR", 3),
        ("TERMINATED", 8),
    ]
    updates, rewards = read_progress(trials[2])
    assert updates == list(range(1, 9))
    assert rewards[:2] == pytest.approx([0.01, 0.02])
    new_lr = rewards[3] - rewards[2]
    assert new_lr != 0.01 and 0.001 <= new_lr <= 1
    assert rewards[2] == pytest.approx(2 * 0.5 + new_lr)  # the donor's reward after two updates, plus one own update


def read_progress(trial: Any) -> tuple[list[int], list[float]]:
    """Returns the updates that a trial reported, and their rewards."""
    with Path(trial.path, "progress.csv").open() as file:  # result.json loses lines when a trial is paused
        reports = list(csv.DictReader(file))
    return [int(report["updates"]) for report in reports], [float(report["combined_reward"]) for report in reports]


def storage(folder: Path) -> StorageContext:
    return StorageContext(storage_path=str(folder.parent), experiment_dir_name=folder.name)


def member(folder: Path, seed: int, lr: float) -> Trial:
    """Creates a trial of a search as Tune does."""
    params = {"cory_settings/lr": lr, "cory_settings/seed": seed}
    trial = Trial("Climb", stub=True, trial_id=f"p_{seed}", storage=storage(folder), evaluated_params=params)
    trial.init_local_path()
    return trial


def save(trial: Trial, update: int) -> None:
    """Adds a checkpoint to a trial."""
    folder = Path(trial.path, f"checkpoint_{update}")
    folder.mkdir(parents=True)
    (folder / "owner").write_text(str(trial))
    metrics = {"updates": update, "combined_reward": trial.config["cory_settings"]["lr"]}
    trial.on_checkpoint(_TrainingResult(Checkpoint.from_directory(str(folder)), metrics))
    trial.run_metadata.last_result = metrics


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StorageContext, "experiment_driver_staging_path", str(tmp_path / "staging"))


def test_a_trial_that_starts_after_its_search_was_moved_has_the_current_folder_and_paths(
    tmp_path: Path, staged: None
) -> None:
    before, after = tmp_path / "before", tmp_path / "there" / "after"
    after.mkdir(parents=True)
    trial = member(before, 3, 1e-4)
    trial.evaluated_params["cory_settings/data"] = "other.jsonl"
    shared = storage(before)
    base = paper_settings(task="custom", data="q.jsonl", reward="a:b")
    keys = ["lr", "data"]
    trials = Trials(after, base, keys, lambda settings: settings.model_copy(update={"data": f"/{settings.data}"}))
    FifoScheduler(trials, lambda: False).on_trial_add(None, trial)
    assert Path(trial.path) == after / trial.relative_logdir
    assert Path(shared.experiment_fs_path) == before  # Tune's storage, which other trials share
    assert trials.values == {"p_3": {"lr": 1e-4, "data": "other.jsonl", "seed": 3}}
    settings = trial.config["cory_settings"]
    assert (settings["lr"], settings["seed"], settings["data"]) == (1e-4, 3, "/other.jsonl")


def test_a_clone_keeps_its_values_and_its_checkpoint_when_its_search_resumes(tmp_path: Path, staged: None) -> None:
    folder, settings = tmp_path / "search", paper_settings()

    def add(*members: Trial) -> Trials:
        trials = Trials(folder, settings, ["lr"], lambda settings: settings)
        for trial in members:
            trials.add(trial)
        return trials

    worse, better = member(folder, 0, 0.01), member(folder, 1, 0.5)
    trials = add(worse, better)
    assert trials.origin(worse) is None
    for trial in (worse, better):
        save(trial, 2)
    assert trials.origin(worse) == str(worse)
    trials.clone(better, worse, {"lr": 0.6, "seed": 1})
    assert worse.config["cory_settings"]["lr"] == 0.6
    assert trials.origin(worse) == str(better)
    assert Path(worse.checkpoint.path, "owner").read_text() == str(better)
    assert Path(worse.checkpoint.path).parent == Path(worse.path)  # so it moves along with the search
    worse.set_config({"cory_settings": {"lr": 0.01}})  # as Tune does when it resumes
    resumed = add(worse)
    assert resumed.values["p_0"] == {"lr": 0.6, "seed": 1} and resumed.origin(worse) == str(better)
    save(worse, 3)
    resumed = add(worse)
    assert resumed.values["p_0"] == {"lr": 0.6, "seed": 1} and resumed.origin(worse) == str(worse)
    killed = member(folder, 0, 0.01)  # before Tune stored the clone
    killed.set_config({"cory_settings": {"lr": 0.01}})
    save(killed, 2)
    assert add(killed).values["p_0"] == {"lr": 0.01, "seed": 0}


@pytest.mark.slow
def test_a_stopped_search_saves_its_trials_and_resumes_in_another_folder_with_its_clones(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNE_DISABLE_SIGINT_HANDLER", "1")
    interrupts = Interrupts(lambda: None)

    class RequestStop(tune.Callback):
        """Requests a stop before the first update of the clone, which starts after update 3."""

        def on_trial_start(self, iteration: int, trials: Sequence[Any], trial: Any, **_: Any) -> None:
            if trial.trial_id.endswith("_00001") and trial.checkpoint is not None:
                interrupts.requested = signal.SIGINT

    space = {"lr": tune.grid_search([0.5, 0.01]), "seed": 0}
    config = {"cory_settings": space, "callbacks_class": Climb}  # RLlib's settings contain classes too
    search = pbt_search(2, num_updates=8, eval_every=3, checkpoint_every=100)
    _, stop = run_climb(tmp_path / "climb", search, config, RequestStop(), interrupts=interrupts)
    assert len(stop.statuses) == 2 and "TERMINATED" not in stop.statuses.values()

    moved = tmp_path / "elsewhere"
    (tmp_path / "climb").rename(moved)
    trials, _ = run_climb(moved, search, config)
    assert not (tmp_path / "climb").exists()
    (clone,) = [trial for trial in trials if trial.trial_id.endswith("_00001")]
    updates, rewards = read_progress(clone)
    assert updates == list(range(1, 9))
    new_lr = rewards[3] - 3 * 0.5
    assert rewards[:3] == pytest.approx([0.01, 0.02, 0.03]) and new_lr != pytest.approx(0.01)
    assert rewards[5] - rewards[4] == pytest.approx(rewards[4] - rewards[3]) == pytest.approx(new_lr)


def test_a_search_that_does_not_fit_on_the_cluster_is_rejected() -> None:
    nodes = [make_node("a", {"CPU": 3.0}), make_node("b", {"CPU": 1.0})]
    settings = paper_settings(backend="transformers", num_runners=0)
    check_trial_placement([settings], nodes)
    with pytest.raises(
        CommandError,
        match=r"1 of 1 driver with CPU=1, GPU=0\.5 \(.*\)\. Request fewer processes",
    ):
        check_trial_placement([settings, settings.model_copy(update={"gpus_per_learner": 0.5})], nodes)
