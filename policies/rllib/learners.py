"""The driver's interface to its learners. A lost or failed learner always raises an error."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import ray
from ray.exceptions import RayError, RayTaskError
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_OPTIMIZER, COMPONENT_RL_MODULE
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.tune.utils.file_transfer import sync_dir_between_nodes

from policies.compat.rllib import actor_manager
from policies.generation.generator import LoadedWeights
from policies.learning.policy_learner import PolicyLearner
from policies.learning.rows import Estimates, Rows, Scores, frozen_scores
from policies.learning.stored_policy import TENSOR_FILES
from policies.models.weights import Weights, checksum
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
        self.timeout: float = config.settings.learner_timeout  # timeout of a call to a remote learner, in seconds

    def score(
        self, rows: dict[str, Rows], *, keep: bool = False, reference: bool = True, policy: bool = True
    ) -> dict[str, Scores]:
        """Scores the rows of every policy; see `PolicyLearner.score`, and `frozen_scores` for frozen models.

        Args:
            keep: keep the rows and their scores in the learners, for `learn`.
            policy: score with the policies; if not, only with the reference (`PolicyLearner.score_reference`).
        """
        policy_ids = self.config.settings.policy_ids
        trained = {name: part for name, part in rows.items() if name in policy_ids}
        frozen = {name: frozen_scores(part, reference) for name, part in rows.items() if name not in policy_ids}
        shared = self._shared(trained)
        results = self.call_all(
            lambda learner: learner.score(fetch(shared), keep=keep, reference=reference, policy=policy)
        )
        return {policy_id: scores for result in results for policy_id, scores in result.items()} | frozen

    def learn(self, estimates: dict[str, Estimates], update: int, kl_coefs: dict[str, float]) -> list[dict[str, Any]]:
        """Trains every policy on the rows that `score` kept; see `TokenPPOLearner.learn`.

        Returns:
            RLlib metrics, one result per learner.
        """
        shared = self._shared(estimates)
        return self.call_all(lambda learner: learner.learn(fetch(shared), update, kl_coefs))

    def _shared(self, value: T) -> T | ray.ObjectRef[T]:
        """Puts a value into Ray's object store if learners are remote, so that each machine fetches it at most once."""
        return ray.put(value) if self.is_remote else value

    def weights(self, policy_id: str) -> Weights:
        """The current weights of a policy, without its value head, by Hugging Face names."""
        return self.call_policy(policy_id, lambda policy: dict(policy.stream_weights()))

    def put_weights(self, policy_id: str) -> tuple[ray.ObjectRef[Weights], int]:
        """Puts a policy's current weights into Ray's object store, without passing through this process.

        Returns:
            The reference and the weights' checksum.
        """
        (ref,), total = self.call_policy(policy_id, _put_weights)
        return ref, total

    def transfer(
        self, policy_id: str, runners: Sequence[Any], version: int, restarts: int, weights: Weights | None = None
    ) -> tuple[int, list[LoadedWeights] | None]:
        """Sends a policy's weights directly from its learners to runners; see `WeightSender.send`."""
        shared = self._shared(weights)
        return self.call_first(lambda learner: learner.transfer(policy_id, runners, version, restarts, fetch(shared)))

    def score_under(self, policy_id: str, weights: Weights, rows: Rows) -> Scores:
        """Scores a policy's rows with other weights, without the reference, and restores the current ones."""
        shared = self._shared(weights)
        return self.call_policy(policy_id, lambda policy: policy.score_under(fetch(shared), rows))

    def reset_optimizers(self) -> None:
        """Resets Adam's moments of every policy."""
        for policy_id in self.config.settings.policy_ids:
            self.call_policy(policy_id, PolicyLearner.reset_optimizer)

    def average(self, tau: float) -> None:
        """Moves all policies towards the mean of their weights by `tau`; see `TokenPPOLearner.average`."""
        self.call_all(lambda learner: learner.average(tau))

    @contextmanager
    def temporary_average(self, policy_id: str) -> Iterator[None]:
        """A context in which a policy has the mean of all policies' weights."""
        self.call_all(lambda learner: learner.swap_in_average(policy_id))
        try:
            yield
        finally:
            self.call_all(TokenPPOLearner.restore_weights)

    def call_policy(self, policy_id: str, function: Callable[[PolicyLearner], T]) -> T:
        """Calls a function on a policy's learner in all of its processes, and returns the result of rank 0."""
        return self.call_first(lambda learner: learner.call_policy(policy_id, function))

    def call_first(self, function: Callable[[TokenPPOLearner], T | None]) -> T:
        """Calls a function on every learner, and returns the first result that is not None."""
        return next((result for result in self.call_all(function) if result is not None), None)  # type: ignore[return-value]

    def call_all(self, function: Callable[[TokenPPOLearner], T]) -> list[T]:
        """Calls a function on every learner, and returns their results.

        Unlike with RLlib's `foreach_learner`, a dead learner is never skipped (a checkpoint would count as complete),
        the cause of a failure is told from the connection errors that follow from it, and no call is waited for without
        a limit. After one learner fails, the others have `FAILURE_GRACE_SECONDS` to answer.
        """
        if self.is_local:
            return [result.get() for result in self.foreach_learner(function)]
        calls = {actor.apply.remote(function): actor for actor in actor_manager(self).actors().values()}
        deadline = time.monotonic() + self.timeout
        results: dict[ray.ObjectRef[T], T] = {}
        errors: list[Exception] = []
        pending = list(calls)
        while pending:
            ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            try:
                results[ready[0]] = ray.get(ready[0])
            except RayError as error:
                errors.append(error.cause if isinstance(error, RayTaskError) else error)
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_SECONDS)
        for call in pending:
            ray.kill(calls[call])
        for cause in errors:
            if isinstance(cause, RayError):
                raise LearnerError(
                    "A learner's process died. Check its memory and device; micro_batch_size may be too large."
                ) from cause
        if errors:
            raise errors[0] from None
        if pending:
            raise LearnerError(
                f"{len(pending)} of {len(calls)} learners timed out after {self.timeout:g} s. If an update may take "
                "that long, raise learner_timeout; otherwise check their machines."
            )
        return [results[call] for call in calls]

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


def _put_weights(policy: PolicyLearner) -> tuple[list[ray.ObjectRef[Weights]], int]:
    """Returns a reference to the weights, in a list so that Ray does not resolve it, and their checksum."""
    weights = dict(policy.stream_weights())
    return [ray.put(weights)], checksum(weights)


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
