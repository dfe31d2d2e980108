"""The policies that an algorithm starts from instead of its model (`start_from`)."""

from __future__ import annotations

from pathlib import Path

from ray.rllib.core import COMPONENT_LEARNER_GROUP

from policies.rllib.learners import Learners
from policies.settings.error import SettingsError
from policies.settings.settings import Settings
from policies.settings.start import find_start


class WarmStart:
    """The policies that an algorithm starts from, taken when it is built.

    A checkpoint that is restored replaces them. So if another run is gone by then, that is an error only if training
    starts without a checkpoint.
    """

    def __init__(self, settings: Settings, learners: Learners) -> None:
        """Loads the policies of `start_from`; without it, the model's stay."""
        self._learners = learners
        self.error: SettingsError | None = None
        """Why they could not be loaded."""
        try:
            start = find_start(settings)
        except SettingsError as error:
            self.error = error
            return
        if start is not None:
            self.load(start)

    def load(self, checkpoint: Path) -> None:
        """Takes the policies of a checkpoint, without optimizers and all other state."""
        self._learners.restore_from_path(checkpoint / COMPONENT_LEARNER_GROUP, moments=False)
        self.error = None

    def check(self) -> None:
        """Refuses to train from the model instead of the policies that were asked for.

        Raises:
            SettingsError: as of `find_start`.
        """
        if self.error is not None:
            raise self.error
