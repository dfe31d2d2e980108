"""Tune callbacks of a search: progress on the terminal and in a journal, experiment trackers, stopping."""

import logging
import math
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

from ray.tune import Callback
from ray.tune.experiment import Trial

from launch.console.errors import CommandError
from launch.console.interrupts import Interrupts
from launch.display.rows import ROW_COLUMNS
from launch.display.tables import format_metric, with_shown_kl
from launch.display.terminal import ProgressPrinter
from launch.experiments.space import OBJECTIVE, TIME_KEY, format_point
from launch.experiments.trials import Trials
from launch.run_folder.journal import Journal
from launch.run_folder.records import MetricValues, Sample, Update, to_json
from launch.training.tracking import Trackers, end_services, flat_metrics, open_services
from policies.settings.settings import make_settings

logger = logging.getLogger(__name__)


class ProgressCallback(Callback):
    """Prints a line per evaluation and logs a report per update. The progress bar counts updates."""

    def __init__(self, journal: Journal, progress: ProgressPrinter, trials: Trials) -> None:
        """Creates the callback.

        Args:
            journal: stores the reports. Tune's own result.json loses reports when a trial is paused or the driver is
                killed.
            progress: prints them.
            trials: of the search.
        """
        self.journal = journal
        self.progress = progress
        self.trials = trials
        self._reported = {(report["trial_id"], report[TIME_KEY]) for report in journal.read()}

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **_: Any
    ) -> None:
        """Logs the report and prints the evaluation, if there is one."""
        report = {name: value for name, value in result["cory"].items() if name != "samples"}
        values = self.trials.values[trial.trial_id]
        progress = {TIME_KEY: result[TIME_KEY], OBJECTIVE: result[OBJECTIVE]}
        self.journal.append(
            {"trial": str(trial), "trial_id": trial.trial_id, **progress, "values": values, "cory": report}
        )
        update = (trial.trial_id, result[TIME_KEY])  # a resumed trial may repeat updates
        time_left = self.progress.advance(again=update in self._reported)
        self._reported.add(update)
        if "evaluation" in result["cory"]:
            settings = self.trials.settings
            figures = cast(MetricValues, to_json(with_shown_kl(settings.selection_metrics(result["cory"]))))
            text = "  ".join(f"{label} {format_metric(key, figures[key]):>6}" for key, label, _ in ROW_COLUMNS)
            done = f"{result[TIME_KEY]:>4}/{settings.num_updates:<4}"
            self.progress.print(f"{trial}  {done} {text}  {format_point(values)}  {time_left}")

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Prints that a trial continues from a checkpoint: its own or, under PBT, another trial's."""
        if (origin := self.trials.origin(trial)) is not None:
            update = trial.latest_checkpoint_result.metrics[TIME_KEY]
            values = format_point(self.trials.values[trial.trial_id])
            self.progress.print(f"{trial}  continues from {origin} after update {update}  {values}")

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Prints that a trial failed. Tune provides the reason only at the end."""
        self.progress.print(f"{trial}  failed  {format_point(self.trials.values[trial.trial_id])}")


class TrackerCallback(Callback):
    """Logs trials to the experiment trackers that their settings enable, one tracker run per trial.

    The runs form a group named after the search's folder.
    """

    def __init__(self, folder: Path) -> None:
        """Creates the callback for a search's folder."""
        self.folder = folder
        self._open: dict[str, Trackers] = {}

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **_: Any
    ) -> None:
        """Logs an update's metrics and samples."""
        trackers = self._trackers(trial)
        report = cast(dict[str, Any], to_json(result["cory"]))
        samples, update = cast(list[Sample], report.pop("samples", [])), report["update"]
        if samples and update % trial.config["cory_settings"]["samples_every"] == 0:
            trackers.log_samples(update, samples, held_out=False)
        trackers.log(update, flat_metrics(cast(Update, report)))

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Closes the trial's tracker run."""
        self._close(trial, failed=False)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Closes the trial's tracker run as failed."""
        self._close(trial, failed=True)

    def on_experiment_end(self, trials: list[Trial], **_: Any) -> None:
        """Closes all tracker runs that are still open."""
        for trackers in self._open.values():
            trackers.close(failed=False)
        self._open.clear()
        end_services()

    def _trackers(self, trial: Trial) -> Trackers:
        if trial.trial_id not in self._open:
            settings = make_settings(trial.config["cory_settings"])
            try:
                services = open_services(self.folder / str(trial), settings, group=self.folder.resolve().name)
            except CommandError as error:
                logger.warning("%s %s continues without this tracker.", error, trial)
                services = []
            self._open[trial.trial_id] = Trackers(services)
        return self._open[trial.trial_id]

    def _close(self, trial: Trial, failed: bool) -> None:
        trackers = self._open.pop(trial.trial_id, None)
        if trackers is not None:
            trackers.close(failed)


class StopCallback(Callback):
    """Stops a search on Ctrl-C, SIGTERM or an exhausted budget, after running trials have saved their update.

    Tune's own `time_budget_s` terminates trials without saving them, so they could not resume.
    """

    def __init__(
        self, interrupts: Interrupts, max_updates: float | None = None, max_minutes: float | None = None
    ) -> None:
        """Creates the callback.

        Args:
            interrupts: receives Ctrl-C and SIGTERM.
            max_updates: total budget of updates over all trials.
            max_minutes: time budget, counted from the start of the first trial.
        """
        self.interrupts = interrupts
        self.max_updates = max_updates or math.inf
        self.max_seconds = 60 * (max_minutes or math.inf)
        self.done: Counter[str] = Counter()
        """Number of completed updates by trial."""
        self.statuses: dict[str, str] = {}
        """Trial id to the status before Tune stopped, because Tune marks all trials as terminated when it stops."""
        self._started: float | None = None
        self._unsaved: set[str] = set()  # trials whose current process has completed an update

    @property
    def is_spent(self) -> bool:
        """Whether the budget is exhausted."""
        seconds = 0.0 if self._started is None else time.monotonic() - self._started
        return self.done.total() >= self.max_updates or seconds > self.max_seconds

    def requested(self) -> bool:
        """Returns whether the search should stop, upon which schedulers pause trials."""
        return self.interrupts.requested is not None or self.is_spent

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Registers a new trial process and starts the budget's clock."""
        self._started = self._started or time.monotonic()
        self._unsaved.discard(trial.trial_id)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **_: Any
    ) -> None:
        """Registers that the trial has an update to save."""
        self._unsaved.add(trial.trial_id)

    def on_step_end(self, iteration: int, trials: list[Trial], **_: Any) -> None:
        """Stops Tune once no running trial has an update left to save."""
        self.statuses = {trial.trial_id: trial.status for trial in trials}
        running = {trial.trial_id for trial in trials if trial.status == Trial.RUNNING}
        if self.requested() and not running & self._unsaved:
            os.kill(os.getpid(), signal.SIGUSR1)  # makes Tune save the state of the search and stop
