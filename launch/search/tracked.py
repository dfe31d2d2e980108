"""Sends what trials report to the trackers that their settings name, a run of theirs for each trial."""

import logging
from pathlib import Path
from typing import Any, cast

from ray.tune import Callback

from launch.console.errors import CommandError
from launch.run_folder.records import Sample, Update, plain
from launch.training.tracking import Trackers, end_services, figures_of, open_services
from policies.settings.settings import make_settings

logger = logging.getLogger(__name__)


class Tracked(Callback):
    """Tells trackers of Tune's trials, which there are a group that is called after the search's folder."""

    def __init__(self, folder: Path) -> None:
        """Takes the search's folder."""
        self.folder = folder
        self._open: dict[str, Trackers] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Tune keeps its callbacks in a file, where nothing is open."""
        return {**self.__dict__, "_open": {}}

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        """Sends an update's numbers and samples."""
        trackers = self._of(trial)
        report = cast(dict[str, Any], plain(result["cory"]))
        samples, update = cast(list[Sample], report.pop("samples", [])), report["update"]
        if samples and update % trial.config["cory_settings"]["samples_every"] == 0:
            trackers.show(update, samples, held_out=False)
        trackers.log(update, figures_of(cast(Update, report)))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Ends the trial's run."""
        self._end(trial, failed=False)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Ends the trial's run, which failed."""
        self._end(trial, failed=True)

    def on_experiment_end(self, trials: list[Any], **_: Any) -> None:
        """Ends what is still open."""
        for trackers in self._open.values():
            trackers.close(failed=False)
        self._open.clear()
        end_services()

    def _of(self, trial: Any) -> Trackers:
        if trial.trial_id not in self._open:
            settings = make_settings(trial.config["cory_settings"])
            try:
                opened = open_services(self.folder / str(trial), settings, group=self.folder.resolve().name)
            except CommandError as error:
                logger.warning("%s The trial does without.", error)
                opened = []
            self._open[trial.trial_id] = Trackers(opened)
        return self._open[trial.trial_id]

    def _end(self, trial: Any, failed: bool) -> None:
        trackers = self._open.pop(trial.trial_id, None)
        if trackers is not None:
            trackers.close(failed)
