"""Role exchange: rotating which policy has which role."""

from __future__ import annotations

from typing import Any

from ray.rllib.callbacks.callbacks import RLlibCallback

from policies.settings.settings import Settings


def exchange_due(settings: Settings, updates: int) -> bool:
    """Returns whether a role exchange is due."""
    can_exchange = 1 not in (settings.num_agents, len(settings.policy_ids))
    return settings.exchange_period is not None and updates >= settings.exchange_period and can_exchange


class RoleExchange(RLlibCallback):
    """Rotates the roles every `exchange_period` updates (paper: T_REx).

    Only the mapping changes: no weights move, and optimizers are reset only if `reset_on_exchange` is set. The callback
    runs after an update's metrics are final, so they carry the roles that the update was generated with, and before any
    checkpoint of that update. Iterations without an update do not count.
    """

    def on_train_result(self, *, algorithm: Any, result: dict[str, Any], **kwargs: Any) -> None:
        """Exchanges roles if it is time, and records this in the result."""
        if exchange_due(algorithm.settings, algorithm.updates_since_exchange):
            algorithm.exchange_roles()
            result["cory"].update(exchanged=True, exchanges=algorithm.exchanges)
