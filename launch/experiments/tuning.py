"""Runs a search in Ray Tune: `tune.Tuner` with Ray's own schedulers and searchers, `tune.Tuner.restore` to resume."""

import logging
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import BasicVariantGenerator
from ray.tune.search.optuna import OptunaSearch

from launch.cluster import placement, session
from launch.console.interrupts import Interrupts
from launch.experiments.callbacks import ProgressCallback, TrackerCallback
from launch.experiments.outcome import trials_frame
from launch.experiments.search import ResolvePaths, Search, check_trial_placement
from launch.experiments.space import OBJECTIVE, TIME_KEY, Axis, grid_points
from policies.cory import Cory, CoryConfig
from policies.settings.processes import cpus, processes

if TYPE_CHECKING:
    import pandas as pd

PBT_CHECKPOINTS = 4
"""PBT: checkpoints of a trial. Until a clone starts, the donor may save three more."""


def run_search(
    search: Search,
    folder: Path,
    resolve_paths: ResolvePaths,
    interrupts: Interrupts,
    max_minutes: float | None,
    debug: bool,
) -> "pd.DataFrame":
    """Runs all remaining trials of a search, until they end or the search is stopped.

    Returns:
        The trials so far (`trials_frame`).
    """
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # relative paths refer to the user's working directory
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")  # `interrupts` handles SIGINT
    if not debug:
        os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # otherwise Tune prints boxes in spite of `verbose=0`
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # it repeats the errors of trials
    point_settings = grid_points(search.settings, search.axes)
    largest = max((processes(settings, trial=True) for settings in point_settings), key=cpus)
    with session.ray_session(largest, debug):
        interrupts.install()  # Ray has replaced the SIGTERM handler
        if session.UNCHECKED not in os.environ:
            check_trial_placement(point_settings, placement.alive_nodes())
        # Not `time_budget_s`, which marks unfinished trials as ended, so that they could not resume.
        timer = threading.Timer(60 * (max_minutes or 0), request_stop)
        timer.daemon = True
        if max_minutes is not None:
            timer.start()
        interrupts.training = True
        try:
            return run_trials(Cory, CoryConfig().cory(**search.space(resolve_paths)), search, folder)
        finally:
            timer.cancel()


def run_trials(trainable: type[tune.Trainable], space: Any, search: Search, folder: Path) -> "pd.DataFrame":
    """Starts a search, or resumes it if it has started."""
    folder = folder.resolve()
    make_tuner(trainable, space, search, folder).fit()
    # Not `fit`'s own results, which show unfinished trials as ended after the search was stopped.
    return trials_frame(tune.ExperimentAnalysis(str(folder)).trials, search)


def make_tuner(trainable: type[tune.Trainable], space: Any, search: Search, folder: Path) -> tune.Tuner:
    """Creates the tuner of a search, or restores it if the search has started."""
    settings = search.settings
    if tune.Tuner.can_restore(str(folder)):
        return tune.Tuner.restore(str(folder), trainable, param_space=space, resume_errored=True)
    is_pbt = search.scheduler == "pbt"
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(
            metric=OBJECTIVE,
            mode="max",
            num_samples=1 if is_pbt else search.samples,
            scheduler=make_scheduler(search),
            search_alg=OptunaSearch(seed=settings.seed)
            if search.algorithm
            else BasicVariantGenerator(
                constant_grid_search=not is_pbt,  # all points, and so all seeds, share the sampled values
                random_state=settings.seed,
                max_concurrent=search.concurrent or 0,
            ),
            max_concurrent_trials=search.concurrent if search.algorithm else None,
            trial_name_creator=trial_name,
            trial_dirname_creator=trial_name,
        ),
        run_config=tune.RunConfig(
            name=folder.name,
            storage_path=str(folder.parent),
            callbacks=[ProgressCallback([axis.key for axis in search.axes]), TrackerCallback()],
            checkpoint_config=tune.CheckpointConfig(
                checkpoint_frequency=0 if is_pbt else settings.checkpoint_every,  # PBT saves its donors itself
                checkpoint_at_end=True,
                num_to_keep=max(PBT_CHECKPOINTS, settings.keep_checkpoints) if is_pbt else settings.keep_checkpoints,
            ),
            verbose=0,
        ),
    )


def make_scheduler(search: Search) -> TrialScheduler | None:
    """Creates the scheduler of a search, which decides after evaluations; None: all trials run to their end."""
    settings = search.settings
    if search.scheduler == "asha":
        return ASHAScheduler(
            time_attr=TIME_KEY,
            max_t=settings.num_updates,
            grace_period=settings.eval_every,
            reduction_factor=3,  # the best third continues
        )
    if search.scheduler == "pbt":
        mutations = {
            axis.key: list(axis.values) if axis.scale is None else axis.domain(grid=False) for axis in search.axes
        }
        return PopulationBasedTraining(
            time_attr=TIME_KEY,
            perturbation_interval=settings.eval_every,
            hyperparam_mutations={"cory_settings": mutations},
            custom_explore_fn=partial(clip_to_ranges, axes=search.axes),
        )
    return None


def clip_to_ranges(config: dict[str, Any], axes: list[Axis]) -> dict[str, Any]:
    """Clips values that PBT has perturbed to the ranges of the search."""
    settings = config["cory_settings"]
    for axis in axes:
        if axis.scale is not None:
            low, high = axis.values
            settings[axis.key] = min(max(settings[axis.key], low), high)
    return config


def request_stop() -> None:
    """Makes Tune save the state of the search, and stop; called in a thread."""
    while signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:  # Tune has not installed its handler yet
        if not threading.main_thread().is_alive():  # the search has ended
            return
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGUSR1)


def trial_name(trial: Trial) -> str:
    """Returns the name of a trial and its folder, such as `trial_00003`."""
    return f"trial_{trial.trial_id.rpartition('_')[2]}"
