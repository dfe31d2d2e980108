"""The mapping from roles to policies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class RoleMapping:
    """RLlib's policy mapping function, role → policy id. Rotation r maps position p to policy (p + r) mod m of m.

    With more policies than roles, the policies form several teams. This mapping is the first team's; `teams` returns
    all.
    """

    roles: tuple[str, ...]
    policy_ids: tuple[str, ...]
    rotation: int = 0

    def __call__(self, agent_id: str, episode: Any = None, **kwargs: Any) -> str:
        """Returns the policy id of a role; RLlib's signature."""
        return self.policy_ids[(self.roles.index(agent_id) + self.rotation) % len(self.policy_ids)]

    def rotated(self) -> RoleMapping:
        """Returns the mapping after one role exchange. m exchanges restore the original."""
        return replace(self, rotation=(self.rotation + 1) % len(self.policy_ids))

    def with_pioneer(self, policy_id: str) -> RoleMapping:
        """Returns the mapping in which a policy is the pioneer of the first team."""
        return replace(self, rotation=self.policy_ids.index(policy_id))

    def teams(self) -> list[RoleMapping]:
        """Returns a mapping per team: the first n policies after the rotation have the n roles, then the next n, …"""
        starts = range(0, max(len(self.policy_ids), len(self.roles)), len(self.roles))
        return [replace(self, rotation=(self.rotation + start) % len(self.policy_ids)) for start in starts]

    def as_dict(self) -> dict[str, str]:
        """Returns `{role: policy_id}` in the order of the chain."""
        return {role: self(role) for role in self.roles}
