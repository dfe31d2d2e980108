"""Ctrl-C, SIGTERM, a spent budget: each running trial of a search finishes its update and is saved, then Tune ends."""

import os
import signal
from typing import Any

from ray.tune import Callback

from launch.console.interrupts import Interrupts
from launch.run_folder.locks import FolderHandle
from launch.search.budget import Budget


class Stop(Callback):
    """Ends a search when that is asked for, and notes how its trials stood."""

    def __init__(
        self,
        interrupts: Interrupts,
        checkpoint_every: int,
        budget: Budget | None = None,
        folder: FolderHandle | None = None,
    ) -> None:
        """Notes what ends a search.

        Args:
            interrupts: is asked to stop.
            checkpoint_every: updates between checkpoints.
            budget: what the search may take.
            folder: the search's, without which it ends: Tune would go on in a new one with the old path.
        """
        self.interrupts: Interrupts | None = interrupts
        self.folder = folder
        self.budget = budget or Budget()
        self.checkpoint_every = checkpoint_every
        self.statuses: dict[str, str] = {}
        """Of each trial, by its id. When Tune ends it lets go of all trials, and then calls all of them finished."""
        self._under_way: set[str] = set()  # trials whose present process has done an update
        self._unsaved: set[str] | None = None  # those that are waited for; None while nobody asked

    def __getstate__(self) -> dict[str, Any]:
        """Tune keeps its callbacks in a file, where there are no signals."""
        return {**self.__dict__, "interrupts": None, "folder": None}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Notes a new process."""
        self.budget.begin()
        self._under_way.discard(trial.trial_id)

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        """Notes that there is something to save."""
        self.budget.taken += 1
        self._under_way.add(trial.trial_id)

    def on_trial_save(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Notes that a trial is saved."""
        if self._unsaved is not None:
            self._unsaved.discard(trial.trial_id)

    def on_step_end(self, iteration: int, trials: list[Any], **_: Any) -> None:
        """Lets Tune save each running trial after its update, and then end.

        Raises:
            FolderError: the search's folder was renamed or removed.
        """
        if self.folder is not None:
            self.folder.check()
        self.statuses = {trial.trial_id: trial.status for trial in trials}
        if self.interrupts is None or (self.interrupts.requested is None and not self.budget.spent):
            return
        running = [trial for trial in trials if trial.status == trial.RUNNING]
        if self._unsaved is None:
            self._unsaved = {trial.trial_id for trial in running} & self._under_way
        waiting = any(trial.trial_id in self._unsaved for trial in running)
        for trial in trials:
            config = trial.run_metadata.checkpoint_manager.checkpoint_config
            config.checkpoint_frequency = 1 if waiting else self.checkpoint_every
        if not waiting:
            os.kill(os.getpid(), signal.SIGUSR1)  # Tune's own word for an end at which it notes where the trials are
