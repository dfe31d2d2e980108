"""What Tune tells of a search's trials: to the terminal and a journal, to trackers, and to what ends a search."""

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
from launch.display.rows import COLUMNS
from launch.display.tables import format_metric
from launch.display.terminal import ProgressPrinter
from launch.experiments.space import OBJECTIVE, TIME_KEY, format_point
from launch.experiments.trials import Trials
from launch.run_folder.journal import Journal
from launch.run_folder.records import Figures, Sample, Update, to_json
from launch.training.tracking import Trackers, end_services, figures_of, open_services
from policies.settings.settings import make_settings

logger = logging.getLogger(__name__)


class ProgressCallback(Callback):
    """Shows a line per evaluation, and keeps a report per update. A step of the bar is an update."""

    def __init__(self, journal: Journal, voice: ProgressPrinter, trials: Trials) -> None:
        """Takes what keeps reports, what shows them, and the trials.

        Tune's own result.json loses reports where a trial is paused or its driver killed.
        """
        self.journal = journal
        self.voice = voice
        self.trials = trials
        self._reported = {(report["trial_id"], report[TIME_KEY]) for report in journal.read()}

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **_: Any
    ) -> None:
        """Keeps a report, and shows an evaluation."""
        report = {name: value for name, value in result["cory"].items() if name != "samples"}
        values = self.trials.values[trial.trial_id]
        figures = {TIME_KEY: result[TIME_KEY], OBJECTIVE: result[OBJECTIVE]}
        self.journal.append(
            {"trial": str(trial), "trial_id": trial.trial_id, **figures, "values": values, "cory": report}
        )
        update = (trial.trial_id, result[TIME_KEY])  # a trial that continues may do some again
        left = self.voice.advance(again=update in self._reported)
        self._reported.add(update)
        if "evaluation" in result["cory"]:
            settings = self.trials.settings
            figures = cast(Figures, to_json(dict(settings.selection_metrics(result["cory"]))))
            text = "  ".join(f"{label} {format_metric(key, figures[key]):>6}" for key, label, _ in COLUMNS)
            done = f"{result[TIME_KEY]:>4}/{settings.num_updates:<4}"
            self.voice.print(f"{trial}  {done} {text}  {format_point(values)}  {left}")

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Shows that a trial continues from a checkpoint: its own, or under PBT another trial's."""
        if (origin := self.trials.origin(trial)) is not None:
            update = trial.latest_checkpoint_result.metrics[TIME_KEY]
            values = format_point(self.trials.values[trial.trial_id])
            self.voice.print(f"{trial}  continues from {origin} after update {update}  {values}")

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Shows that a trial failed; Tune tells why only afterwards."""
        self.voice.print(f"{trial}  failed  {format_point(self.trials.values[trial.trial_id])}")


class TrackerCallback(Callback):
    """Sends what trials report to the trackers that their settings name, a run there for each trial.

    There they are a group that is called after the search's folder.
    """

    def __init__(self, folder: Path) -> None:
        """Takes the search's folder."""
        self.folder = folder
        self._open: dict[str, Trackers] = {}

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **_: Any
    ) -> None:
        """Sends an update's numbers and samples."""
        trackers = self._of(trial)
        report = cast(dict[str, Any], to_json(result["cory"]))
        samples, update = cast(list[Sample], report.pop("samples", [])), report["update"]
        if samples and update % trial.config["cory_settings"]["samples_every"] == 0:
            trackers.show(update, samples, held_out=False)
        trackers.log(update, figures_of(cast(Update, report)))

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Ends the trial's run."""
        self._end(trial, failed=False)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Ends the trial's run, which failed."""
        self._end(trial, failed=True)

    def on_experiment_end(self, trials: list[Trial], **_: Any) -> None:
        """Ends what is still open."""
        for trackers in self._open.values():
            trackers.close(failed=False)
        self._open.clear()
        end_services()

    def _of(self, trial: Trial) -> Trackers:
        if trial.trial_id not in self._open:
            settings = make_settings(trial.config["cory_settings"])
            try:
                opened = open_services(self.folder / str(trial), settings, group=self.folder.resolve().name)
            except CommandError as error:
                logger.warning("%s The trial does without.", error)
                opened = []
            self._open[trial.trial_id] = Trackers(opened)
        return self._open[trial.trial_id]

    def _end(self, trial: Trial, failed: bool) -> None:
        trackers = self._open.pop(trial.trial_id, None)
        if trackers is not None:
            trackers.close(failed)


class StopCallback(Callback):
    """Ctrl-C, SIGTERM, a spent budget: running trials finish their update and are saved, then Tune ends.

    Tune's own `time_budget_s` ends trials for good, without saving them, so they could not resume.
    """

    def __init__(
        self, interrupts: Interrupts, max_updates: float | None = None, max_minutes: float | None = None
    ) -> None:
        """Notes what ends a search.

        Args:
            interrupts: is asked to stop.
            max_updates: of all trials together.
            max_minutes: from the start of the first trial.
        """
        self.interrupts = interrupts
        self.max_updates = max_updates or math.inf
        self.max_seconds = 60 * (max_minutes or math.inf)
        self.done: Counter[str] = Counter()
        """Updates so far, by trial."""
        self.statuses: dict[str, str] = {}
        """Of each trial, by its id. When Tune ends it lets go of all trials, and then calls all of them finished."""
        self._started: float | None = None
        self._under_way: set[str] = set()  # trials whose present process has done an update

    @property
    def is_spent(self) -> bool:
        """Whether nothing of the budget is left."""
        seconds = 0.0 if self._started is None else time.monotonic() - self._started
        return self.done.total() >= self.max_updates or seconds > self.max_seconds

    def requested(self) -> bool:
        """Whether the search is to end: schedulers then pause trials."""
        return self.interrupts.requested is not None or self.is_spent

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Notes a new process, and starts the budget's clock."""
        self._started = self._started or time.monotonic()
        self._under_way.discard(trial.trial_id)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **_: Any
    ) -> None:
        """Notes that there is something to save."""
        self._under_way.add(trial.trial_id)

    def on_step_end(self, iteration: int, trials: list[Trial], **_: Any) -> None:
        """Ends Tune once no trial has anything left to save."""
        self.statuses = {trial.trial_id: trial.status for trial in trials}
        running = {trial.trial_id for trial in trials if trial.status == Trial.RUNNING}
        if self.requested() and not running & self._under_way:
            os.kill(os.getpid(), signal.SIGUSR1)  # at which Tune notes where the trials are, and ends
