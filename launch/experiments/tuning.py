"""Runs the trials of a search in Ray Tune, from the first one to the last."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import BasicVariantGenerator

from launch.cluster import placement, session
from launch.console import output
from launch.display.terminal import ProgressPrinter
from launch.experiments.callbacks import ProgressCallback, StopCallback, TrackerCallback
from launch.experiments.outcome import trials_frame
from launch.experiments.schedulers import AshaScheduler, FifoScheduler, PbtScheduler, TrialReports, StopRequested
from launch.experiments.search import LOG_FILE, REPORTS_FILE, Search, check_room, is_resumable, read_reports
from launch.experiments.space import OBJECTIVE, TIME_KEY, points
from launch.experiments.trials import ResolvePaths, Trials
from launch.run_folder.journal import Journal
from policies.cory import Cory, CoryConfig
from policies.settings.processes import cpus, processes

if TYPE_CHECKING:
    import pandas as pd


def run_search(
    search: Search, folder: Path, locate: ResolvePaths, voice: ProgressPrinter, stop: StopCallback, debug: bool
) -> "pd.DataFrame":
    """Runs all trials in a locked folder, or those that are left, as far as the budget goes.

    Args:
        search: what is searched.
        folder: its folder.
        locate: finds the files that settings name.
        voice: shows what happens.
        stop: what ends it; its interrupts are entered.
        debug: show libraries' logs.

    Returns:
        The trials so far (`collect_results`): finished, failed, or neither where the search was stopped or the budget
        is spent.

    Raises:
        CommandError: a trial asks for more than Ray has.
    """
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # relative paths in settings are the user's
    os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "5")
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")  # the interrupts have it
    checked = points(search.settings, search.axes)
    largest = max((processes(settings, trial=True) for settings in checked), key=cpus)
    with contextlib.ExitStack() as stack:
        if not debug:
            stack.enter_context(output.redirect_output(folder / LOG_FILE))
        stack.enter_context(voice)
        voice.stage("Starting Ray")
        stack.enter_context(session.ray_session(largest, debug))
        stop.interrupts.install()  # Ray took SIGTERM
        if session.UNCHECKED not in os.environ:
            check_room(checked, placement.alive_nodes())
        voice.stage("Running trials")
        reports = Journal(folder / REPORTS_FILE, TIME_KEY)
        reports.cut_after(search.settings.num_updates)  # what a kill left of a line
        trials = Trials(folder, search.settings, [axis.key for axis in search.axes], locate)
        scheduler = make_scheduler(search, trials, stop.requested, read_reports(folder))
        voice.begin()
        stop.interrupts.training = True
        space = CoryConfig().cory(**search.space())
        callbacks = [ProgressCallback(reports, voice, trials), TrackerCallback(folder)]
        ended = run_trials(Cory, space, folder, search, scheduler, stop, callbacks)
        return trials_frame(ended, trials, search.axes, stop.statuses)


def run_trials(
    trainable: type[tune.Trainable],
    space: Any,
    folder: Path,
    search: Search,
    scheduler: TrialScheduler,
    stop: StopCallback,
    callbacks: Sequence[tune.Callback] = (),
) -> list[Trial]:
    """Lets Tune run trials, or continue those of a folder, whose path may have changed.

    Not by a `Tuner`, whose `restore` takes the callbacks and the scheduler from a file.
    """
    settings, folder = search.settings, folder.resolve()
    population_based = search.scheduler == "pbt"
    random_search = BasicVariantGenerator(
        constant_grid_search=not population_based,  # what is drawn is drawn once for all points, so for all seeds
        random_state=settings.seed,
        max_concurrent=search.concurrent or 0,
    )

    done = stop.done  # not `stop`: Tune pickles the function below

    def has_ended(trial_id: str, result: dict[str, Any]) -> bool:
        done[trial_id] += 1  # here, as it is called before the scheduler decides
        return bool(result[TIME_KEY] >= settings.num_updates)

    return tune.run(
        trainable,
        config=space,
        name=folder.name,
        storage_path=str(folder.parent),
        num_samples=1 if population_based else search.samples,
        search_alg=random_search if search.algorithm is None else optuna_search(search),
        max_concurrent_trials=search.concurrent if search.algorithm is not None else None,
        scheduler=scheduler,
        stop=has_ended,
        checkpoint_config=tune.CheckpointConfig(
            checkpoint_frequency=settings.checkpoint_every,
            checkpoint_at_end=True,
            num_to_keep=max(1, settings.keep_checkpoints),
        ),
        callbacks=[*callbacks, stop],
        trial_name_creator=trial_name,
        trial_dirname_creator=trial_name,
        resume_config=tune.ResumeConfig(errored=tune.ResumeConfig.ResumeType.RESUME) if is_resumable(folder) else None,
        raise_on_failed_trial=False,
        verbose=0,
    ).trials


def make_scheduler(search: Search, trials: Trials, stopping: StopRequested, reports: TrialReports = ()) -> TrialScheduler:
    """Returns the scheduler of a search, which resumes after these reports."""
    if search.scheduler == "pbt":
        return PbtScheduler(trials, stopping, search.settings, search.axes)
    return AshaScheduler(trials, stopping, search.settings, reports) if search.scheduler == "asha" else FifoScheduler(trials, stopping)


def optuna_search(search: Search) -> Any:
    """Returns Optuna's tree-structured Parzen estimator."""
    from ray.tune.search.optuna import OptunaSearch

    space = {"cory_settings": {axis.key: axis.domain(grid=False) for axis in search.axes}}
    return OptunaSearch(OptunaSearch.convert_search_space(space), metric=OBJECTIVE, mode="max", seed=search.settings.seed)


def trial_name(trial: Trial) -> str:
    """Returns the name of a trial, and of its folder: `trial_00003`."""
    return f"trial_{trial.trial_id.rpartition('_')[2]}"
