"""The settings and folders of a search's trials.

A search's folder may move between two runs of `cory tune`, and so may its data. Tune stores absolute paths, so stored
paths are never reused: a trial's settings are computed from the search's settings and the trial's values, and its
folder is always inside the search's folder.
"""

import copy
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from ray.tune import Checkpoint
from ray.tune.experiment import Trial

from launch.experiments.space import SEED_KEY, TIME_KEY, Value
from policies.settings.settings import Settings

_CLONE_SEPARATOR = "_of_"
"""Precedes the donor's name in the name of a clone's checkpoint."""
TrialValues = dict[str, Value]
ResolvePaths = Callable[[Settings], Settings]
"""Replaces the paths in settings by their current locations."""


class Trials:
    """The values and settings of all trials of a search."""

    def __init__(self, folder: Path, settings: Settings, keys: Sequence[str], resolve_paths: ResolvePaths) -> None:
        """Creates an empty collection.

        Args:
            folder: of the search.
            settings: of all trials, except the searched ones.
            keys: the searched settings.
            resolve_paths: replaces the paths in settings by their current locations.
        """
        self.folder = folder
        self.settings = settings
        self.values: dict[str, TrialValues] = {}
        """Trial id to the values of the searched settings and the seed."""
        self._keys = dict.fromkeys([*keys, SEED_KEY])
        self._resolve_paths = resolve_paths

    def add(self, trial: Trial) -> None:
        """Sets the folder and the settings of a trial that Tune adds."""
        folder = self.folder.resolve()
        if Path(trial.storage.experiment_fs_path) != folder:  # Tune has stored the previous location of the search
            storage = copy.copy(trial.storage)
            storage.storage_fs_path, storage.experiment_dir_name = str(folder.parent), folder.name
            trial.set_storage(storage)
            trial.init_local_path()
        sampled = {key.rpartition("/")[2]: value for key, value in trial.evaluated_params.items()}
        values = {key: sampled.get(key, getattr(self.settings, key)) for key in self._keys}
        self._set(trial, values)

    def clone(self, donor: Trial, trial: Trial, values: TrialValues) -> None:
        """Makes a paused trial continue from the checkpoint of another trial, with other values.

        The checkpoint is copied into the trial's folder, so that the donor cannot delete it. Tune stores the checkpoint
        and the evaluated parameters together, whereas a stored configuration may be reverted when the search resumes.
        """
        result = copy.copy(donor.latest_checkpoint_result)
        folder = Path(trial.path, f"clone_{result.metrics[TIME_KEY]:06d}{_CLONE_SEPARATOR}{donor}")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(result.checkpoint.path, folder, copy_function=_link_or_copy)
        result.checkpoint, result.metrics = Checkpoint.from_directory(str(folder)), {**result.metrics}
        trial.on_checkpoint(result)
        trial.evaluated_params = {f"cory_settings/{key}": value for key, value in values.items()}
        self._set(trial, values)

    def origin(self, trial: Trial) -> str | None:
        """Returns the name of the trial whose checkpoint a starting trial continues from; None without a checkpoint."""
        if trial.checkpoint is None:
            return None
        return Path(trial.checkpoint.path).name.partition(_CLONE_SEPARATOR)[2] or str(trial)

    def _set(self, trial: Trial, values: TrialValues) -> None:
        self.values[trial.trial_id] = values
        settings = self._resolve_paths(self.settings.model_copy(update=values))
        trial.set_config({**trial.config, "cory_settings": settings.model_dump()})


def _link_or_copy(source: str, target: str) -> None:
    """Creates a hard link to a file, or a copy if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
