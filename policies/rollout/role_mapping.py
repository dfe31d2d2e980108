"""The mapping from roles to policies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from policies.settings.settings import Settings


@dataclass(frozen=True)
class RoleMapping:
    """RLlib's policy mapping function, agent → policy id.

    Position p has the policy `assignment[p]` at first; without an assignment policy p. Rotation r replaces policy k of
    m by policy (k + r) mod m. Frozen models are not among the policies and keep their positions. With more policies
    than roles, the policies form several teams. This mapping is the first team's; `teams` returns all.
    """

    agents: tuple[str, ...]
    policy_ids: tuple[str, ...]
    rotation: int = 0
    assignment: tuple[str, ...] = ()

    def __call__(self, agent_id: str, episode: Any = None, **kwargs: Any) -> str:
        """Returns the policy id of an agent; RLlib's signature."""
        position = self.agents.index(agent_id)
        if self.assignment and self.assignment[position] not in self.policy_ids:
            return self.assignment[position]
        index = self.policy_ids.index(self.assignment[position]) if self.assignment else position
        return self.policy_ids[(index + self.rotation) % len(self.policy_ids)]

    def rotated(self) -> RoleMapping:
        """Returns the mapping after one role exchange. m exchanges restore the original."""
        return replace(self, rotation=(self.rotation + 1) % len(self.policy_ids))

    def with_pioneer(self, policy_id: str) -> RoleMapping:
        """Returns the mapping in which a policy is the pioneer of the first team."""
        return self.with_policy(self.agents[0], policy_id)

    def with_policy(self, role: str, policy_id: str) -> RoleMapping:
        """Returns the mapping in which a policy has a role in the first team; no frozen model may have the role."""
        first = self.policy_ids.index(replace(self, rotation=0)(role))
        return replace(self, rotation=(self.policy_ids.index(policy_id) - first) % len(self.policy_ids))

    def teams(self) -> list[RoleMapping]:
        """Returns a mapping per team: the first n policies after the rotation have the n roles, then the next n, …"""
        starts = range(0, max(len(self.policy_ids), len(self.agents)), len(self.agents))
        return [replace(self, rotation=(self.rotation + start) % len(self.policy_ids)) for start in starts]

    def as_dict(self) -> dict[str, str]:
        """Returns `{agent: policy_id}` in the order of the chain."""
        return {agent: self(agent) for agent in self.agents}


def make_mapping(settings: Settings, rotation: int = 0) -> RoleMapping:
    """Returns the mapping of a run's chain after `rotation` exchanges."""
    assignment = () if settings.roles is None else settings.assignment
    return RoleMapping(settings.agents, settings.policy_ids, rotation, assignment)


def make_orders(settings: Settings) -> list[RoleMapping]:
    """Returns the mappings that role exchange produces, in the order of their pioneers if these are trained."""
    if settings.pioneers:
        return [make_mapping(settings).with_pioneer(policy_id) for policy_id in settings.pioneers]
    exchanges = len(settings.policy_ids) if settings.exchange_period else 1
    return [make_mapping(settings, rotation) for rotation in range(exchanges)]
