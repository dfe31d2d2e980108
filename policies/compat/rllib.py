"""RLlib (2.60) beside its public interface."""

from __future__ import annotations

import os
import tempfile

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.actor_manager import FaultTolerantActorManager
from ray.tune import Trainable


def actor_manager(group: EnvRunnerGroup | LearnerGroup) -> FaultTolerantActorManager:
    """Returns the manager of a group's remote workers, which knows their actors and which of them are healthy.

    The group's own calls either drop what a worker raised or raise it without saying which one it was, and cannot give
    up one that hangs.
    """
    return group._worker_manager


def keep_runner_states(config: AlgorithmConfig) -> None:
    """Lets RLlib not copy a state from runner to runner after each update: ours have none, and get checked weights."""
    config._dont_auto_sync_env_runner_states = True


class TemporaryLogdir(Trainable):
    """An algorithm whose folder, outside of Tune, is among temporary files.

    RLlib makes it in the home directory, which containers with a random user cannot write to, and has no public setting
    for it.
    """

    def _setup_logdir(self) -> None:
        if self._storage is not None:
            super()._setup_logdir()
        else:
            path = os.environ.get("TMPDIR", "")  # a command's own, which goes when that ends; Python remembers another
            self._logdir = tempfile.mkdtemp(prefix="rllib-", dir=path if os.path.isdir(path) else None)
