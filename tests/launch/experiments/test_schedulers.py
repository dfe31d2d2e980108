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
from launch.experiments.search import Search, check_room
from launch.experiments.space import read_axes
from launch.experiments.trials import Trials
from launch.experiments.tuning import make_scheduler, run_trials
from policies.settings.settings import Settings
from tests.policies.conftest import ray_session

__all__ = ["ray_session"]


class Climb(tune.Trainable):
    """Worth its learning rate in every update; the one with 0.4 fails in the fourth."""

    def setup(self, config: dict[str, Any]) -> None:
        """Takes the settings."""
        self.settings = config["cory_settings"]
        self.selection_score = 0.0

    def step(self) -> dict[str, Any]:
        """One update."""
        if self.settings["lr"] == 0.4 and self.iteration == 3:
            raise RuntimeError("This one fails.")
        self.selection_score += self.settings["lr"]
        return {"updates": self.iteration + 1, "combined_reward": self.selection_score}

    def save_checkpoint(self, folder: str) -> None:
        """Writes all that it is."""
        (Path(folder) / "worth").write_text(str(self.selection_score))

    def load_checkpoint(self, folder: str) -> None:
        """Takes up what was written."""
        self.selection_score = float((Path(folder) / "worth").read_text())


def climb(
    folder: Path,
    search: Search,
    space: dict[str, Any],
    *more: tune.Callback,
    interrupts: Interrupts | None = None,
    trainable: Any = Climb,
) -> tuple[list[Trial], StopCallback]:
    """Runs a search as `cory tune` does."""
    folder.mkdir(exist_ok=True)
    trials = Trials(folder, search.settings, [axis.key for axis in search.axes], lambda settings: settings)
    stop = StopCallback(interrupts or Interrupts(lambda: None))
    scheduler = make_scheduler(search, trials, stop.requested)
    return run_trials(trainable, space, folder, search, scheduler, stop, more), stop


def population(samples: int, **settings: Any) -> Search:
    axes = read_axes(["lr=uniform:0.001:1"])
    return Search(Settings(**settings), axes, "pbt", samples, seeds=1, concurrent=None)


@pytest.mark.slow
def test_the_worst_continues_as_the_best_and_nobody_waits_for_a_trial_that_failed(
    ray_session: None, tmp_path: Path
) -> None:
    space = {"seed": 0, "lr": tune.grid_search([0.5, 0.4, 0.01])}
    trials, _ = climb(
        tmp_path / "climb",
        population(3, num_updates=8, eval_every=2),
        {"cory_settings": space},
        trainable=tune.with_resources(Climb, {"cpu": 2}),  # there is room for two of the three
    )
    assert [(trial.status, trial.last_result["updates"]) for trial in trials] == [
        ("TERMINATED", 8),
        ("ERROR", 3),
        ("TERMINATED", 8),
    ]
    updates, worth = reported(trials[2])
    assert updates == list(range(1, 9))
    assert worth[:2] == pytest.approx([0.01, 0.02])
    drawn = worth[3] - worth[2]
    assert drawn != 0.01 and 0.001 <= drawn <= 1
    assert worth[2] == pytest.approx(2 * 0.5 + drawn)  # the first one's after two updates, and one with its own rate


def reported(trial: Any) -> tuple[list[int], list[float]]:
    """The updates that a trial reported, and their worth."""
    with Path(trial.path, "progress.csv").open() as file:  # result.json loses lines where a trial was paused
        reports = list(csv.DictReader(file))
    return [int(report["updates"]) for report in reports], [float(report["combined_reward"]) for report in reports]


def storage(folder: Path) -> StorageContext:
    return StorageContext(storage_path=str(folder.parent), experiment_dir_name=folder.name)


def member(folder: Path, seed: int, lr: float) -> Trial:
    """A trial of a search in a folder, as Tune makes it."""
    params = {"cory_settings/lr": lr, "cory_settings/seed": seed}
    made = Trial("Climb", stub=True, trial_id=f"p_{seed}", storage=storage(folder), evaluated_params=params)
    made.init_local_path()
    return made


def save(trial: Trial, update: int) -> None:
    """Gives a trial a checkpoint."""
    folder = Path(trial.path, f"checkpoint_{update}")
    folder.mkdir(parents=True)
    (folder / "of").write_text(str(trial))
    metrics = {"updates": update, "combined_reward": trial.config["cory_settings"]["lr"]}
    trial.on_checkpoint(_TrainingResult(Checkpoint.from_directory(str(folder)), metrics))
    trial.run_metadata.last_result = metrics


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StorageContext, "experiment_driver_staging_path", str(tmp_path / "staging"))


def test_a_trial_that_begins_after_its_search_was_moved_has_the_folder_and_the_paths_of_now(
    tmp_path: Path, staged: None
) -> None:
    before, after = tmp_path / "before", tmp_path / "there" / "after"
    after.mkdir(parents=True)
    trial = member(before, 3, 1e-4)
    trial.evaluated_params["cory_settings/data"] = "other.jsonl"
    shared = storage(before)
    base = Settings(task="custom", data="q.jsonl", reward="a:b")
    keys = ["lr", "data"]
    trials = Trials(after, base, keys, lambda settings: settings.model_copy(update={"data": f"/{settings.data}"}))
    FifoScheduler(trials, lambda: False).on_trial_add(None, trial)
    assert Path(trial.path) == after / trial.relative_logdir
    assert Path(shared.experiment_fs_path) == before  # Tune's own, which other trials have too
    assert trials.values == {"p_3": {"lr": 1e-4, "data": "other.jsonl", "seed": 3}}
    settings = trial.config["cory_settings"]
    assert (settings["lr"], settings["seed"], settings["data"]) == (1e-4, 3, "/other.jsonl")


def test_a_clone_keeps_its_values_and_its_checkpoint_wherever_its_search_resumes(tmp_path: Path, staged: None) -> None:
    folder, settings = tmp_path / "search", Settings()

    def add(*members: Trial) -> Trials:
        trials = Trials(folder, settings, ["lr"], lambda settings: settings)
        for one in members:
            trials.add(one)
        return trials

    worse, better = member(folder, 0, 0.01), member(folder, 1, 0.5)
    trials = add(worse, better)
    assert trials.origin(worse) is None
    for one in (worse, better):
        save(one, 2)
    assert trials.origin(worse) == str(worse)
    trials.clone(better, worse, {"lr": 0.6, "seed": 1})
    assert worse.config["cory_settings"]["lr"] == 0.6
    assert trials.origin(worse) == str(better)
    assert Path(worse.checkpoint.path, "of").read_text() == str(better)
    assert Path(worse.checkpoint.path).parent == Path(worse.path)  # so it moves along with the search
    worse.set_config({"cory_settings": {"lr": 0.01}})  # as Tune does when it resumes
    again = add(worse)
    assert again.values["p_0"] == {"lr": 0.6, "seed": 1} and again.origin(worse) == str(better)
    save(worse, 3)
    again = add(worse)
    assert again.values["p_0"] == {"lr": 0.6, "seed": 1} and again.origin(worse) == str(worse)
    killed = member(folder, 0, 0.01)  # before Tune had noted the clone
    killed.set_config({"cory_settings": {"lr": 0.01}})
    save(killed, 2)
    assert add(killed).values["p_0"] == {"lr": 0.01, "seed": 0}


@pytest.mark.slow
def test_a_search_that_is_stopped_saves_its_trials_and_resumes_in_another_folder_with_its_clones_as_they_were(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNE_DISABLE_SIGINT_HANDLER", "1")
    interrupts = Interrupts(lambda: None)

    class Ask(tune.Callback):
        """Asks to stop before the first update of the clone, which begins after the third."""

        def on_trial_start(self, iteration: int, trials: Sequence[Any], trial: Any, **_: Any) -> None:
            if trial.trial_id.endswith("_00001") and trial.checkpoint is not None:
                interrupts.requested = signal.SIGINT

    space = {"lr": tune.grid_search([0.5, 0.01]), "seed": 0}
    whole = {"cory_settings": space, "callbacks_class": Climb}  # as RLlib's settings hold classes
    search = population(2, num_updates=8, eval_every=3, checkpoint_every=100)
    _, stop = climb(tmp_path / "climb", search, whole, Ask(), interrupts=interrupts)
    assert len(stop.statuses) == 2 and "TERMINATED" not in stop.statuses.values()

    moved = tmp_path / "elsewhere"
    (tmp_path / "climb").rename(moved)
    trials, _ = climb(moved, search, whole)
    assert not (tmp_path / "climb").exists()
    (clone,) = [trial for trial in trials if trial.trial_id.endswith("_00001")]
    updates, worth = reported(clone)
    assert updates == list(range(1, 9))
    drawn = worth[3] - 3 * 0.5
    assert worth[:3] == pytest.approx([0.01, 0.02, 0.03]) and drawn != pytest.approx(0.01)
    assert worth[5] - worth[4] == pytest.approx(worth[4] - worth[3]) == pytest.approx(drawn)


def test_a_search_that_ray_has_no_room_for_is_refused() -> None:
    nodes = [make_node("a", {"CPU": 3.0}), make_node("b", {"CPU": 1.0})]
    settings = Settings(backend="transformers", num_runners=0)
    check_room([settings], nodes)
    with pytest.raises(
        CommandError,
        match=r"1 of 1 driver with CPU=1, GPU=0\.5 \(.*\)\. Ask for fewer processes",
    ):
        check_room([settings, settings.model_copy(update={"gpus_per_learner": 0.5})], nodes)
