"""The Tune callback of a search, which Tune pickles when the search starts, and restores from there."""

from collections.abc import Sequence
from typing import Any, TextIO, cast

from ray.tune import Callback
from ray.tune.experiment import Trial

from launch.console import output
from launch.display.rows import ROW_COLUMNS
from launch.display.tables import format_metric
from launch.experiments.space import SEED_KEY, TIME_KEY, format_point
from launch.run_folder.records import MetricValues, to_json, with_shown_kl
from policies.settings.settings import make_settings


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
