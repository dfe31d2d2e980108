"""How the algorithm talks to its learners: none may be lost, or fail, without a word."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.utils.actor_manager import FaultTolerantActorManager, RemoteCallResults

from policies.learning.rows import Rows
from policies.models.weights import Weights
from policies.rllib.token_batch import SharedRows
from policies.rllib.token_ppo_learner import KL_COEFS, UPDATE, TokenPPOLearner, on_cpu

T = TypeVar("T")
GRACE = 10.0
"""Seconds that the other learners have to answer, once one has failed: they may wait for it in an all-reduce."""


class LearnerError(RuntimeError):
    """A learner's process is gone, or stands still; so the state since the last checkpoint is lost."""


class WatchedLearners(FaultTolerantActorManager):
    """RLlib's manager of remote learners, which raises what they raise.

    RLlib's own leaves out learners that are gone. So it takes a checkpoint whose learner died, or found no room on the
    disk, for a whole one, and where one of several dies it may report what the others say of their lost connection. It
    also waits for ever, and for all of them where one has failed.
    """

    timeout: float | None = None
    """The longest wait for an answer, in seconds."""

    def foreach_actor(self, *args: Any, **kwargs: Any) -> RemoteCallResults:
        """Calls a function on learners.

        Raises:
            LearnerError: one of them, or its answer, is lost; or there is no answer in time, and the learner is ended.
            NonFiniteUpdate, OSError, …: what a learner raised, as it would be without a process of its own.
        """
        limit = kwargs.pop("timeout_seconds", None) or self.timeout
        answers = super().foreach_actor(*args, **kwargs, timeout_seconds=limit)
        asked = kwargs.get("remote_actor_ids") or self.actor_ids()
        silent = set(asked) - {answer.actor_id for answer in answers}
        for learner in silent:
            ray.kill(self.actors()[learner])
        errors = [answer.get() for answer in answers if not answer.ok]
        causes = [error.cause if isinstance(error, RayTaskError) else error for error in errors]
        for cause in causes:
            if isinstance(cause, RayError):
                raise LearnerError(
                    "A learner's process died. Check its memory and device; micro_batch may be too large."
                ) from cause
        for cause in causes:
            raise cause from None
        if silent:
            raise LearnerError(
                f"{len(silent)} of {len(asked)} learners gave no answer in {limit:.0f} s. If an update may take "
                "so long, raise learner_timeout; otherwise look at their machines."
            )
        return answers

    def _fetch_result(
        self, *, remote_calls: list[ray.ObjectRef[Any]], timeout_seconds: float | None = None, **kwargs: Any
    ) -> tuple[list[ray.ObjectRef[Any]], RemoteCallResults]:
        """Collects answers until all are there or the time is over; once one has failed, the others have `GRACE`."""
        until = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        waiting = list(remote_calls)
        while len(waiting) > 1:
            ready, waiting = ray.wait(waiting, timeout=_left(until))
            if not ready:
                break
            if _failed(ready[0]):
                until = min(until, time.monotonic() + GRACE)
                break
        return super()._fetch_result(remote_calls=remote_calls, timeout_seconds=_left(until), **kwargs)

    def set_actor_state(self, actor_id: int, healthy: bool) -> None:
        """Does nothing: a learner that failed is asked again, not left out."""


class Learners:
    """RLlib's learners as the algorithm asks them: all LLMs at once."""

    def __init__(self, group: LearnerGroup, timeout: float) -> None:
        """Wraps the algorithm's learners.

        Args:
            group: RLlib's.
            timeout: the longest wait for an answer of one that is remote, in seconds.
        """
        self.group = group
        if group.is_remote:
            group._worker_manager = WatchedLearners(group._workers)
            group._worker_manager.timeout = timeout

    def score(self, rows: dict[str, Rows]) -> dict[str, Rows]:
        """Scores every LLM's rows; what `PolicyLearner.score` gives, by LLM, on the CPU.

        Raises:
            LearnerError: as of `foreach_actor`.
        """
        if not self.group.is_remote:
            return self.ask(lambda learner: learner.score(rows))
        whole = ray.put(rows)
        return self.ask(lambda learner: learner.score(ray.get(whole)))

    def update(self, rows: dict[str, Rows], update: int, kl_coefs: dict[str, float]) -> list[dict[str, Any]]:
        """Lets every LLM learn from its rows, and returns what RLlib's metrics take.

        Raises:
            NonFiniteUpdate, LearnerError: as of `foreach_actor`.
        """
        return self.group.update(
            training_data=SharedRows(batch=rows), timesteps={UPDATE: update}, **{KL_COEFS: kl_coefs}
        )

    def weights(self, module_id: str) -> Weights:
        """The present weights of an LLM, without its value head, by Hugging Face names."""
        return self.ask(lambda learner: dict(learner.policies[module_id].stream_weights()))

    def score_under(self, module_id: str, weights: Weights, rows: Rows) -> Rows:
        """Scores an LLM's rows under other weights than the present ones, which are put back."""
        return self.ask(lambda learner: on_cpu(learner.policies[module_id].score_under(weights, rows)))

    def forget(self) -> None:
        """Forgets Adam's moments of every LLM."""
        self.ask(TokenPPOLearner.forget)

    def average(self, share: float) -> None:
        """Moves all LLMs a share of the way to the mean of their weights; see `TokenPPOLearner.average`."""
        self.ask(lambda learner: learner.average(share))

    @contextmanager
    def lent(self, module_id: str) -> Iterator[None]:
        """Lets an LLM hold the mean of all LLMs' weights meanwhile."""
        self.ask(lambda learner: learner.lend(module_id))
        try:
            yield
        finally:
            self.ask(lambda learner: learner.take_back(module_id))

    def ask(self, function: Callable[[TokenPPOLearner], T]) -> T:
        """Calls a function on every learner, and returns the first one's answer."""
        answer: T = self.group.foreach_learner(function).result_or_errors[0].get()
        return answer


def _left(until: float) -> float | None:
    """Returns the seconds until then, as Ray takes them: None for ever."""
    return None if until == math.inf else max(0.0, until - time.monotonic())


def _failed(call: ray.ObjectRef[Any]) -> bool:
    try:
        ray.get(call)
    except RayError:
        return True
    return False
