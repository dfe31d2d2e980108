"""Uses of RLlib's (2.60) private interfaces."""

from __future__ import annotations

import tempfile

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
