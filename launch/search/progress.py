"""What a search shows while it runs: a line per evaluation, and per trial that ends."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ray.tune import Callback

from launch.console.errors import reason
from launch.display.rows import COLUMNS
from launch.display.tables import written
from launch.display.terminal import Voice
from launch.run_folder.journal import Journal
from launch.run_folder.records import Figures, plain
from launch.search.space import METRIC, SEED, TIME, show_point
from policies.settings.settings import Settings


class Progress(Callback):
    """Tells what Tune's trials do. A step of the bar is an update."""

    def __init__(self, journal: Journal, voice: Voice, keys: Sequence[str], settings: Settings) -> None:
        """Notes who tells.

        Args:
            journal: keeps every report. Tune's own result.json loses some where a trial is paused or its driver killed.
            voice: tells it.
            keys: the settings that are searched.
            settings: of all trials, but for these.
        """
        self.journal = journal
        self.voice: Voice | None = voice
        self.keys = [*keys, *([] if SEED in keys else [SEED])]
        self.settings = settings
        self._recorded = {(report["trial_id"], report[TIME]) for report in journal.read()}
        self._values: dict[str, dict[str, Any]] = {}
        """Of each trial's present process: under PBT, Tune changes the settings before it tells of the last result."""

    def __getstate__(self) -> dict[str, Any]:
        """Tune keeps its callbacks in a file, where there is no voice."""
        return {**self.__dict__, "voice": None}

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        """Keeps a report, and shows an evaluation."""
        report = {name: value for name, value in result["cory"].items() if name != "samples"}
        values = self._values[trial.trial_id]
        again = (trial.trial_id, result[TIME]) in self._recorded
        self._recorded.add((trial.trial_id, result[TIME]))
        figures = {TIME: result[TIME], METRIC: result[METRIC]}
        self.journal.append(
            {"trial": str(trial), "trial_id": trial.trial_id, **figures, "values": values, "cory": report}
        )
        if self.voice is None:
            return
        left = self.voice.advance(again=again)
        if "evaluation" in result["cory"]:
            figures = cast(Figures, plain(dict(self.settings.choosing(result["cory"]))))
            text = "  ".join(f"{label} {written(key, figures[key]):>6}" for key, label, _ in COLUMNS)
            done = f"{result[TIME]:>4}/{self.settings.updates:<4}"
            self.voice.say(f"{trial}  {done} {text}  {show_point(values)}  {left}")

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Shows that a trial continues from a checkpoint: its own, or under PBT another trial's."""
        self._values[trial.trial_id] = self._values_of(trial)
        saved = trial.latest_checkpoint_result
        if self.voice is not None and saved is not None:
            whose = Path(saved.checkpoint.path).parent.name
            values = show_point(self._values[trial.trial_id])
            self.voice.say(f"{trial}  goes on from {whose} after update {saved.metrics[TIME]}  {values}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Shows that a trial failed; Tune tells why only afterwards."""
        if self.voice is not None:
            self.voice.say(f"{trial}  failed  {show_point(self._values_of(trial))}")

    def _values_of(self, trial: Any) -> dict[str, Any]:
        """Returns the values that a trial has of the searched settings."""
        settings: Mapping[str, Any] = trial.config["cory_settings"]
        return {key: settings[key] for key in self.keys}


def why(trial: Any) -> str:
    """Returns in one sentence why a trial failed."""
    error = trial.get_pickled_error()
    if error is not None:
        return reason(error)
    lines = (trial.get_error() or "").strip().splitlines()
    return lines[-1] if lines else "Nothing is known."
