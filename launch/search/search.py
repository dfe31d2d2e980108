"""A search over settings: its folder, and its life in Ray Tune from the first trial to the results.

search.yaml       what is searched, by which command
trial_00000/ ...  a folder per trial: Tune's result.json and progress.csv, checkpoints, error.txt if it failed
reports.jsonl     a line per update of a trial; after a kill some stand twice
log.txt           what libraries printed in the driver
results.csv       a line per trial
objective.png     the held-out combined reward over each searched setting
best.yaml         every setting of the best point, for `cory train`
"""

import contextlib
import os
import random
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cory_env.pickled import shown
from launch.cluster import room, session
from launch.console import output
from launch.console.errors import CommandError
from launch.console.interrupts import Interrupts
from launch.display.terminal import Voice
from launch.run_folder.journal import Journal, replace_text
from launch.run_folder.layout import LOCK
from launch.run_folder.locks import FolderHandle, lock_folder
from launch.run_folder.storage import is_uri
from launch.search.budget import Budget
from launch.search.space import METRIC, SEED, TIME, Axis, asking, points, read_axes
from launch.training.start import starting_policies
from policies.settings.core_yaml import as_word, read_yaml, write_yaml
from policies.settings.placement import Process, cpus, processes
from policies.settings.settings import Settings, SettingsError, changed_settings, kept_settings

if TYPE_CHECKING:
    from ray.tune import Callback, Tuner
    from ray.tune.experiment import Trial

SEARCH = "search.yaml"
ORIGIN = "# cory tune"
LOG = "log.txt"
REPORTS = "reports.jsonl"
RESULTS = "results.csv"
STARTED = "tuner.pkl"
"""What Tune writes first."""
KEPT = 4
"""Checkpoints of a trial that are kept under PBT, at least: a clone may start from its donor's while that goes on."""


_KEPT = ("scheduler", "samples", "seeds", "concurrent", "algorithm")


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
            drawn[SEED] = tune.grid_search(list(range(first, first + seeds)))
        return {**self.settings.model_dump(), **drawn}

    def write(self, folder: Path, origin: str) -> None:
        """Writes `search.yaml`; its first line is the command."""
        kept = {
            "over": [axis.word for axis in self.axes],
            **{name: getattr(self, name) for name in _KEPT},
            "settings": self.settings.model_dump(),
        }
        replace_text(folder / SEARCH, f"# {origin}\n{write_yaml(kept)}")

    @classmethod
    def read(cls, folder: Path) -> "Search":
        """Reads a search's `search.yaml`.

        Raises:
            CommandError: there is none, or another version wrote it.
        """
        file = folder / SEARCH
        if not file.is_file() or not file.read_bytes().startswith(ORIGIN.encode()):
            missing = f"has no {SEARCH}" if folder.is_dir() else "does not exist"
            raise CommandError(f"{folder} is not a search's folder: it {missing}. `cory tune --out DIR` makes them.")
        try:
            kept = read_yaml(file.read_text(encoding="utf-8"), "it")
            settings = kept_settings(kept.pop("settings"))
            return cls(settings=settings, axes=read_axes(kept.pop("over")), **kept)
        except (CommandError, SettingsError, UnicodeDecodeError, TypeError, AttributeError, KeyError) as error:
            raise CommandError(f"{file} cannot be read as a search: {error}") from error


def with_start(search: Search) -> Search:
    """Names the checkpoint that trials start from, where `start_from` is a run: a later one may become its best.

    Raises:
        CommandError: there is none, or it is in storage.
        SettingsError: its policies do not fit those of a trial.
    """
    found = asking(points(search.settings, search.axes))
    for settings in found:
        if settings.start_from is not None and is_uri(settings.start_from):
            raise CommandError(
                f"start_from={settings.start_from} is a URI, and trials start from a folder, which all nodes must "
                "share. Copy that run there, and name the folder."
            )
    starts = [starting_policies(settings) for settings in found]
    if "start_from" in (axis.key for axis in search.axes) or starts[0] is None:
        return search
    return search._replace(settings=search.settings.model_copy(update={"start_from": str(starts[0])}))


def check_free(folder: Path) -> None:
    """Refuses a folder that holds something, unless it is a search that ended before its first trial began.

    Raises:
        CommandError: it does.
    """
    if folder.is_file():
        raise CommandError(f"{folder} is a file: name another folder with --out.")
    if not folder.is_dir() or ((folder / SEARCH).exists() and not (folder / STARTED).exists()):
        return
    if any(entry.name != LOCK for entry in folder.iterdir()):
        hint = f"go on with it by `{resume_command(folder)}`, or " if (folder / SEARCH).exists() else ""
        raise CommandError(f"{folder} is not empty: {hint}name another folder with --out.")


def create(folder: Path, search: Search, origin: str) -> contextlib.ExitStack:
    """Makes a search's folder; returns the lock on it.

    Raises:
        CommandError: something is there already, or the folder cannot be made.
    """
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"The search's folder {folder} cannot be made: {error.strerror}.") from error
    lock = lock_folder(folder)
    check_free(folder)  # another search may just have begun here
    search.write(folder, origin)
    return lock


def begun(folder: Path) -> bool:
    """Tells whether a folder has a search that can go on."""
    return (folder / SEARCH).exists() and (folder / STARTED).exists()


def check_same(folder: Path, search: Search) -> None:
    """Refuses to go on with another search than was asked for.

    Raises:
        CommandError: the folder's differs, in what the message names.
    """
    there = Search.read(folder)
    old, new = ({**s._asdict(), "over": " and ".join(axis.word for axis in s.axes)} for s in (there, search))
    differing = [key for key in ("over", *_KEPT) if old[key] != new[key]]
    other = [f"no {key}" if old[key] is None else f"{key} {old[key]}" for key in differing]
    kept = there.settings.model_dump()
    start = search.settings.start_from
    from_that_run = start and Path(str(kept["start_from"])).is_relative_to(Path(start).resolve())
    changed = [
        key
        for key in changed_settings(there.settings, search.settings)
        if key != "start_from" or not from_that_run  # the search keeps a checkpoint of that run
    ]
    other += [f"{key}={shown(as_word(kept[key]))}" for key in changed]
    if other:
        raise CommandError(
            f"{folder} holds a search with {', '.join(other)}. Ask for just that, or name another folder with --out."
        )


def resume_command(folder: Path) -> str:
    """Returns the command that continues a search."""
    return f"cory tune --resume {shlex.quote(str(folder))}"


def run_trials(
    folder: Path,
    search: Search,
    voice: Voice,
    interrupts: Interrupts,
    budget: Budget,
    handle: FolderHandle,
    *,
    resume: bool,
    debug: bool,
) -> "list[Trial]":
    """Runs all trials in a locked folder, or those that are left, as far as the budget goes.

    Returns:
        The trials: finished, failed, or neither where `interrupts`, which is entered, was asked to stop, or the budget
        is spent.

    Raises:
        CommandError: one trial, or as many as are to run at a time, ask for more than Ray has.
        FolderError: the folder, of which `handle` is, was renamed or removed.
    """
    from launch.search.stop import Stop
    from launch.search.tracked import Tracked

    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # relative paths in settings are the user's
    os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "5")
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")  # `interrupts` has it
    checked = points(search.settings, search.axes)
    largest = max((processes(settings, trial=True) for settings in checked), key=cpus)
    random.seed(search.settings.seed)  # what PBT draws from
    with contextlib.ExitStack() as around:
        if not debug:
            around.enter_context(output.output_into(folder / LOG))
        around.enter_context(voice)
        voice.stage("Starting Ray")
        around.enter_context(session.ray_session(largest, debug))
        interrupts.install()  # Ray took SIGTERM
        if session.UNCHECKED not in os.environ:
            check_room(search, checked, room.living_nodes())
        voice.stage("Running trials")
        if resume:
            Journal(folder / REPORTS, TIME).cut_after(search.settings.updates)  # what a kill left of a line
        stop = Stop(interrupts, search.settings.checkpoint_every, budget, handle)
        callbacks = [_progress(folder, search, voice), Tracked(folder), stop]
        tuner = _restored(folder, search, callbacks) if resume else _tuner(folder, search, callbacks)
        voice.begin()
        interrupts.training = True
        trials: list[Trial] = tuner.fit()._experiment_analysis.trials
        for trial in trials:
            trial.set_status(stop.statuses.get(trial.trial_id, trial.status))
        return trials


def check_room(
    search: Search, checked: Sequence[Settings], nodes: Sequence[room.Node], beside: Sequence[Process] = ()
) -> None:
    """Refuses trials for which there is no room; Tune would wait for it without a word.

    Args:
        search: what is searched.
        checked: the settings of trials, the largest among them.
        nodes: of the cluster.
        beside: processes that run beside the trials.

    Raises:
        CommandError: a trial, or as many as are to run at a time, ask for more than there is.
    """
    for settings in checked:
        trial = processes(settings, trial=True)
        room.check([*beside, *trial], nodes)
        if search.concurrent is None:
            continue
        count = min(search.concurrent, search.trials)
        at_once = [*beside, *(replace(kind, count=count * kind.count) for kind in trial)]
        _, lacking = room.pack(at_once, nodes)
        if lacking:
            raise CommandError(
                f"{count} trials at a time: {room.refusal(at_once, lacking)} Lower --concurrent or what "
                "each trial asks for, or add nodes."
            )


def _tuner(folder: Path, search: Search, callbacks: "list[Callback]") -> "Tuner":
    from ray import tune
    from ray.tune.search import BasicVariantGenerator

    from policies.cory import Cory, CoryConfig

    settings = search.settings
    return tune.Tuner(
        Cory,
        param_space=CoryConfig().cory(**search.space()),
        tune_config=tune.TuneConfig(
            metric=METRIC,
            mode="max",
            num_samples=1 if search.scheduler == "pbt" else search.samples,
            scheduler=_scheduler(search),
            # What is drawn is drawn once for all points of the grid, so for all seeds.
            search_alg=_optuna(search)
            if search.algorithm is not None
            else BasicVariantGenerator(
                constant_grid_search=search.scheduler != "pbt",
                random_state=settings.seed,
                max_concurrent=search.concurrent or 0,
            ),
            max_concurrent_trials=search.concurrent if search.algorithm is not None else None,
            trial_name_creator=trial_name,
            trial_dirname_creator=trial_name,
        ),
        run_config=tune.RunConfig(
            name=folder.name,
            storage_path=str(folder.resolve().parent),
            stop={TIME: settings.updates},
            checkpoint_config=tune.CheckpointConfig(
                checkpoint_frequency=settings.checkpoint_every,
                checkpoint_at_end=True,
                num_to_keep=max(KEPT if search.scheduler == "pbt" else 1, settings.keep_checkpoints),
            ),
            failure_config=tune.FailureConfig(max_failures=0),
            callbacks=callbacks,
            verbose=0,
        ),
    )


def _optuna(search: Search) -> Any:
    """Optuna's tree-structured Parzen estimator."""
    from ray.tune.search.optuna import OptunaSearch

    space = {f"cory_settings/{axis.key}": axis.distribution() for axis in search.axes}
    return OptunaSearch(space=space, metric=METRIC, mode="max", seed=search.settings.seed)


def _scheduler(search: Search, reports: Sequence[dict[str, Any]] = ()) -> Any:
    from launch.search.schedulers import Fifo, asha, population

    if search.scheduler == "pbt":
        return population(search.settings, search.axes)
    return asha(search.settings, reports) if search.scheduler == "asha" else Fifo()


def _restored(folder: Path, search: Search, callbacks: "list[Callback]") -> "Tuner":
    """The search where it was; what Tune would take from its file, but cannot, is made anew."""
    from ray import tune

    from policies.cory import Cory, CoryConfig

    if not any(folder.glob("experiment_state-*.json")):  # killed before anything was noted
        return _tuner(folder, search, callbacks)
    tuner = tune.Tuner.restore(
        str(folder.resolve()),
        trainable=Cory,
        param_space=CoryConfig().cory(**search.space()),  # without it, trials that had not begun cannot
        resume_unfinished=True,
        resume_errored=True,
    )
    inner = tuner._local_tuner
    inner._run_config.callbacks = callbacks
    inner._tune_config.scheduler = _scheduler(search, recorded(folder))
    return tuner


def _progress(folder: Path, search: Search, voice: Voice) -> Any:
    from launch.search.progress import Progress

    return Progress(Journal(folder / REPORTS), voice, [axis.key for axis in search.axes], search.settings)


def trial_name(trial: "Trial") -> str:
    """Returns the name of a trial, and of its folder: `trial_00003`."""
    return f"trial_{trial.trial_id.rpartition('_')[2]}"


def recorded(folder: Path) -> list[dict[str, Any]]:
    """Returns what trials reported, in the order of time; of an update that was done twice, the last report."""
    found = {(report["trial_id"], report[TIME]): report for report in Journal(folder / REPORTS).read()}
    return list(found.values())
