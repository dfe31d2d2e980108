"""What RLlib asks of every EnvRunner, for one that keeps no state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED


class StatelessRunner(EnvRunner, Checkpointable):
    """All that it needs comes with every call, so one that was restarted has nothing to remember."""

    env_steps = 0
    """Environment steps since they were last asked for."""

    def get_metrics(self) -> dict[str, int]:
        """Environment steps since the last call."""
        steps, self.env_steps = self.env_steps, 0
        return {NUM_ENV_STEPS_SAMPLED: steps}

    def apply(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `func(self, ...)`. RLlib's own version ends the process a minute after any exception."""
        return func(self, *args, **kwargs)

    def assert_healthy(self) -> None:
        """One that could be built is."""

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """There is none."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Nothing to set."""

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """How to build this runner again."""
        return (), {"config": self.config}
