"""Which LLM plays which role."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class RoleMapping:
    """RLlib's policy mapping function: role → LLM. Rotation r gives position p to LLM (p + r) mod m, of m LLMs."""

    roles: tuple[str, ...]
    modules: tuple[str, ...]
    rotation: int = 0

    def __call__(self, agent_id: str, episode: Any = None, **kwargs: Any) -> str:
        """The LLM that plays `agent_id`."""
        return self.modules[(self.roles.index(agent_id) + self.rotation) % len(self.modules)]

    def rotated(self) -> RoleMapping:
        """The mapping after one role exchange; m exchanges restore it."""
        return replace(self, rotation=(self.rotation + 1) % len(self.modules))

    def as_dict(self) -> dict[str, str]:
        """`{role: LLM}` in the order of the chain."""
        return {role: self(role) for role in self.roles}
