"""Runs a search in Ray Tune: `tune.Tuner`, and `tune.Tuner.restore` to resume."""

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.experiment import Trial

from launch.cluster import placement, session
from launch.console.interrupts import Interrupts
from launch.experiments.callbacks import ProgressCallback
from launch.experiments.outcome import trials_frame
from launch.experiments.search import ResolvePaths, Search
from launch.experiments.space import grid_points
from policies.cory import Cory, CoryConfig
from policies.settings.processes import cpus, processes
from policies.settings.settings import Settings

if TYPE_CHECKING:
    import pandas as pd


def run_search(
    search: Search, folder: Path, resolve_paths: ResolvePaths, interrupts: Interrupts, debug: bool
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
    points = grid_points(search.settings, search.axes)
    largest = max((processes(settings, trial=True) for settings in points), key=cpus)
    with session.ray_session(largest, debug):
        interrupts.install()  # Ray has replaced the SIGTERM handler
        if session.UNCHECKED not in os.environ:
            check_trial_placement(points, placement.alive_nodes())
        interrupts.training = True
        return run_trials(Cory, CoryConfig().cory(**search.space(resolve_paths)), search, folder)


def check_trial_placement(settings: Sequence[Settings], nodes: Sequence[placement.Node]) -> None:
    """Checks that at least one trial fits on the cluster. Otherwise Tune would wait for resources silently."""
    for trial in settings:
        placement.check_placement(processes(trial, trial=True), nodes)


def run_trials(trainable: type[tune.Trainable], space: Any, search: Search, folder: Path) -> "pd.DataFrame":
    """Starts a search, or resumes it if it has started."""
    folder = folder.resolve()
    if tune.Tuner.can_restore(str(folder)):
        tuner = tune.Tuner.restore(str(folder), trainable, param_space=space, resume_errored=True)
    else:
        tune_config = tune.TuneConfig(
            max_concurrent_trials=search.concurrent, trial_name_creator=trial_name, trial_dirname_creator=trial_name
        )
        run_config = tune.RunConfig(
            name=folder.name,
            storage_path=str(folder.parent),
            callbacks=[ProgressCallback(list(search.axes))],
            checkpoint_config=tune.CheckpointConfig(
                checkpoint_frequency=search.settings.checkpoint_every,
                checkpoint_at_end=True,
                num_to_keep=search.settings.keep_checkpoints,
            ),
            verbose=0,
        )
        tuner = tune.Tuner(trainable, param_space=space, tune_config=tune_config, run_config=run_config)
    tuner.fit()
    # Not `fit`'s own results, which show unfinished trials as ended after the search was stopped.
    return trials_frame(tune.ExperimentAnalysis(str(folder)).trials, search)


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
