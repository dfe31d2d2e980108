"""The trials of a search, as Tune has them and as its folder does.

A folder may move between two runs of `cory tune`, and so may the data beside it. Tune notes absolute paths, so nothing
that it noted of paths and settings is used again: a trial's settings are those of the search and its own values, and
its folder lies in that of the search.
"""

import copy
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.tune import Checkpoint
from ray.tune.experiment import Trial

from launch.console.errors import reason
from launch.experiments.space import SEED, TIME, Value
from launch.run_folder.journal import Journal
from policies.settings.settings import Settings

CLONES = "clones.jsonl"
CLONE = "clone_{:06d}"
"""The folder of the checkpoint that a trial goes on from as a clone, by its update."""
Values = dict[str, Value]


class Trials:
    """What each trial of a search tries."""

    def __init__(
        self, folder: Path, settings: Settings, keys: Sequence[str], place: Callable[[Settings], Settings]
    ) -> None:
        """Reads what is known of the trials of a search that resumes.

        Args:
            folder: of the search.
            settings: of all trials, but for what is searched.
            keys: the settings that are searched.
            place: finds the files that settings name.
        """
        self.folder = folder
        self.settings = settings
        self.values: dict[str, Values] = {}
        """Of each trial, by its id: of the searched settings, and the seed."""
        self._keys = dict.fromkeys([*keys, SEED])
        self._place = place
        self._journal = Journal(folder / CLONES)
        self._clones = self._journal.read()

    def add(self, trial: Trial) -> None:
        """Gives a trial that Tune adds its folder, and its settings."""
        folder = self.folder.resolve()
        if Path(trial.storage.experiment_fs_path) != folder:  # Tune makes it for where the search was before
            storage = copy.copy(trial.storage)
            storage.storage_fs_path, storage.experiment_dir_name = str(folder.parent), folder.name
            trial.set_storage(storage)
            trial.init_local_path()
        drawn = {key.rpartition("/")[2]: value for key, value in trial.evaluated_params.items()}
        values = {key: drawn.get(key, getattr(self.settings, key)) for key in self._keys}
        for clone in self._clones:
            if clone["trial_id"] == trial.trial_id and self._is_past(trial, clone):
                values = clone["values"]
        self._set(trial, values)

    def clone(self, donor: Trial, trial: Trial, values: Values) -> None:
        """Lets a paused trial continue from another one's checkpoint, with other values.

        The checkpoint becomes one of its own, so that nobody deletes it while it is needed.
        """
        result = copy.copy(donor.latest_checkpoint_result)
        update = result.metrics[TIME]
        folder = Path(trial.path, CLONE.format(update))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(result.checkpoint.path, folder, copy_function=_link)
        clone = {"update": update, "trial": str(trial), "donor": str(donor), "trial_id": trial.trial_id}
        self._clones.append({**clone, "values": values})
        self._journal.append(self._clones[-1])
        result.checkpoint = Checkpoint.from_directory(str(folder))
        trial.on_checkpoint(result)
        self._set(trial, values)

    def origin(self, trial: Trial) -> str | None:
        """Returns whose checkpoint a trial that starts continues from; None: it begins."""
        saved = trial.latest_checkpoint_result
        if saved is None:
            return None
        folder = Path(saved.checkpoint.path).name
        donors = [
            clone["donor"]
            for clone in self._clones
            if clone["trial_id"] == trial.trial_id and CLONE.format(clone["update"]) == folder
        ]
        return donors[-1] if donors else str(trial)

    def _set(self, trial: Trial, values: Values) -> None:
        self.values[trial.trial_id] = values
        placed = self._place(self.settings.model_copy(update=values)).model_dump()
        trial.set_config({**trial.config, "cory_settings": placed})

    @staticmethod
    def _is_past(trial: Trial, clone: Mapping[str, Any]) -> bool:
        """Whether a trial became this clone before it was saved last. A kill may have come between the two."""
        saved = trial.latest_checkpoint_result
        if saved is None:
            return False
        update: int = clone["update"]
        return saved.metrics[TIME] > update or Path(saved.checkpoint.path).name == CLONE.format(update)


def failure(trial: Trial) -> str:
    """Returns in one sentence why a trial failed."""
    error = trial.get_pickled_error()
    if error is not None:
        return reason(error)
    lines = (trial.get_error() or "").strip().splitlines()
    return lines[-1] if lines else "Nothing is known."


def _link(source: str, target: str) -> None:
    """Gives a file another name; copies it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
