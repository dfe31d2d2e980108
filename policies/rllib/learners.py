"""The driver's interface to its learners. A lost or failed learner always raises an error."""

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
from policies.learning.rows import Rows, frozen_scores
from policies.learning.stored_policy import TENSOR_FILES
from policies.models.weights import Weights
from policies.rllib.token_ppo_learner import TokenPPOLearner, fetch

T = TypeVar("T")
FAILURE_GRACE_SECONDS = 10.0
"""Seconds that the other learners have to answer after one has failed: they may be waiting for it in an all-reduce."""


class LearnerError(RuntimeError):
    """A learner process died or hangs, so the training state since the last checkpoint is lost."""


class Learners(LearnerGroup):
    """RLlib's learner group, with calls for all policies at once, wherever each policy is trained."""

    def __init__(self, *, config: AlgorithmConfig, **kwargs: Any) -> None:
        """Creates the group; `config` is a `CoryConfig`."""
        super().__init__(config=config, **kwargs)
        self.timeout: float = config.settings.learner_timeout
        """Timeout of a call to a remote learner, in seconds."""

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
        """Calls a function on every learner. After one fails, the others have `FAILURE_GRACE_SECONDS` to answer.

        RLlib's version skips dead learners: it treats a checkpoint as complete although a learner died or its disk was
        full, and if one of several learners dies, it may report the connection errors of the others instead. It also
        has no timeout, and waits for all learners although one has failed.

        Args:
            func: called with a learner and `kwargs`.
            healthy_only: no effect; no learner is skipped.
            remote_actor_ids: the remote learners to call; None: all.
            timeout_seconds: the timeout; None or 0: `timeout`.
            return_obj_refs: no effect; results are values.
            **kwargs: keyword arguments of `func`.
        """
        if self.is_local:
            return super().foreach_learner(func, **kwargs)
        timeout = timeout_seconds or self.timeout
        deadline = time.monotonic() + timeout
        actors = {
            learner: actor
            for learner, actor in actor_manager(self).actors().items()
            if remote_actor_ids is None or learner in remote_actor_ids
        }
        calls = {actor.apply.remote(partial(func, **kwargs)): learner for learner, actor in actors.items()}
        values: dict[int, Any] = {}
        errors: list[Exception] = []
        pending = list(calls)
        while pending:
            ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            try:
                values[calls[ready[0]]] = ray.get(ready[0])
            except RayError as error:
                errors.append(error.cause if isinstance(error, RayTaskError) else error)
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_SECONDS)
        for call in pending:
            ray.kill(actors[calls[call]])
        for cause in errors:
            if isinstance(cause, RayError):
                raise LearnerError(
                    "A learner's process died. Check its memory and device; micro_batch_size may be too large."
                ) from cause
        if errors:
            raise errors[0] from None
        if pending:
            raise LearnerError(
                f"{len(pending)} of {len(calls)} learners timed out after {timeout:.0f} s. If an update may take that "
                "long, raise learner_timeout; otherwise check their machines."
            )
        results = RemoteCallResults()
        for learner in actors:
            results.add_result(learner, ResultOrError(result=values[learner]), None)
        return results

    def score(self, rows: dict[str, Rows], *, keep: bool = False, reference: bool = True) -> dict[str, Rows]:
        """Scores the rows of every policy; see `PolicyLearner.score`, and `frozen_scores` for frozen models.

        Args:
            keep: keep the rows and their scores in the learners, for `learn`.

        Returns:
            The scores by policy id, on the CPU.
        """
        policy_ids = self.config.settings.policy_ids
        trained = {name: part for name, part in rows.items() if name in policy_ids}
        frozen = {name: frozen_scores(part, reference) for name, part in rows.items() if name not in policy_ids}
        shared = self._shared(trained)
        results = self.call_all(lambda learner: learner.score(fetch(shared), keep=keep, reference=reference))
        return {policy_id: scores for result in results for policy_id, scores in result.items()} | frozen

    def learn(self, columns: dict[str, Rows], update: int, kl_coefs: dict[str, float]) -> list[dict[str, Any]]:
        """Trains every policy on the rows that `score` kept.

        Args:
            columns: by policy id the columns that these rows do not have yet; only they are sent to the learners.
            update: number of the update, from 0.

        Returns:
            RLlib metrics, one result per learner.
        """
        shared = self._shared(columns)
        return self.call_all(lambda learner: learner.learn(fetch(shared), update, kl_coefs))

    def _shared(self, value: T) -> T | ray.ObjectRef[T]:
        """Puts a value into Ray's object store if learners are remote, so that each machine fetches it at most once."""
        return ray.put(value) if self.is_remote else value

    def weights(self, policy_id: str) -> Weights:
        """The current weights of a policy, without its value head, by Hugging Face names."""
        return self.call_first(lambda learner: learner.weights(policy_id))

    def put_weights(self, policy_id: str) -> tuple[ray.ObjectRef[Weights], int]:
        """Puts a policy's current weights into Ray's object store, without passing through this process.

        Returns:
            The reference and the weights' checksum.
        """
        (ref,), total = self.call_first(lambda learner: learner.put_weights(policy_id))
        return ref, total

    def transfer(
        self, policy_id: str, runners: Sequence[Any], version: int, restarts: int, weights: Weights | None = None
    ) -> tuple[int, list[LoadedWeights] | None]:
        """Sends a policy's weights directly from its learners to runners; see `WeightSender.send`."""
        shared = self._shared(weights)
        return self.call_first(lambda learner: learner.transfer(policy_id, runners, version, restarts, shared))

    def score_under(self, policy_id: str, weights: Weights, rows: Rows) -> Rows:
        """Scores a policy's rows with other weights, without the reference, and restores the current ones."""
        shared = self._shared(weights)
        return self.call_first(lambda learner: learner.score_under(policy_id, shared, rows))

    def reset_optimizers(self) -> None:
        """Resets Adam's moments of every policy."""
        self.call_first(TokenPPOLearner.reset_optimizers)

    def average(self, tau: float) -> None:
        """Moves all policies towards the mean of their weights by `tau`; see `TokenPPOLearner.average`."""
        self.call_first(lambda learner: learner.average(tau))

    @contextmanager
    def temporary_average(self, policy_id: str) -> Iterator[None]:
        """A context in which a policy has the mean of all policies' weights."""
        self.call_first(lambda learner: learner.swap_in_average(policy_id))
        try:
            yield
        finally:
            self.call_first(TokenPPOLearner.restore_weights)

    def call_first(self, function: Callable[[TokenPPOLearner], T | None]) -> T:
        """Calls a function on every learner, and returns the first result that is not None.

        With `shards_per_policy` a learner has only one policy; it returns None for the others.
        """
        return next((result for result in self.call_all(function) if result is not None), None)  # type: ignore[return-value]

    def call_all(self, function: Callable[[TokenPPOLearner], T]) -> list[T]:
        """Calls a function on every learner, and returns their results."""
        return [result.get() for result in self.foreach_learner(function)]

    # State. Each learner writes its part of each policy into the policy's folder.

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state for RLlib's runners (`inference_only`): empty, since weight sync does not use it."""
        if not kwargs.get("inference_only"):
            raise RuntimeError("The full state is not available in one process. Call the algorithm's save_to_path.")
        return {COMPONENT_LEARNER: {COMPONENT_RL_MODULE: {}}}

    def save_to_path(self, path: Any = None, *, filesystem: Any = None, **kwargs: Any) -> str:
        """Writes the state of every policy; see `stored_policy`.

        Learners that cannot see this folder write to their own machine, and their files are copied here.
        """
        _reject_remote_filesystem(filesystem)
        self.begin_save(Path(path))
        self.finish_save()
        return str(path)

    def begin_save(self, path: Path) -> None:
        """Starts writing a snapshot of every policy's state. Training may continue; `finish_save` completes it."""
        folder = path / COMPONENT_LEARNER
        shutil.rmtree(folder, ignore_errors=True)  # no files of an earlier set of learners may remain
        folder.mkdir(parents=True, exist_ok=True)
        marker = folder / f".{uuid4().hex}"
        marker.touch()
        results = self.call_all(lambda learner: _begin_save(learner, marker))
        marker.unlink()
        self._unfinished = folder, [remote for remote in results if remote]

    def is_saved(self) -> bool:
        """Whether `finish_save` would return without waiting for a learner."""
        return all(self.call_all(TokenPPOLearner.is_saved))

    def finish_save(self) -> None:
        """Waits until the state is written, and copies the files of learners that cannot see the folder."""
        folder, remote_folders = self._unfinished
        try:
            self.call_all(TokenPPOLearner.finish_save)
            for address, remote_folder in remote_folders:
                sync_dir_between_nodes(address, remote_folder, _address(), str(folder), max_size_bytes=None)
        finally:
            if remote_folders:
                self.call_all(lambda _: _remove([remote_folder for _, remote_folder in remote_folders]))

    def restore_from_path(
        self, path: Any, *, filesystem: Any = None, component: str | None = None, moments: bool = True, **kwargs: Any
    ) -> None:
        """Restores every policy's state, written by any number of learners; without `moments` only the weights."""
        _reject_remote_filesystem(filesystem)
        if component is not None:
            raise ValueError(f"Cannot restore only {component} of the learners. See Cory.load_policies.")
        folder = Path(path) / COMPONENT_LEARNER
        address, files = _address() if self.is_remote else "", _tensor_file_stats(folder)
        self.call_all(lambda learner: _restore(learner, folder, files, address, moments))


def _reject_remote_filesystem(filesystem: Any) -> None:
    """Raises ValueError for a pyarrow file system that is not local."""
    if filesystem is not None and filesystem.type_name != "local":
        raise ValueError(f"Learners cannot write to {filesystem.type_name}. Save to a local folder and copy it.")


def _address() -> str:
    return str(ray.util.get_node_ip_address())


def _remove(folders: Sequence[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _begin_save(learner: TokenPPOLearner, marker: Path) -> tuple[str, str] | None:
    """Starts saving into the marker's folder; if this machine cannot see the marker, into a temporary folder.

    Returns:
        This machine's address and the temporary folder; None if the learner saves into the marker's folder.
    """
    if marker.exists():
        learner.begin_save(str(marker.parent))
        return None
    temporary = tempfile.mkdtemp(prefix="cory-checkpoint-")
    try:
        learner.begin_save(temporary)
    except BaseException:
        _remove([temporary])
        raise
    return _address(), temporary


def _tensor_file_stats(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of each tensor file, by which another machine checks that it sees the same folder."""
    stats = {file.relative_to(folder).as_posix(): file.stat() for file in folder.rglob(TENSOR_FILES)}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def _restore(
    learner: TokenPPOLearner, folder: Path, files: dict[str, tuple[int, int]], address: str, moments: bool
) -> None:
    """Restores from a folder; if this machine cannot see it, from copies of the files that this learner needs."""
    if _tensor_file_stats(folder) == files:
        learner.restore(str(folder), moments=moments)
        return
    with tempfile.TemporaryDirectory(prefix="cory-checkpoint-") as temporary:
        for part in (COMPONENT_RL_MODULE, *([COMPONENT_OPTIMIZER] if moments else [])):
            for name in (f"{part}/{policy_id}" for policy_id in learner.policies):
                if any(file.startswith(f"{name}/") for file in files):
                    source, target = f"{folder}/{name}", f"{temporary}/{name}"
                    sync_dir_between_nodes(address, source, _address(), target, max_size_bytes=None)
        learner.restore(temporary, moments=moments)
