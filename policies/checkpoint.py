"""A checkpoint that is written while training goes on."""

from __future__ import annotations

from pathlib import Path

from ray.rllib.core import COMPONENT_LEARNER_GROUP

from policies.cory import Cory


class Checkpoint:
    """An algorithm's state, as `Cory.save_to_path` writes it; learners may take their time for theirs."""

    def __init__(self, algorithm: Cory, folder: Path) -> None:
        """Begins it: whatever the algorithm does afterwards, this is its state as it is now.

        Args:
            algorithm: that writes no other checkpoint before `finish`.
            folder: that is there, and is whole after `finish`.

        Raises:
            LearnerError, OSError: a learner is lost, or something could not be written.
        """
        self._learners = algorithm.learners
        algorithm.save_to_path(str(folder), state=algorithm.get_state(not_components=[COMPONENT_LEARNER_GROUP]))
        self._learners.begin_save(folder / COMPONENT_LEARNER_GROUP)

    def written(self) -> bool:
        """Tells whether `finish` would wait for no learner.

        Raises:
            LearnerError: one is lost.
        """
        return self._learners.saved()

    def finish(self) -> None:
        """Waits until all is written.

        Raises:
            LearnerError, OSError: a learner is lost, or could not write.
        """
        self._learners.finish_save()
