"""Asynchronous checkpoints: learners write their state while training continues."""

from __future__ import annotations

from pathlib import Path

from ray.rllib.core import COMPONENT_LEARNER_GROUP

from policies.cory import Cory


class Checkpoint:
    """Writes an algorithm's state as `Cory.save_to_path` does; learners write theirs in the background."""

    def __init__(self, algorithm: Cory, folder: Path) -> None:
        """Takes a snapshot of the algorithm's state and starts writing it. Later changes do not affect it.

        Args:
            algorithm: must not write another checkpoint before `finish`.
            folder: an existing folder. It is complete after `finish`.
        """
        self._learners = algorithm.learners
        algorithm.save_to_path(str(folder), state=algorithm.get_state(not_components=[COMPONENT_LEARNER_GROUP]))
        self._learners.begin_save(folder / COMPONENT_LEARNER_GROUP)

    def written(self) -> bool:
        """Returns whether all learners have finished writing, so that `finish` returns at once."""
        return self._learners.is_saved()

    def finish(self) -> None:
        """Waits until everything is written."""
        self._learners.finish_save()
