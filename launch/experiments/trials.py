"""The trials of a search, as Tune has them and as its folder does.

A folder may move between two runs of `cory tune`, and so may the data beside it. Tune notes absolute paths, so nothing
that it noted of paths is used again: a trial's settings are those of the search and its own values, and its folder lies
in that of the search.
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
"""What stands before the donor's name in that of the checkpoint that a clone continues from."""
TrialValues = dict[str, Value]
ResolvePaths = Callable[[Settings], Settings]
"""Finds the files that settings name."""


class Trials:
    """What each trial of a search tries."""

    def __init__(self, folder: Path, settings: Settings, keys: Sequence[str], locate: ResolvePaths) -> None:
        """Notes what all trials have in common.

        Args:
            folder: of the search.
            settings: of all trials, but for what is searched.
            keys: the settings that are searched.
            locate: finds the files that settings name.
        """
        self.folder = folder
        self.settings = settings
        self.values: dict[str, TrialValues] = {}
        """Of each trial, by its id: of the searched settings, and the seed."""
        self._keys = dict.fromkeys([*keys, SEED_KEY])
        self._locate = locate

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
        self._set(trial, values)

    def clone(self, donor: Trial, trial: Trial, values: TrialValues) -> None:
        """Lets a paused trial continue from another one's checkpoint, with other values.

        The checkpoint becomes one of its own, so that nobody deletes it while it is needed. Tune notes it and the
        evaluated parameters together; a configuration that it noted may be undone when it resumes.
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
        """Returns whose checkpoint a trial that starts continues from; None: it begins."""
        if trial.checkpoint is None:
            return None
        return Path(trial.checkpoint.path).name.partition(_CLONE_SEPARATOR)[2] or str(trial)

    def _set(self, trial: Trial, values: TrialValues) -> None:
        self.values[trial.trial_id] = values
        located = self._locate(self.settings.model_copy(update=values)).model_dump()
        trial.set_config({**trial.config, "cory_settings": located})


def _link_or_copy(source: str, target: str) -> None:
    """Gives a file another name; copies it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
