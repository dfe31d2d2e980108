"""A search over settings, and its folder.

search.yaml       the definition of the search, and the command that started it
trial_00000/ ...  one folder per trial: Tune's params.json, result.json and progress.csv, checkpoints, error.txt
tuner.pkl ...     Tune's state of the search
results.csv       one line per trial
best.yaml         all settings of the best point, for `cory train`
"""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cory_env.pickled import display_name
from launch.console.errors import CommandError, make_folder
from launch.experiments.space import SEED_KEY, Axis, distinct_settings, grid_points, read_axes
from launch.run_folder.layout import LOCK
from launch.run_folder.locations import PATH_SETTINGS
from launch.run_folder.locks import lock_folder
from launch.training.start import starting_policies
from policies.files import atomic_write
from policies.settings.settings import Settings, SettingsError, changed_settings, make_settings
from policies.settings.yaml12 import read_yaml, to_cli, write_yaml

SEARCH_FILE = "search.yaml"
RESULTS_FILE = "results.csv"
STATE_FILE = "tuner.pkl"
"""The file that `tune.Tuner.restore` reads."""
ResolvePaths = Callable[[Settings], Settings]
"""Replaces the paths in settings by their current locations."""


class Search(NamedTuple):
    """The definition of a search."""

    settings: Settings
    """Settings of every trial, except the searched ones. `eval_kl_coef` is set, so that the objective is fixed."""
    axes: list[Axis]
    """The searched settings. Results are means over the seeds, if `seed` is one of them."""
    scheduler: str | None = None
    samples: int = 1
    concurrent: int | None = None

    @property
    def keys(self) -> list[str]:
        """The searched settings whose values are compared."""
        return [axis.key for axis in self.axes if axis.key != SEED_KEY]

    @property
    def trials(self) -> int:
        """Number of trials."""
        return self.samples * math.prod(len(axis.values) for axis in self.axes if axis.scale is None)

    def space(self, resolve_paths: ResolvePaths) -> dict[str, Any]:
        """Returns the settings of trials with Tune's search spaces in them."""
        domains = {axis.key: self._resolved(axis, resolve_paths).domain() for axis in self.axes}
        return {**resolve_paths(self.settings).model_dump(), **domains}

    def _resolved(self, axis: Axis, resolve_paths: ResolvePaths) -> Axis:
        """Returns an axis with the current locations of the files that its values name."""
        if axis.key not in PATH_SETTINGS:
            return axis
        points = [resolve_paths(self.settings.model_copy(update={axis.key: value})) for value in axis.values]
        return axis._replace(values=tuple(getattr(point, axis.key) for point in points))

    @property
    def options(self) -> dict[str, Any]:
        """All fields except the settings, as in `search.yaml` and messages."""
        fields = self._asdict()
        del fields["settings"]
        return {"over": [axis.option for axis in fields.pop("axes")], **fields}

    def write(self, folder: Path, origin: str) -> None:
        """Writes `search.yaml`, whose first line is the command that started the search."""
        values = {**self.options, "settings": self.settings.model_dump()}
        atomic_write(folder / SEARCH_FILE, f"# {' '.join(origin.split())}\n{write_yaml(values)}")

    @classmethod
    def read(cls, folder: Path) -> "Search":
        """Reads a search's `search.yaml`."""
        file = folder / SEARCH_FILE
        try:
            values = read_yaml(file.read_text(encoding="utf-8"), "it")
            settings, over = values.pop("settings"), values.pop("over")
            removed = settings.keys() - Settings.model_fields.keys() | values.keys() - {*cls._fields}
            if removed:  # its trials have them as well
                raise CommandError(f"it is of an earlier version, with {min(removed)}. Start it again.")
            return cls(make_settings(settings), read_axes(over), **values)
        except (CommandError, SettingsError, OSError, UnicodeDecodeError, TypeError, AttributeError, KeyError) as error:
            raise CommandError(f"{file} is not a valid search: {error}") from error


def pin_start_checkpoint(search: Search) -> Search:
    """Pins `start_from` to a checkpoint if it names a run, whose best checkpoint may change during the search."""
    kinds = distinct_settings(grid_points(search.settings, search.axes))
    starts = [starting_policies(settings) for settings in kinds]
    if "start_from" in search.keys or starts[0] is None:
        return search
    return search._replace(settings=search.settings.model_copy(update={"start_from": str(starts[0])}))


def create_search_folder(folder: Path, search: Search, origin: str) -> contextlib.ExitStack:
    """Creates a search's folder and writes `search.yaml`; returns the lock on the folder."""
    make_folder(folder)
    is_free = (folder / SEARCH_FILE).exists() or all(entry.name == LOCK for entry in folder.iterdir())
    if is_resumable(folder) or not is_free:
        hint = "Continue its search with --continue" if is_resumable(folder) else "Empty it"
        raise CommandError(f"{folder} is not empty. {hint}, or choose another folder with --out.")
    lock = lock_folder(folder)
    search.write(folder, origin)
    return lock


def is_resumable(folder: Path) -> bool:
    """Returns whether a folder contains a search that has started."""
    return (folder / STATE_FILE).exists()


def read_same_search(folder: Path, search: Search) -> Search:
    """Returns the search in a folder, with its chat date and start checkpoint; rejects another than the requested."""
    stored = Search.read(folder)
    old, new = stored.options, search.options
    changes = [f"{key}={old[key]}" for key in old if old[key] != new[key]]
    start, values = search.settings.start_from, stored.settings.model_dump()
    for key in changed_settings(stored.settings, search.settings):
        value = values[key]
        # `pin_start_checkpoint` replaced the run by one of its checkpoints.
        if key != "start_from" or not start or not Path(str(value)).is_relative_to(Path(start).resolve()):
            changes.append(f"{key}={display_name(to_cli(value))}")
    if changes:
        raise CommandError(
            f"{folder} contains a search with {', '.join(changes)}. Use these values, or choose another folder with "
            "--out."
        )
    return stored
