"""Uses of RLlib's (2.60) private interfaces."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.actor_manager import FaultTolerantActorManager
from ray.tune import Trainable


def actor_manager(group: EnvRunnerGroup | LearnerGroup) -> FaultTolerantActorManager:
    """Returns a group's actor manager, which knows its remote workers and which of them are healthy.

    The group's own calls either drop a worker's error or raise it without naming the worker, and they cannot abandon a
    worker that hangs.
    """
    return group._worker_manager


def disable_runner_state_sync(config: AlgorithmConfig) -> None:
    """Stops RLlib from copying state between runners after each update. Ours have none; `Runners` syncs weights."""
    config._dont_auto_sync_env_runner_states = True


@contextmanager
def ray_if_needed(is_needed: bool) -> Iterator[None]:
    """Keeps RLlib from starting Ray for an algorithm that does not need it.

    `EnvRunnerGroup` puts its configuration and restored weights into Ray's object store even if no remote runner reads
    them. That would start Ray: 1.7 s at start, 1 s at shutdown, and 300 MB.
    """
    if is_needed or ray.is_initialized():
        yield
        return
    put = ray.put
    ray.put = lambda value, **_: value
    try:
        yield
    finally:
        ray.put = put


class TemporaryLogdir(Trainable):
    """An algorithm that, outside of Tune, keeps its log folder in the temporary directory.

    RLlib creates it in the home directory, where containers with a random user cannot write, and has no public setting
    for it.
    """

    def _setup_logdir(self) -> None:
        if self._storage is not None:
            super()._setup_logdir()
        else:
            self._logdir = tempfile.mkdtemp(prefix="rllib-")
