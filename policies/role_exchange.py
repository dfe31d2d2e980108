"""Who plays which role, and the exchange of roles: the one thing that changes is this mapping."""

from __future__ import annotations

from typing import Any

from ray.rllib.callbacks.callbacks import RLlibCallback

from policies.rollout.role_mapping import RoleMapping
from policies.settings.settings import Settings


def exchange_due(settings: Settings, updates: int) -> bool:
    """Whether roles are exchanged so many updates after they last were; one LLM alone has nobody to exchange with, one
    role nothing.
    """
    alone = 1 in (settings.num_agents, len(settings.policy_ids))
    return settings.exchange_period is not None and updates >= settings.exchange_period and not alone


class RoleExchange(RLlibCallback):
    """Rotates the roles every `exchange_period` real updates (paper: T_REx).

    No weights move, and no optimizer is reset unless `reset_on_exchange` says so. It runs after an update's metrics are
    final, so they carry the roles that the update was generated with, and before any checkpoint of that update. Empty
    iterations do not count.
    """

    def on_train_result(self, *, algorithm: Any, result: dict[str, Any], **kwargs: Any) -> None:
        """Exchanges roles when their time has come."""
        if exchange_due(algorithm.settings, algorithm.updates_since_exchange):
            algorithm.exchange_roles()
            result["cory"].update(exchanged=True, exchanges=algorithm.exchanges)


__all__ = ["RoleExchange", "RoleMapping", "exchange_due"]
