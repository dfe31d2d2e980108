"""Runs the trials of a search in Ray Tune."""

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
from launch.experiments.schedulers import AshaScheduler, FifoScheduler, PbtScheduler, StopRequested, TrialReports
from launch.experiments.search import LOG_FILE, REPORTS_FILE, Search, check_trial_placement, is_resumable, read_reports
from launch.experiments.space import OBJECTIVE, TIME_KEY, grid_points
from launch.experiments.trials import ResolvePaths, Trials
from launch.run_folder.journal import Journal
from policies.cory import Cory, CoryConfig
from policies.settings.processes import cpus, processes

if TYPE_CHECKING:
    import pandas as pd


def run_search(
    search: Search,
    folder: Path,
    resolve_paths: ResolvePaths,
    progress: ProgressPrinter,
    stop: StopCallback,
    debug: bool,
) -> "pd.DataFrame":
    """Runs all remaining trials of a search within the budget.

    Args:
        search: the definition of the search.
        folder: of the search, locked by the caller.
        resolve_paths: replaces the paths in settings by their current locations.
        progress: prints the progress.
        stop: stops the search; its interrupts have been entered.
        debug: show libraries' logs.

    Returns:
        The trials so far (`trials_frame`): finished, failed, or unfinished if the search was stopped or the budget is
        exhausted.

    Raises:
        CommandError: a trial requires more resources than Ray has.
    """
    # Relative paths in settings refer to the user's working directory.
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "5")
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")  # `stop.interrupts` handles SIGINT
    point_settings = grid_points(search.settings, search.axes)
    largest = max((processes(settings, trial=True) for settings in point_settings), key=cpus)
    with contextlib.ExitStack() as stack:
        if not debug:
            stack.enter_context(output.redirect_output(folder / LOG_FILE))
        stack.enter_context(progress)
        progress.stage("Starting Ray")
        stack.enter_context(session.ray_session(largest, debug))
        stop.interrupts.install()  # Ray has replaced the SIGTERM handler
        if session.UNCHECKED not in os.environ:
            check_trial_placement(point_settings, placement.alive_nodes())
        progress.stage("Running trials")
        reports = Journal(folder / REPORTS_FILE, TIME_KEY)
        reports.cut_after(search.settings.num_updates)  # drops a line that a kill left incomplete
        trials = Trials(folder, search.settings, [axis.key for axis in search.axes], resolve_paths)
        scheduler = make_scheduler(search, trials, stop.requested, read_reports(folder))
        progress.start_clock()
        stop.interrupts.training = True
        space = CoryConfig().cory(**search.space())
        callbacks = [ProgressCallback(reports, progress, trials), TrackerCallback(folder)]
        tune_trials = run_trials(Cory, space, folder, search, scheduler, stop, callbacks)
        return trials_frame(tune_trials, trials, search.axes, stop.statuses)


def run_trials(
    trainable: type[tune.Trainable],
    space: Any,
    folder: Path,
    search: Search,
    scheduler: TrialScheduler,
    stop: StopCallback,
    callbacks: Sequence[tune.Callback] = (),
) -> list[Trial]:
    """Runs trials with Tune, or resumes those of a folder, which may have been moved.

    This uses `tune.run` because `Tuner.restore` loads the callbacks and the scheduler from a file.
    """
    settings, folder = search.settings, folder.resolve()
    population_based = search.scheduler == "pbt"
    random_search = BasicVariantGenerator(
        constant_grid_search=not population_based,  # all points, and so all seeds, share the sampled values
        random_state=settings.seed,
        max_concurrent=search.concurrent or 0,
    )

    done = stop.done  # not `stop`, because Tune pickles the function below

    def has_ended(trial_id: str, result: dict[str, Any]) -> bool:
        done[trial_id] += 1  # counted here, because Tune calls this before the scheduler decides
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


def make_scheduler(
    search: Search, trials: Trials, stop_requested: StopRequested, reports: TrialReports = ()
) -> TrialScheduler:
    """Creates the scheduler of a search.

    Args:
        search: the definition of the search.
        trials: of the search.
        stop_requested: returns whether the search should stop.
        reports: of the search so far, in chronological order.
    """
    if search.scheduler == "pbt":
        return PbtScheduler(trials, stop_requested, search.settings, search.axes)
    if search.scheduler == "asha":
        return AshaScheduler(trials, stop_requested, search.settings, reports)
    return FifoScheduler(trials, stop_requested)


def optuna_search(search: Search) -> Any:
    """Creates a searcher that uses Optuna's tree-structured Parzen estimator (TPE)."""
    from ray.tune.search.optuna import OptunaSearch

    space = {"cory_settings": {axis.key: axis.domain(grid=False) for axis in search.axes}}
    return OptunaSearch(
        OptunaSearch.convert_search_space(space), metric=OBJECTIVE, mode="max", seed=search.settings.seed
    )


def trial_name(trial: Trial) -> str:
    """Returns the name of a trial and its folder, such as `trial_00003`."""
    return f"trial_{trial.trial_id.rpartition('_')[2]}"
