"""Loads the policies of `start_from` into an algorithm."""

from __future__ import annotations

from pathlib import Path

from ray.rllib.core import COMPONENT_LEARNER_GROUP

from policies.rllib.learners import Learners
from policies.settings.error import SettingsError
from policies.settings.settings import Settings
from policies.settings.start import find_start_checkpoint


class WarmStart:
    """The initial policies of an algorithm.

    A restored checkpoint replaces them, so a missing `start_from` is an error only if training starts without one.
    """

    def __init__(self, settings: Settings, learners: Learners) -> None:
        """Loads the policies of `start_from`, if it is set."""
        self._learners = learners
        self.error: SettingsError | None = None
        """The reason if loading failed."""
        try:
            start = find_start_checkpoint(settings)
        except SettingsError as error:
            self.error = error
            return
        if start is not None:
            self.load(start)

    def load(self, checkpoint: Path) -> None:
        """Loads the policies of a checkpoint, without optimizers and other state."""
        self._learners.restore_from_path(checkpoint / COMPONENT_LEARNER_GROUP, moments=False)
        self.error = None

    def check(self) -> None:
        """Raises the error of loading, so that training does not start from the model instead."""
        if self.error is not None:
            raise self.error
