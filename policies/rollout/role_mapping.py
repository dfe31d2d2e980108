"""The mapping from roles to policies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from policies.settings.settings import Settings


@dataclass(frozen=True)
class RoleMapping:
    """RLlib's policy mapping function, role → policy id.

    Rotation r maps position p to policy (assignment[p] + r) mod m of m. Without an assignment, position p has policy p.
    With more policies than roles, the policies form several teams. This mapping is the first team's; `teams` returns
    all.
    """

    roles: tuple[str, ...]
    policy_ids: tuple[str, ...]
    rotation: int = 0
    assignment: tuple[int, ...] = ()

    def __call__(self, agent_id: str, episode: Any = None, **kwargs: Any) -> str:
        """Returns the policy id of a role; RLlib's signature."""
        position = self.roles.index(agent_id)
        index = self.assignment[position] if self.assignment else position
        return self.policy_ids[(index + self.rotation) % len(self.policy_ids)]

    def rotated(self) -> RoleMapping:
        """Returns the mapping after one role exchange. m exchanges restore the original."""
        return replace(self, rotation=(self.rotation + 1) % len(self.policy_ids))

    def with_pioneer(self, policy_id: str) -> RoleMapping:
        """Returns the mapping in which a policy is the pioneer of the first team."""
        first = self.assignment[0] if self.assignment else 0
        return replace(self, rotation=(self.policy_ids.index(policy_id) - first) % len(self.policy_ids))

    def teams(self) -> list[RoleMapping]:
        """Returns a mapping per team: the first n policies after the rotation have the n roles, then the next n, …"""
        starts = range(0, max(len(self.policy_ids), len(self.roles)), len(self.roles))
        return [replace(self, rotation=(self.rotation + start) % len(self.policy_ids)) for start in starts]

    def as_dict(self) -> dict[str, str]:
        """Returns `{role: policy_id}` in the order of the chain."""
        return {role: self(role) for role in self.roles}


def make_mapping(settings: Settings, rotation: int = 0) -> RoleMapping:
    """Returns the mapping of a run's chain after `rotation` exchanges."""
    assignment = () if settings.roles is None else settings.assignment
    return RoleMapping(settings.agents, settings.policy_ids, rotation, assignment)
