"""Population-based training, stopping and going on through Tune, with a trial that costs nothing."""

from __future__ import annotations

import csv
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import tune
from ray.train._internal.storage import StorageContext
from ray.tune.experiment import Trial
from ray.tune.schedulers.pbt import _PBTTrialState

from launch.cluster.room import node
from launch.console.errors import CommandError
from launch.console.interrupts import Interrupts
from launch.search.schedulers import Fifo, SearchFolderMixin, asha, population
from launch.search.search import Search, check_room
from launch.search.space import read_axes
from launch.search.stop import Stop
from policies.settings.settings import Settings
from tests.policies.conftest import ray_session

__all__ = ["ray_session"]


class Climb(tune.Trainable):
    """Worth its learning rate in every update, and the second seed fails in the fourth."""

    def setup(self, config: dict[str, Any]) -> None:
        """Takes the settings."""
        self.settings = config["cory_settings"]
        self.worth = 0.0

    def step(self) -> dict[str, Any]:
        """One update."""
        if self.settings["seed"] == 1 and self.iteration == 3:
            raise RuntimeError("The second seed fails.")
        self.worth += self.settings["lr"]
        return {"updates": self.iteration + 1, "combined_reward": self.worth}

    def save_checkpoint(self, folder: str) -> None:
        """Writes all that it is."""
        (Path(folder) / "worth").write_text(str(self.worth))

    def load_checkpoint(self, folder: str) -> None:
        """Takes up what was written."""
        self.worth = float((Path(folder) / "worth").read_text())

    def reset_config(self, config: dict[str, Any]) -> bool:
        """Saves the start of a process."""
        self.setup(config)
        return True


@pytest.mark.slow
def test_the_worst_continues_as_the_best_and_nobody_waits_for_a_trial_that_failed(
    ray_session: None, tmp_path: Path
) -> None:
    axes = read_axes(["lr=uniform:0.001:1"])
    settings = Settings(updates=8, eval_every=2)
    start = {0: 0.5, 1: 0.4, 2: 0.01}
    space = {
        "seed": tune.grid_search(list(start)),
        "lr": tune.sample_from(lambda spec: start[spec.config["cory_settings"]["seed"]]),
    }
    found = tune.Tuner(
        tune.with_resources(Climb, {"cpu": 2}),  # there is room for two of the three
        param_space={"cory_settings": space},
        tune_config=tune.TuneConfig(
            metric="combined_reward", mode="max", scheduler=population(settings, axes), reuse_actors=True
        ),
        run_config=tune.RunConfig(name="climb", storage_path=str(tmp_path), stop={"updates": 8}, verbose=0),
    ).fit()
    trials = found._experiment_analysis.trials
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


@pytest.mark.parametrize("scheduler", [Fifo(), asha(Settings()), population(Settings(), read_axes(["lr=1e-4,1e-3"]))])
def test_a_trial_that_begins_after_its_search_was_moved_begins_in_the_new_folder(
    scheduler: SearchFolderMixin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StorageContext, "experiment_driver_staging_path", str(tmp_path / "staging"))
    before, after = tmp_path / "before", tmp_path / "there" / "after"
    storage = StorageContext(storage_path=str(before.parent), experiment_dir_name=before.name)
    trial = Trial("Climb", config={"cory_settings": {"lr": 1e-4}}, stub=True, storage=storage)
    trial.init_local_path()
    scheduler.set_search_properties("combined_reward", "max")  # type: ignore[attr-defined]
    scheduler.on_trial_add(SimpleNamespace(experiment_path=str(after), search_alg=None), trial)
    assert Path(trial.path) == after / trial.relative_logdir
    assert Path(storage.experiment_fs_path) == before  # Tune's own, which other trials have too


def test_a_clone_has_its_donors_settings_but_what_was_drawn_when_tune_restores_it_too() -> None:
    scheduler = population(Settings(updates=8, eval_every=2), read_axes(["lr=uniform:0.001:1"]))
    scheduler._log_config = False
    room = tune.PlacementGroupFactory([{"CPU": 1.0}])

    def member(seed: int, lr: float) -> Trial:
        settings = {"cory_settings": {"lr": lr, "seed": seed}}
        made = Trial("Climb", stub=True, trial_id=f"population_{seed}", config=settings, placement_group_factory=room)
        made.create_placement_group_factory()
        made.status = Trial.PAUSED
        scheduler._trial_state[made] = _PBTTrialState(made)
        scheduler._trial_state[made].last_score = lr
        return made

    worst, best = member(0, 0.01), member(1, 0.5)
    kept_before, _ = worst.get_json_state()
    scheduler._exploit(None, worst, best)
    kept, _ = worst.get_json_state()
    restored = []
    for state in (kept_before, kept):
        again = Trial.from_json_state(state, stub=True)
        again.resolve_config_placeholders({})  # as Tune does when it goes on with a search
        restored.append(again.config["cory_settings"])
    assert restored[0] == {"lr": 0.01, "seed": 0}
    assert restored[1] == worst.config["cory_settings"] and restored[1]["seed"] == 1
    assert restored[1]["lr"] not in (0.01, 0.5)


@pytest.mark.slow
def test_a_search_that_is_stopped_saves_its_trials_and_goes_on_with_its_clones_as_they_were(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNE_DISABLE_SIGINT_HANDLER", "1")
    interrupts = Interrupts(lambda: None)

    class Ask(tune.Callback):
        """Asks to stop during the fifth update of the clone, which began after the third."""

        def on_trial_result(
            self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
        ) -> None:
            if trial.trial_id.endswith("_00001") and result["updates"] == 4:
                interrupts.requested = signal.SIGINT

    space = {"lr": tune.grid_search([0.5, 0.01]), "seed": 0}
    whole = {"cory_settings": space, "callbacks_class": Climb}  # as RLlib's settings hold classes
    scheduler = population(Settings(updates=8, eval_every=3), read_axes(["lr=uniform:0.001:1"]))
    scheduler._custom_explore_fn = None
    stop = Stop(interrupts, checkpoint_every=100)
    tuner = tune.Tuner(
        Climb,
        param_space=whole,
        tune_config=tune.TuneConfig(metric="combined_reward", mode="max", scheduler=scheduler),
        run_config=tune.RunConfig(
            name="climb",
            storage_path=str(tmp_path),
            stop={"updates": 8},
            callbacks=[Ask(), stop],
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=100, num_to_keep=4),
            verbose=0,
        ),
    )
    tuner.fit()
    assert len(stop.statuses) == 2 and "TERMINATED" not in stop.statuses.values()

    again = tune.Tuner.restore(str(tmp_path / "climb"), trainable=Climb, param_space=whole, resume_unfinished=True)
    again._local_tuner._run_config.callbacks = []
    (clone,) = [trial for trial in again.fit()._experiment_analysis.trials if trial.trial_id.endswith("_00001")]
    updates, worth = reported(clone)
    assert updates == list(range(1, 9))
    drawn = worth[3] - 3 * 0.5
    assert worth[:3] == pytest.approx([0.01, 0.02, 0.03]) and drawn != pytest.approx(0.01)
    assert worth[5] - worth[4] == pytest.approx(worth[4] - worth[3]) == pytest.approx(drawn)


def test_a_search_that_ray_has_no_room_for_is_refused() -> None:
    def check(concurrent: int | None, samples: int = 9, **settings: Any) -> None:
        base = Settings(backend="transformers", num_runners=0, **settings)
        search = Search(base, [], None, samples, seeds=1, concurrent=concurrent)
        check_room(search, [base], [node("a", {"CPU": 3.0}), node("b", {"CPU": 1.0})])

    check(4)
    check(9, samples=4)  # of which no more run
    with pytest.raises(CommandError, match=r"5 trials at a time: .* 1 of 5 drivers with CPU=1 \(.* Lower --concurrent"):
        check(5)
    with pytest.raises(
        CommandError,
        match=r"1 of 1 driver with CPU=1, GPU=0\.5 \(.* Lower gpus_per_learner \(and gpus_per_runner with .*\), or",
    ):
        check(None, gpus_per_learner=0.5)
