"""Tune callbacks of a search: progress on the terminal, and experiment trackers.

Tune pickles them when a search starts, and restores them from there.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from ray.tune import Callback
from ray.tune.experiment import Trial

from launch.console import output
from launch.console.errors import CommandError
from launch.display.rows import ROW_COLUMNS
from launch.display.tables import format_metric
from launch.experiments.space import SEED_KEY, TIME_KEY, format_point
from launch.run_folder.records import MetricValues, Sample, Update, to_json, with_shown_kl
from launch.training.tracking import Trackers, end_services, flat_metrics, open_services
from policies.settings.settings import Settings, make_settings

logger = logging.getLogger(__name__)


class ProgressCallback(Callback):
    """Prints a line per evaluation, and when a trial fails."""

    def __init__(self, keys: Sequence[str]) -> None:
        """Creates the callback for the searched settings."""
        self._keys = dict.fromkeys([*keys, SEED_KEY])
        self._stdout: TextIO | None = None

    def setup(self, *_: Any, **__: Any) -> None:
        """Opens the output when the search starts or resumes."""
        self._stdout = output.dup_stdout()

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **_: Any
    ) -> None:
        """Prints the evaluation, if there is one."""
        if "evaluation" in result["cory"]:
            settings = make_settings(trial.config["cory_settings"])
            figures = cast(MetricValues, to_json(with_shown_kl(settings.selection_metrics(result["cory"]))))
            text = "  ".join(f"{label} {format_metric(key, figures[key]):>6}" for key, label, _ in ROW_COLUMNS)
            self._print(trial, f"{result[TIME_KEY]:>4}/{settings.num_updates:<4} {text}")

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Prints that a trial failed; the reason follows at the end."""
        self._print(trial, "failed")

    def _print(self, trial: Trial, text: str) -> None:
        values = {key: trial.config["cory_settings"][key] for key in self._keys}
        print(f"{trial}  {text}  {format_point(values)}", file=self._stdout, flush=True)


class TrackerCallback(Callback):
    """Logs trials to the experiment trackers that their settings enable, one tracker run per trial.

    The runs form a group named after the search's folder.
    """

    def __init__(self) -> None:
        """Creates the callback."""
        self._open: dict[str, Trackers] = {}

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **_: Any
    ) -> None:
        """Logs an update's metrics and samples."""
        settings = make_settings(trial.config["cory_settings"])
        if trial.trial_id not in self._open:
            self._open[trial.trial_id] = _open_trackers(trial, settings)
        report = cast(dict[str, Any], to_json(result["cory"]))
        samples, update = cast(list[Sample], report.pop("samples", [])), report["update"]
        if samples and "evaluation" in report:
            self._open[trial.trial_id].log_samples(update, samples, held_out=False)
        self._open[trial.trial_id].log(update, flat_metrics(cast(Update, report)))

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Closes the trial's tracker run."""
        self._close(trial.trial_id, failed=False)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Closes the trial's tracker run as failed."""
        self._close(trial.trial_id, failed=True)

    def on_experiment_end(self, trials: list[Trial], **_: Any) -> None:
        """Closes all tracker runs that are still open."""
        for trial_id in tuple(self._open):
            self._close(trial_id, failed=False)
        end_services()

    def _close(self, trial_id: str, failed: bool) -> None:
        if trackers := self._open.pop(trial_id, None):
            trackers.close(failed)


def _open_trackers(trial: Trial, settings: Settings) -> Trackers:
    folder = Path(trial.path or "")
    try:
        return Trackers(open_services(folder, settings, group=folder.parent.name))
    except CommandError as error:
        logger.warning("%s %s continues without this tracker.", error, trial)
        return Trackers([])
