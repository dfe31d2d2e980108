"""The setting `roles`: typed entries, and which policy plays which role."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field, field_validator

from cory_env.chain_settings import NO_REWARD, TASK_REWARD, Role, make_positions
from cory_env.functions import parse_spec

POLICY_ID = re.compile(r"^llm_[1-9][0-9]*\Z")


class RoleSettings(BaseModel):
    """One role of the chain."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    name: str
    """Name of the role, a plain word such as `solver`."""
    prompt: str | None = None
    """Template of its prompt, with `{query}`, columns, `{reference}`, `{feedback}`, and `{solver.response}` and
    `{solver.feedback}` of earlier roles; null: the task's."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Maximum response length; null: the run's."""
    loss_weight: float = Field(1.0, ge=0)
    """Weight of the loss of its responses."""
    kl_coef: float | None = Field(None, ge=0)
    """Weight of its KL penalty; null: the run's."""
    reward: str | None = None
    """`task`, `none`, or its own function, `module:function`; null: `task` if it produces a response, else `none`."""
    produces_response: bool = True
    """Whether its responses are answers to the query. A critic's or planner's are not: they are never the chain's
    answer."""
    count: int = Field(1, ge=1)
    """Number of drafts, by agents that do not see each other; they form one group."""
    repeat: int = Field(1, ge=1)
    """Maximum number of responses in a row, each seeing the earlier ones."""
    policy: str | None = Field(None, pattern=POLICY_ID)
    """The LLM that has the role, such as `llm_1`; null: the first role has the first LLM, and so on, in turn."""

    @field_validator("reward")
    @classmethod
    def _check_reward(cls, reward: str | None) -> str | None:
        if reward not in (None, TASK_REWARD, NO_REWARD):
            parse_spec(reward)
        return reward

    @property
    def role(self) -> Role:
        """The role in the environment.

        Raises:
            ValueError: two values conflict.
        """
        return Role(
            self.name,
            self.prompt,
            self.max_response_tokens,
            self.produces_response,
            self.reward,
            self.count,
            self.repeat,
        )


def num_positions(roles: Sequence[RoleSettings]) -> int:
    """The number of agents in a chain with these roles."""
    return len(make_positions([role.role for role in roles]))


def assign_policies(roles: Sequence[RoleSettings], num_policies: int | None) -> list[int]:
    """Returns the index of the LLM that has each role at first.

    Raises:
        ValueError: only some roles name an LLM, or LLMs are left over.
    """
    names = [role.policy for role in roles]
    if any(names) and not all(names):
        raise ValueError(
            f"Role {roles[names.index(None)].name} names no policy, but others do. Name one for each role."
        )
    if not any(names):
        if (num_policies or 1) > len(roles):
            raise ValueError(
                f"num_policies={num_policies} is more than the {len(roles)} roles. Set it to {len(roles)} or less."
            )
        return [index % (num_policies or len(roles)) for index in range(len(roles))]
    indices = [int(name.removeprefix("llm_")) - 1 for name in names if name is not None]
    count = max(indices) + 1
    if missing := sorted({*range(count)} - {*indices}):
        raise ValueError(f"llm_{missing[0] + 1} has no role, but llm_{count} has. Number the policies without gaps.")
    if num_policies not in (None, count):
        raise ValueError(f"num_policies={num_policies} conflicts with roles, which name {count}. Remove num_policies.")
    return indices
