"""Which LLM plays which role."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class RoleMapping:
    """RLlib's policy mapping function: role → LLM. Rotation r gives position p to LLM (p + r) mod m, of m LLMs.

    More LLMs than roles make up several teams, of which this says who plays in the first; `teams` has all.
    """

    roles: tuple[str, ...]
    policy_ids: tuple[str, ...]
    rotation: int = 0

    def __call__(self, agent_id: str, episode: Any = None, **kwargs: Any) -> str:
        """The LLM that plays `agent_id`."""
        return self.policy_ids[(self.roles.index(agent_id) + self.rotation) % len(self.policy_ids)]

    def rotated(self) -> RoleMapping:
        """The mapping after one role exchange; m exchanges restore it."""
        return replace(self, rotation=(self.rotation + 1) % len(self.policy_ids))

    def with_pioneer(self, module: str) -> RoleMapping:
        """The mapping in which an LLM is the pioneer of the first team."""
        return replace(self, rotation=self.policy_ids.index(module))

    def teams(self) -> list[RoleMapping]:
        """A mapping for each team: the first n LLMs after the rotation play n roles, then the next n, and so on."""
        starts = range(0, max(len(self.policy_ids), len(self.roles)), len(self.roles))
        return [replace(self, rotation=(self.rotation + start) % len(self.policy_ids)) for start in starts]

    def as_dict(self) -> dict[str, str]:
        """`{role: LLM}` in the order of the chain."""
        return {role: self(role) for role in self.roles}
