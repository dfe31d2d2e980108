"""How the driver talks to its learners: none may be lost, or fail, without a word."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.utils.actor_manager import FaultTolerantActorManager, RemoteCallResults


class LearnerError(RuntimeError):
    """A learner's process is gone, and with it the state of this algorithm since the last checkpoint."""


class Learners(FaultTolerantActorManager):
    """RLlib's manager of remote learners, which raises what they raise.

    RLlib's own leaves out learners that are gone. So it takes a checkpoint whose learner died, or found no room on the
    disk, for a whole one, and where one of several dies it may report what the others say of their lost connection.
    """

    @classmethod
    def watch(cls, group: LearnerGroup) -> None:
        """Takes the place of the group's own manager, if its learners are remote."""
        if group.is_remote:
            group._worker_manager = cls(group._workers)

    def foreach_actor(self, *args: Any, **kwargs: Any) -> RemoteCallResults:
        """Calls a function on learners.

        Raises:
            LearnerError: one of them, or its answer, is lost.
            NonFiniteUpdate, OSError, …: what a learner raised, as it would be without a process of its own.
        """
        answers = super().foreach_actor(*args, **kwargs)
        errors = [answer.get() for answer in answers if not answer.ok]
        causes = [error.cause if isinstance(error, RayTaskError) else error for error in errors]
        for cause in causes:
            if isinstance(cause, RayError):
                raise LearnerError(
                    "A learner's process died. Check its memory and device; micro_batch may be too large."
                ) from cause
        for cause in causes:
            raise cause from None
        return answers

    def set_actor_state(self, actor_id: int, healthy: bool) -> None:
        """Does nothing: a learner that failed is asked again, not left out."""
