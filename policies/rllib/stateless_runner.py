"""The interface that RLlib requires of every EnvRunner, for a runner without state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED


class StatelessRunner(EnvRunner, Checkpointable):
    """A runner that gets everything it needs with every call, so that it can be restarted at any time."""

    env_steps = 0  # environment steps since the last call of `get_metrics`

    def get_metrics(self) -> dict[str, int]:
        """Environment steps since the last call."""
        steps, self.env_steps = self.env_steps, 0
        return {NUM_ENV_STEPS_SAMPLED: steps}

    def apply(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `func(self, ...)`. RLlib's version ends the process a minute after any exception."""
        return func(self, *args, **kwargs)

    def assert_healthy(self) -> None:
        """Does nothing: a runner that could be built is healthy."""

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns an empty state."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing."""

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments to build this runner again."""
        return (), {"config": self.config}
