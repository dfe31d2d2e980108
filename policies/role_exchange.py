"""Who plays which role, and the exchange of roles: the one thing that changes is this mapping."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ray.rllib.callbacks.callbacks import RLlibCallback

if TYPE_CHECKING:
    from policies.cory import Cory


@dataclass(frozen=True)
class RoleMapping:
    """RLlib's policy mapping function: role → LLM. Rotation r gives position p to LLM (p + r) mod n."""

    roles: tuple[str, ...]
    modules: tuple[str, ...]
    rotation: int = 0

    def __call__(self, agent_id: str, episode: Any = None, **kwargs: Any) -> str:
        """The LLM that plays `agent_id`."""
        return self.modules[(self.roles.index(agent_id) + self.rotation) % len(self.modules)]

    def rotated(self) -> RoleMapping:
        """The mapping after one role exchange; n exchanges restore it."""
        return replace(self, rotation=(self.rotation + 1) % len(self.modules))

    def as_dict(self) -> dict[str, str]:
        """`{role: LLM}` in the order of the chain."""
        return {role: self(role) for role in self.roles}


class RoleExchange(RLlibCallback):
    """Rotates the roles every `exchange_period` real updates (paper: T_REx).

    No weights move, and no optimizer is reset unless `reset_on_exchange` says so. It runs after an update's metrics are
    final, so they carry the roles that the update was generated with, and before any checkpoint of that update. Empty
    iterations do not count.
    """

    def on_train_result(self, *, algorithm: Cory, result: dict[str, Any], **kwargs: Any) -> None:
        """Exchanges roles when their time has come; one agent alone has nobody to exchange with."""
        period = algorithm.settings.exchange_period
        alone = algorithm.settings.num_agents == 1
        if period is not None and algorithm.updates_since_exchange >= period and not alone:
            algorithm.exchange_roles()
            result["cory"].update(exchanged=True, exchanges=algorithm.exchanges)
