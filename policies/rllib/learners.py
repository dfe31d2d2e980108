"""How the algorithm talks to its learners: none may be lost, or fail, without a word."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import ray
from ray.exceptions import RayError, RayTaskError
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_OPTIMIZER, COMPONENT_RL_MODULE
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.utils.actor_manager import RemoteCallResults, ResultOrError
from ray.tune.utils.file_transfer import sync_dir_between_nodes

from policies.compat.rllib import actor_manager
from policies.generation.generator import LoadedWeights
from policies.learning.rows import Rows
from policies.learning.stored_policy import FILES
from policies.models.weights import Weights
from policies.rllib.token_ppo_learner import TokenPPOLearner, fetched

T = TypeVar("T")
GRACE = 10.0
"""Seconds that the other learners have to answer, once one has failed: they may wait for it in an all-reduce."""


class LearnerError(RuntimeError):
    """A learner's process is gone, or stands still; so the state since the last checkpoint is lost."""


class Learners(LearnerGroup):
    """RLlib's learners as the algorithm asks them: all LLMs at once, wherever each is learned."""

    def __init__(self, *, config: AlgorithmConfig, **kwargs: Any) -> None:
        """Takes what RLlib's group does; `config` is a `CoryConfig`."""
        super().__init__(config=config, **kwargs)
        self.timeout: float = config.settings.learner_timeout
        """The longest wait for an answer of a remote learner, in seconds."""

    def foreach_learner(
        self,
        func: Callable[..., Any],
        *,
        healthy_only: bool = True,
        remote_actor_ids: list[int] | None = None,
        timeout_seconds: float | None = None,
        return_obj_refs: bool = False,
        mark_healthy: bool = False,
        **kwargs: Any,
    ) -> RemoteCallResults:
        """Calls a function on every learner. Once one has failed, the others have `GRACE`.

        RLlib's own leaves out learners that are gone. So it takes a checkpoint whose learner died, or found no room on
        the disk, for a whole one, and where one of several dies it may report what the others say of their lost
        connection. It also waits for ever, and for all of them where one has failed.

        Args:
            func: takes a learner, and `kwargs`.
            healthy_only: no effect, as no learner is left out.
            remote_actor_ids: the remote learners that are asked; None: all.
            timeout_seconds: the longest wait; None or 0: `timeout`.
            return_obj_refs: no effect; answers are values.
            mark_healthy: no effect, as of `healthy_only`.
            **kwargs: the function's.

        Raises:
            LearnerError: one of them, or its answer, is lost; or there is no answer in time, and the learner is ended.
            NonFiniteUpdate, OSError, …: what a learner raised, as it would be without a process of its own.
        """
        if self.is_local:
            return super().foreach_learner(func, **kwargs)
        timeout = timeout_seconds or self.timeout
        until = time.monotonic() + timeout
        actors = {
            learner: actor
            for learner, actor in actor_manager(self).actors().items()
            if remote_actor_ids is None or learner in remote_actor_ids
        }
        calls = {actor.apply.remote(partial(func, **kwargs)): learner for learner, actor in actors.items()}
        answers: dict[int, Any] = {}
        causes: list[Exception] = []
        waiting = list(calls)
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            try:
                answers[calls[ready[0]]] = ray.get(ready[0])
            except RayError as error:
                causes.append(error.cause if isinstance(error, RayTaskError) else error)
                until = min(until, time.monotonic() + GRACE)
        for call in waiting:
            ray.kill(actors[calls[call]])
        for cause in causes:
            if isinstance(cause, RayError):
                raise LearnerError(
                    "A learner's process died. Check its memory and device; micro_batch_size may be too large."
                ) from cause
        if causes:
            raise causes[0] from None
        if waiting:
            raise LearnerError(
                f"{len(waiting)} of {len(calls)} learners gave no answer in {timeout:.0f} s. If an update may "
                "take so long, raise learner_timeout; otherwise look at their machines."
            )
        results = RemoteCallResults()
        for learner in actors:
            results.add_result(learner, ResultOrError(result=answers[learner]), None)
        return results

    def score(self, rows: dict[str, Rows], *, keep: bool = False) -> dict[str, Rows]:
        """Scores every LLM's rows; what `PolicyLearner.score` gives, by LLM, on the CPU.

        Args:
            rows: by LLM.
            keep: the learners keep them, with their scores, for `learn`.

        Raises:
            LearnerError: as of `foreach_learner`.
        """
        shared = self._shared(rows)
        answers = self.ask_all(lambda learner: learner.score(fetched(shared), keep=keep))
        return {name: scores for answer in answers for name, scores in answer.items()}

    def learn(self, columns: dict[str, Rows], update: int, kl_coefs: dict[str, float]) -> list[dict[str, Any]]:
        """Lets every LLM learn from the rows that `score` kept, and returns what RLlib's metrics take.

        Args:
            columns: by LLM, what the rows lack yet; nothing else is sent to learners.
            update: its number, from 0.
            kl_coefs: by LLM.

        Raises:
            NonFiniteUpdate, LearnerError: as of `foreach_learner`.
        """
        shared = self._shared(columns)
        return self.ask_all(lambda learner: learner.learn(fetched(shared), update, kl_coefs))

    def _shared(self, value: T) -> T | ray.ObjectRef[T]:
        """A value as learners get it, by `fetched`: once per machine, and only where one asks for it."""
        return ray.put(value) if self.is_remote else value

    def weights(self, policy_id: str) -> Weights:
        """The present weights of an LLM, without its value head, by Hugging Face names."""
        return self.ask(lambda learner: learner.weights(policy_id))

    def packed(self, policy_id: str) -> tuple[ray.ObjectRef[Weights], int]:
        """An LLM's present weights in Ray's object store, and their checksum; they do not come by this process."""
        (packed,), total = self.ask(lambda learner: learner.packed(policy_id))
        return packed, total

    def transfer(
        self, policy_id: str, runners: Sequence[Any], version: int, restarts: int, weights: Weights | None = None
    ) -> tuple[int, list[LoadedWeights] | None]:
        """Lets an LLM's learners send weights to runners, past this process; see `WeightSender.send`."""
        shared = self._shared(weights)
        return self.ask(lambda learner: learner.transfer(policy_id, runners, version, restarts, shared))

    def score_under(self, policy_id: str, weights: Weights, rows: Rows) -> Rows:
        """Scores an LLM's rows under other weights than the present ones, which are put back."""
        shared = self._shared(weights)
        return self.ask(lambda learner: learner.score_under(policy_id, shared, rows))

    def forget(self) -> None:
        """Forgets Adam's moments of every LLM."""
        self.ask(TokenPPOLearner.forget)

    def average(self, share: float) -> None:
        """Moves all LLMs a share of the way to the mean of their weights; see `TokenPPOLearner.average`."""
        self.ask(lambda learner: learner.average(share))

    @contextmanager
    def lent(self, policy_id: str) -> Iterator[None]:
        """Lets an LLM hold the mean of all LLMs' weights meanwhile."""
        self.ask(lambda learner: learner.lend(policy_id))
        try:
            yield
        finally:
            self.ask(TokenPPOLearner.take_back)

    def ask(self, function: Callable[[TokenPPOLearner], T | None]) -> T:
        """Calls a function on every learner, and returns the first answer that is not None.

        None says that another learner answers: with `shards_per_policy` a learner has one LLM alone.
        """
        return next((answer for answer in self.ask_all(function) if answer is not None), None)  # type: ignore[return-value]

    def ask_all(self, function: Callable[[TokenPPOLearner], T]) -> list[T]:
        """Calls a function on every learner, and returns their answers."""
        return [answer.get() for answer in self.foreach_learner(function)]

    # State. Each learner writes what it has of each LLM, into a folder of the LLM's name.

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What RLlib's runners would get (`inference_only`): nothing, as ours get weights another way.

        Raises:
            RuntimeError: more is asked for, which no process needs to have whole.
        """
        if not kwargs.get("inference_only"):
            raise RuntimeError("Learners write their state themselves. Call the algorithm's save_to_path.")
        return {COMPONENT_LEARNER: {COMPONENT_RL_MODULE: {}}}

    def save_to_path(self, path: Any = None, *, filesystem: Any = None, **kwargs: Any) -> str:
        """Writes every LLM's state; see `stored_policy`. Files of learners that do not see this folder are fetched.

        Raises:
            LearnerError, OSError: as of `foreach_learner`.
            ValueError: `filesystem` is not this machine's.
        """
        _refuse_elsewhere(filesystem)
        self.begin_save(Path(path))
        self.finish_save()
        return str(path)

    def begin_save(self, path: Path) -> None:
        """Begins to write every LLM's state as it is now; it is there after `finish_save`, and learning may go on.

        Raises:
            LearnerError, OSError: as of `foreach_learner`.
        """
        folder = path / COMPONENT_LEARNER
        shutil.rmtree(folder, ignore_errors=True)  # of other learners' files none may stay
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / f".{uuid4().hex}"
        mark.touch()
        answers = self.ask_all(lambda learner: _begin_save(learner, mark))
        mark.unlink()
        self._unfinished = folder, [answer for answer in answers if answer]

    def saved(self) -> bool:
        """Whether `finish_save` would wait for no learner."""
        return all(self.ask_all(TokenPPOLearner.saved))

    def finish_save(self) -> None:
        """Waits for what was begun, of which files of learners that do not see the folder are fetched.

        Raises:
            LearnerError, OSError: as of `foreach_learner`.
        """
        folder, elsewhere = self._unfinished
        try:
            self.ask_all(TokenPPOLearner.finish_save)
            for machine, written in elsewhere:
                sync_dir_between_nodes(machine, written, _address(), str(folder), max_size_bytes=None)
        finally:
            if elsewhere:
                self.ask_all(lambda _: _remove([written for _, written in elsewhere]))

    def restore_from_path(
        self, path: Any, *, filesystem: Any = None, component: str | None = None, moments: bool = True, **kwargs: Any
    ) -> None:
        """Takes every LLM's state, as any number of learners wrote it; without `moments` the weights alone.

        Raises:
            LearnerError, KeyError, FileNotFoundError: as of `foreach_learner` and `stored_policy.restore`.
            ValueError: `filesystem` is not this machine's, or a `component` is asked for.
        """
        _refuse_elsewhere(filesystem)
        if component is not None:
            raise ValueError(f"Only all of the learners can be restored, not {component}; see Cory.load_policies.")
        folder = Path(path) / COMPONENT_LEARNER
        here, files = _address() if self.is_remote else "", _files(folder)
        self.ask_all(lambda learner: _restore(learner, folder, files, here, moments))


def _refuse_elsewhere(filesystem: Any) -> None:
    """Refuses a pyarrow file system that is not this machine's own."""
    if filesystem is not None and filesystem.type_name != "local":
        raise ValueError(f"Learners write to folders, not to {filesystem.type_name}. Save to a folder, and copy that.")


def _address() -> str:
    return str(ray.util.get_node_ip_address())


def _remove(folders: Sequence[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _begin_save(learner: TokenPPOLearner, mark: Path) -> tuple[str, str] | None:
    """Begins to save into the folder of a file that is there; where it is not seen, into one of this machine's own.

    Returns:
        Of that this machine's address, and its name.
    """
    if mark.exists():
        learner.begin_save(str(mark.parent))
        return None
    own = tempfile.mkdtemp(prefix="cory-checkpoint-")
    try:
        learner.begin_save(own)
    except BaseException:
        _remove([own])
        raise
    return _address(), own


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns the size and time of each file in a folder, by which another machine knows whether it sees the same."""
    found = {file.relative_to(folder).as_posix(): file.stat() for file in folder.rglob(FILES)}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in found.items()}


def _restore(
    learner: TokenPPOLearner, folder: Path, files: dict[str, tuple[int, int]], machine: str, moments: bool
) -> None:
    """Restores from a folder; where it is not seen, from copies of what this learner needs."""
    if _files(folder) == files:
        learner.restore(str(folder), moments=moments)
        return
    with tempfile.TemporaryDirectory(prefix="cory-checkpoint-") as own:
        for part in (COMPONENT_RL_MODULE, *([COMPONENT_OPTIMIZER] if moments else [])):
            for name in learner.policies:
                if any(file.startswith(f"{part}/{name}/") for file in files):
                    there = f"{folder}/{part}/{name}"
                    sync_dir_between_nodes(machine, there, _address(), f"{own}/{part}/{name}", max_size_bytes=None)
        learner.restore(own, moments=moments)
