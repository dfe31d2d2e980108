"""The Tune callback of a search: progress on the terminal, and experiment trackers.

Tune pickles it when a search starts, and restores it from there.
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
from launch.run_folder.records import Sample, Update, to_json, with_shown_kl
from launch.training.tracking import Trackers, end_services, flat_metrics, open_services
from policies.settings.settings import Settings, make_settings

logger = logging.getLogger(__name__)


class SearchCallback(Callback):
    """Prints a line per evaluation and per failed trial, and logs trials to the tracker that their settings enable.

    Each trial is a run of the tracker, in a group named after the search's folder.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        """Creates the callback for the searched settings."""
        self._keys = dict.fromkeys([*keys, SEED_KEY])
        self._stdout: TextIO | None = None
        self._trackers: dict[str, Trackers] = {}

    def setup(self, *_: Any, **__: Any) -> None:
        """Opens the output when the search starts or resumes."""
        self._stdout = output.dup_stdout()

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **_: Any
    ) -> None:
        """Prints an evaluation, and logs an update's metrics and samples."""
        settings = make_settings(trial.config["cory_settings"])
        report = cast(dict[str, Any], to_json(result["cory"]))
        if "evaluation" in report:
            figures = with_shown_kl(settings.selection_metrics(report))
            text = "  ".join(f"{label} {format_metric(key, figures[key]):>6}" for key, label, _ in ROW_COLUMNS)
            self._print(trial, f"{result[TIME_KEY]:>4}/{settings.num_updates:<4} {text}")
        if settings.tracker is None:
            return
        if trial.trial_id not in self._trackers:
            self._trackers[trial.trial_id] = _open_trackers(trial, settings)
        samples, update = cast(list[Sample], report.pop("samples", [])), report["update"]
        if samples and update % settings.samples_every == 0:
            self._trackers[trial.trial_id].log_samples(update, samples, held_out=False)
        self._trackers[trial.trial_id].log(update, flat_metrics(cast(Update, report)))

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Closes the trial's tracker run."""
        self._close(trial.trial_id, failed=False)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **_: Any) -> None:
        """Prints that a trial failed, with the reason following at the end, and closes its tracker run."""
        self._print(trial, "failed")
        self._close(trial.trial_id, failed=True)

    def on_experiment_end(self, trials: list[Trial], **_: Any) -> None:
        """Closes all tracker runs that are still open."""
        for trial_id in tuple(self._trackers):
            self._close(trial_id, failed=False)
        end_services()

    def _print(self, trial: Trial, text: str) -> None:
        values = {key: trial.config["cory_settings"][key] for key in self._keys}
        print(f"{trial}  {text}  {format_point(values)}", file=self._stdout, flush=True)

    def _close(self, trial_id: str, failed: bool) -> None:
        if trackers := self._trackers.pop(trial_id, None):
            trackers.close(failed)


def _open_trackers(trial: Trial, settings: Settings) -> Trackers:
    folder = Path(trial.path or "")
    try:
        return Trackers(open_services(folder, settings, group=folder.parent.name))
    except CommandError as error:
        logger.warning("%s %s continues without this tracker.", error, trial)
        return Trackers([])
