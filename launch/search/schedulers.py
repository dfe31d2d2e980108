"""Tune's schedulers, set so that they decide only where a trial was just evaluated."""

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, PopulationBasedTraining

from launch.search.space import METRIC, TIME, Axis
from policies.settings.settings import Settings

REDUCTION = 3
"""ASHA lets the best third go on at each rung."""


class SearchFolderMixin:
    """For a scheduler: puts every trial into the folder where its search is now.

    Of a search that was moved, Tune makes the trials that had not begun for where it was before.
    """

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Takes a trial."""
        folder = Path(tune_controller.experiment_path)
        if Path(trial.storage.experiment_fs_path) != folder:
            storage = copy.copy(trial.storage)
            storage.storage_fs_path, storage.experiment_dir_name = str(folder.parent), folder.name
            trial.set_storage(storage)
            trial.init_local_path()
        super().on_trial_add(tune_controller, trial)  # type: ignore[misc]


class Fifo(SearchFolderMixin, FIFOScheduler):
    """Lets all trials run to their end."""


class Asha(SearchFolderMixin, ASHAScheduler):
    """Stops the worst trials early."""


def asha(settings: Settings, reports: Sequence[Mapping[str, Any]] = ()) -> Any:
    """Stops trials that are worse than others were after as many updates: rungs at eval_every times 1, 3, 9, ...

    Args:
        settings: of all trials.
        reports: of a search that goes on, in the order of time. Tune forgets its rungs when it is killed.
    """
    scheduler = Asha(
        time_attr=TIME, max_t=settings.updates, grace_period=settings.eval_every, reduction_factor=REDUCTION
    )
    for report in reports:
        trial, worth = SimpleNamespace(trial_id=report["trial_id"]), report[METRIC]
        scheduler._brackets[0].on_result(trial, report[TIME], math.nan if worth is None else worth)
    return scheduler


def population(settings: Settings, axes: Sequence[Axis]) -> Any:
    """Lets the worst quarter continue as clones of the best one, with other values, after every evaluation.

    Trials wait for each other there, so that all are compared after as many updates.
    """
    return Population(
        time_attr=TIME,
        perturbation_interval=settings.eval_every,
        hyperparam_mutations={"cory_settings": {axis.key: axis.mutations() for axis in axes}},
        custom_explore_fn=Within(axes),
        synch=True,
    )


class Population(SearchFolderMixin, PopulationBasedTraining):
    """Population-based training that waits for no trial that is gone, and that a killed search can go on with."""

    def __init__(self, **arguments: Any) -> None:
        """Takes Tune's arguments."""
        super().__init__(**arguments)
        self._resumed_after = 0.0

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Takes a trial; in a search that goes on, the next comparison is where all can be after as many updates."""
        super().on_trial_add(tune_controller, trial)
        saved = trial.latest_checkpoint_result  # Tune keeps no scheduler, so this is all that is known
        if saved is not None and not trial.is_finished():
            past = saved.metrics[TIME] // self._perturbation_interval * self._perturbation_interval
            self._resumed_after = max(self._resumed_after, past)
        if self._resumed_after:
            for state in self._trial_state.values():
                state.last_train_time = state.last_perturbation_time = self._resumed_after
            self._next_perturbation_sync = self._resumed_after + self._perturbation_interval

    def _exploit(self, tune_controller: Any, trial: Any, trial_to_clone: Any) -> None:
        """Makes a trial a clone; so it stays in a search that goes on, where Tune takes a trial's first settings.

        Of these, all but Cory's stay: Tune has put marks there for objects that it does not write to its file.
        """
        super()._exploit(tune_controller, trial, trial_to_clone)
        first = trial._Trial__unresolved_config
        trial._Trial__unresolved_config = {**first, "cory_settings": trial.config["cory_settings"]}
        trial.invalidate_json_state()

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Compares all trials, once they are where this one is. Tune counts those that failed as alive."""
        for other, state in self._trial_state.items():
            if other.is_finished():
                state.last_train_time = self._next_perturbation_sync
        decision: str = super().on_trial_result(tune_controller, trial, result)
        return decision

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """The trial that is furthest behind; where the last that the others wait for fails, they go on as they are."""
        chosen = super().choose_trial_to_run(tune_controller)
        live = [trial for trial in tune_controller.get_live_trials() if not trial.is_finished()]
        if chosen is None and live and all(trial.status == trial.PAUSED for trial in live):
            self._next_perturbation_sync += self._perturbation_interval
            return super().choose_trial_to_run(tune_controller)
        return chosen


class Within:
    """Holds mutated values inside their ranges: PBT multiplies them by 0.8 or 1.2."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.ranges = {axis.key: axis.ends for axis in axes if axis.scale is not None}

    def __call__(self, config: dict[str, Any]) -> dict[str, Any]:
        """Returns the configuration, its values cut to their ranges."""
        settings = config["cory_settings"]
        for key, (low, high) in self.ranges.items():
            settings[key] = min(max(settings[key], low), high)
        return config
