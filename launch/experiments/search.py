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
from launch.experiments.space import SEED_KEY, Axes, grid_points
from launch.run_folder.layout import LOCK, SOURCES
from launch.run_folder.locations import PATH_SETTINGS
from launch.run_folder.locks import lock_folder
from launch.training.start import starting_policies
from policies.files import atomic_write
from policies.settings.settings import Settings, SettingsError, changed_settings, make_settings
from policies.settings.yaml12 import read_yaml, to_cli, write_yaml

SEARCH_FILE, RESULTS_FILE, STATE_FILE = "search.yaml", "results.csv", "tuner.pkl"
ResolvePaths = Callable[[Settings], Settings]
"""Replaces the paths in settings by their current locations."""


class Search(NamedTuple):
    """The definition of a search: a grid, with a trial per combination of values."""

    settings: Settings
    """Settings of every trial, except the searched ones. `eval_kl_coef` is set, so that the objective is fixed."""
    axes: Axes
    """The searched settings. Results are means over the seeds, if `seed` is one of them."""
    concurrent: int | None = None

    @property
    def keys(self) -> list[str]:
        """The searched settings whose values are compared."""
        return [key for key in self.axes if key != SEED_KEY]

    @property
    def trials(self) -> int:
        """Number of trials."""
        return math.prod(map(len, self.axes.values()))

    def space(self, resolve_paths: ResolvePaths) -> dict[str, Any]:
        """Returns the settings of trials with Tune's search spaces in them."""
        from ray import tune

        space = resolve_paths(self.settings).model_dump()
        for key, values in self.axes.items():
            if key in PATH_SETTINGS:
                points = [resolve_paths(self.settings.model_copy(update={key: value})) for value in values]
                values = [getattr(point, key) for point in points]
            space[key] = tune.grid_search(values)
        return space

    def write(self, folder: Path, origin: str) -> None:
        """Writes `search.yaml`, whose first line is the command that started the search."""
        values = {"over": self.axes, "concurrent": self.concurrent, "settings": self.settings.model_dump()}
        atomic_write(folder / SEARCH_FILE, f"# {' '.join(origin.split())}\n{write_yaml(values)}")

    @classmethod
    def read(cls, folder: Path) -> "Search":
        """Reads a search's `search.yaml`."""
        file = folder / SEARCH_FILE
        try:
            values = read_yaml(file.read_text(encoding="utf-8"), "it")
            settings = values["settings"]
            if not isinstance(values["over"], dict) or settings.keys() - Settings.model_fields.keys():
                raise CommandError("it is of an earlier version, with other settings. Start it again.")
            return cls(make_settings(settings), values["over"], values["concurrent"])
        except (CommandError, SettingsError, OSError, UnicodeDecodeError, TypeError, AttributeError, KeyError) as error:
            raise CommandError(f"{file} is not a valid search: {error}") from error


def pin_start_checkpoint(search: Search) -> Search:
    """Pins `start_from` to a checkpoint if it names a run, whose best checkpoint may change during the search."""
    start = starting_policies(next(iter(grid_points(search.settings, search.axes))))
    if "start_from" in search.axes or start is None:
        return search
    return search._replace(settings=search.settings.model_copy(update={"start_from": str(start)}))


def create_search_folder(folder: Path, search: Search, origin: str) -> contextlib.ExitStack:
    """Creates a search's folder and writes `search.yaml`; returns the lock on the folder."""
    make_folder(folder)
    if not {entry.name for entry in folder.iterdir()} <= {LOCK, SEARCH_FILE, SOURCES}:
        hint = "Continue its search with --continue" if is_resumable(folder) else "Empty it"
        raise CommandError(f"{folder} is not empty. {hint}, or choose another folder with --out.")
    lock = lock_folder(folder)
    search.write(folder, origin)
    return lock


def is_resumable(folder: Path) -> bool:
    """Returns whether a folder contains a search that has started."""
    return (folder / STATE_FILE).exists()


def read_same_search(folder: Path, search: Search) -> Search:
    """Returns the search in a folder, with its chat date; rejects another than the requested."""
    stored = Search.read(folder)
    old = {**stored.settings.model_dump(), **stored.axes, "--concurrent": stored.concurrent}
    changed = {*changed_settings(stored.settings, search.settings)}
    start, pinned = search.settings.start_from, stored.settings.start_from
    if start and pinned and Path(pinned).is_relative_to(Path(start).resolve()):  # by `pin_start_checkpoint`
        changed.discard("start_from")
    changed |= {key for key in stored.axes | search.axes if stored.axes.get(key) != search.axes.get(key)}
    changed |= {"--concurrent"} if stored.concurrent != search.concurrent else set()
    if changed:
        values = ", ".join(f"{key}={display_name(to_cli(old[key]))}" for key in sorted(changed))
        raise CommandError(
            f"{folder} contains a search with {values}. Use these values, or choose another folder with --out."
        )
    return stored
