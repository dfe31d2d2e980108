"""A search over settings, and its folder.

search.yaml       what is searched, by which command
trial_00000/ ...  a folder per trial: Tune's result.json and progress.csv, checkpoints, error.txt if it failed
reports.jsonl     a line per update of a trial; after a kill some stand twice
log.txt           what libraries printed in the driver
results.csv       a line per trial
best.yaml         every setting of the best point, for `cory train`
"""

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cory_env.pickled import display_name
from launch.cluster import placement
from launch.console.errors import CommandError, make_folder
from launch.experiments.space import SEED_KEY, TIME_KEY, Axis, points, read_axes, unique_kinds
from launch.run_folder.journal import Journal, atomic_write
from launch.run_folder.layout import LOCK
from launch.run_folder.locks import lock_folder
from launch.run_folder.storage import is_uri
from launch.training.start import starting_policies
from policies.settings.processes import Process, processes
from policies.settings.settings import Settings, SettingsError, changed_settings, make_settings
from policies.settings.yaml12 import read_yaml, to_cli, write_yaml

SEARCH_FILE = "search.yaml"
HEADER_PREFIX = "# cory tune"
LOG_FILE = "log.txt"
REPORTS_FILE = "reports.jsonl"
RESULTS_FILE = "results.csv"
STATE_PATTERN = "experiment_state-*.json"
"""What Tune resumes from."""


class Search(NamedTuple):
    """What is searched."""

    settings: Settings
    """Of every trial, but for what is searched. Their `eval_kl_coef` is set, so the goal stands still."""
    axes: list[Axis]
    scheduler: str | None
    samples: int
    seeds: int
    concurrent: int | None
    algorithm: str | None = None
    """`optuna`: what a trial tries is chosen by how those before it ended; None: all lists, and random draws."""

    @property
    def trials(self) -> int:
        """How many there will be."""
        if self.scheduler == "pbt" or self.algorithm is not None:
            return self.samples
        count = self.samples * self.seeds
        for axis in self.axes:
            count *= len(axis.values) if axis.scale is None else 1
        return count

    def space(self) -> dict[str, Any]:
        """The settings of trials, search spaces among them.

        Members of a population differ in their seeds too: else two with the same values would be the same run twice.
        """
        if self.algorithm is not None:
            return self.settings.model_dump()  # the algorithm puts its values in
        population_based = self.scheduler == "pbt"
        drawn = {axis.key: axis.domain(grid=not population_based) for axis in self.axes}
        seeds = self.samples if population_based else self.seeds
        if seeds > 1:
            from ray import tune

            first = self.settings.seed
            drawn[SEED_KEY] = tune.grid_search(list(range(first, first + seeds)))
        return {**self.settings.model_dump(), **drawn}

    @property
    def options(self) -> dict[str, Any]:
        """All but the settings, as `search.yaml` and messages name it."""
        names = ("scheduler", "samples", "seeds", "concurrent", "algorithm")
        return {"over": [axis.word for axis in self.axes], **{name: getattr(self, name) for name in names}}

    def write(self, folder: Path, origin: str) -> None:
        """Writes `search.yaml`; its first line is the command."""
        values = {**self.options, "settings": self.settings.model_dump()}
        atomic_write(folder / SEARCH_FILE, f"# {' '.join(origin.split())}\n{write_yaml(values)}")

    @classmethod
    def read(cls, folder: Path) -> "Search":
        """Reads a search's `search.yaml`.

        Raises:
            CommandError: there is none, or another version wrote it.
        """
        file = folder / SEARCH_FILE
        if not file.is_file() or not file.read_bytes().startswith(HEADER_PREFIX.encode()):
            raise CommandError(f"{folder} is not a search's folder: it has no {SEARCH_FILE} of `cory tune --out DIR`.")
        try:
            values = read_yaml(file.read_text(encoding="utf-8"), "it")
            return cls(make_settings(values.pop("settings")), read_axes(values.pop("over")), **values)
        except (CommandError, SettingsError, UnicodeDecodeError, TypeError, AttributeError, KeyError) as error:
            raise CommandError(f"{file} cannot be read as a search: {error}") from error


def resolve_start(search: Search) -> Search:
    """Names the checkpoint that trials start from, where `start_from` is a run: a later one may become its best.

    Raises:
        CommandError: there is none, or it is in storage.
        SettingsError: its policies do not fit those of a trial.
    """
    kinds = unique_kinds(points(search.settings, search.axes))
    for settings in kinds:
        if settings.start_from is not None and is_uri(settings.start_from):
            raise CommandError(
                f"start_from={settings.start_from} is a URI, and trials start from a folder, which all nodes must "
                "share. Copy that run there, and name the folder."
            )
    starts = [starting_policies(settings) for settings in kinds]
    if "start_from" in (axis.key for axis in search.axes) or starts[0] is None:
        return search
    return search._replace(settings=search.settings.model_copy(update={"start_from": str(starts[0])}))


def create_search_folder(folder: Path, search: Search, origin: str) -> contextlib.ExitStack:
    """Makes a search's folder; returns the lock on it.

    Raises:
        CommandError: something other than a search that never began is there already.
    """
    make_folder(folder)
    is_free = (folder / SEARCH_FILE).exists() or all(entry.name == LOCK for entry in folder.iterdir())
    if is_resumable(folder) or not is_free:
        hint = f"Continue it by `{resume_command(folder)}`, or name" if is_resumable(folder) else "Name"
        raise CommandError(f"{folder} is not empty. {hint} another folder with --out.")
    lock = lock_folder(folder)
    search.write(folder, origin)
    return lock


def is_resumable(folder: Path) -> bool:
    """Tells whether a folder has a search that can go on."""
    return any(folder.glob(STATE_PATTERN))


def check_same(folder: Path, search: Search) -> None:
    """Refuses to continue another search than was asked for.

    Raises:
        CommandError: the folder's differs, in what the message names.
    """
    before = Search.read(folder)
    old, new = before.options, search.options
    changes = [f"{key}={old[key]}" for key in old if old[key] != new[key]]
    start, kept = search.settings.start_from, before.settings.model_dump()
    for key in changed_settings(before.settings, search.settings):
        # The search keeps a checkpoint of the run that it starts from.
        if key != "start_from" or not start or not Path(str(kept[key])).is_relative_to(Path(start).resolve()):
            changes.append(f"{key}={display_name(to_cli(kept[key]))}")
    if changes:
        raise CommandError(
            f"{folder} holds a search with {', '.join(changes)}. Ask for just that, or name another folder with --out."
        )


def resume_command(folder: Path) -> str:
    """Returns the command that continues a search."""
    return f"cory tune --resume {shlex.quote(str(folder))}"


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Returns what trials reported, in the order of time; of an update that was done twice, the last report."""
    reports = {(report["trial_id"], report[TIME_KEY]): report for report in Journal(folder / REPORTS_FILE).read()}
    return list(reports.values())


def check_room(settings: Sequence[Settings], nodes: Sequence[placement.Node], beside: Sequence[Process] = ()) -> None:
    """Refuses trials of which not even one has room; Tune would wait for it without a word.

    Args:
        settings: of trials, the largest among them.
        nodes: of the cluster.
        beside: processes that run beside the trials.

    Raises:
        CommandError: a trial asks for more than there is.
    """
    for trial in settings:
        placement.check_placement([*beside, *processes(trial, trial=True)], nodes)
