"""The setting `roles`: typed entries, and which policy plays which role."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field, field_validator

from cory_env.chain_settings import NO_REWARD, TASK_REWARD, Role, make_positions
from cory_env.functions import parse_spec
from cory_env.home import expand_home
from cory_env.rewarding.spec import parse_sum

POLICY_ID = re.compile(r"^llm_[1-9][0-9]*\Z")


class RoleSettings(BaseModel):
    """One role of the chain."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    name: str
    """Name of the role, a plain word such as `solver`."""
    prompt: str | None = None
    """Template of its prompt, with `{query}`, columns, `{reference}`, `{feedback}`, and `{solver.response}` and
    `{solver.feedback}` of earlier roles; null: the task's."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Maximum response length; null: the run's."""
    reward: str | None = None
    """`task`, `none`, or its own function, `module:function`; null: `task` if it produces a response, else `none`."""
    produces_response: bool = Field(True, strict=False)
    """Whether its responses are answers to the query. A critic's or planner's are not: they are never the chain's
    answer."""
    count: int = Field(1, ge=1)
    """Number of drafts, by agents that do not see each other; they form one group."""
    repeat: int = Field(1, ge=1)
    """Maximum number of responses in a row, each seeing the earlier ones."""
    policy: str | None = None
    """The LLM that has the role: a trained one, such as `llm_1`, or a frozen model's folder or hub id; null: the first
    role without a frozen model has the first trained LLM, and so on, in turn."""

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, policy: str | None) -> str | None:
        if policy is not None and (not policy.strip() or (policy.startswith("llm_") and not POLICY_ID.match(policy))):
            raise ValueError("should be llm_1, llm_2, ..., or the folder or hub id of a frozen model")
        return policy and expand_home(policy)

    @field_validator("reward")
    @classmethod
    def _check_reward(cls, reward: str | None) -> str | None:
        if reward not in (None, TASK_REWARD, NO_REWARD):
            parse_spec(reward)  # a single function
            parse_sum(reward)
        return reward

    @property
    def frozen_model(self) -> str | None:
        """Folder or hub id of the frozen model that has the role; None if a trained LLM has it."""
        return None if self.policy is None or POLICY_ID.match(self.policy) else self.policy

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


def assign_policies(roles: Sequence[RoleSettings], num_policies: int | None) -> list[str]:
    """Returns the policy id that has each role at first: `llm_1`, ..., or `frozen_1`, ... for frozen models.

    Raises:
        ValueError: only some roles name a trained LLM, all have frozen models, or LLMs are left over.
    """
    trained = [role for role in roles if role.frozen_model is None]
    trained_ids = iter(_assign_trained(trained, num_policies))
    frozen = frozen_policies(roles)
    ids = {model: policy_id for policy_id, model in frozen.items()}
    return [next(trained_ids) if role.frozen_model is None else ids[role.frozen_model] for role in roles]


def frozen_policies(roles: Sequence[RoleSettings]) -> dict[str, str]:
    """Returns policy id → folder or hub id of the frozen models that have roles."""
    models = dict.fromkeys(role.frozen_model for role in roles if role.frozen_model is not None)
    return {f"frozen_{k}": model for k, model in enumerate(models, 1)}


def _assign_trained(roles: Sequence[RoleSettings], num_policies: int | None) -> list[str]:
    names = [role.policy for role in roles]
    if not names:
        raise ValueError("All roles have frozen models, so there is no LLM to train. Remove policy from one role.")
    if any(names) and not all(names):
        raise ValueError(
            f"Role {roles[names.index(None)].name} names no policy, but others do. Name one for each role."
        )
    if not any(names):
        if (num_policies or 1) > len(roles):
            raise ValueError(
                f"num_policies={num_policies} is more than the {len(roles)} roles without a frozen model. Set it to "
                f"{len(roles)} or less."
            )
        return [f"llm_{index % (num_policies or len(roles)) + 1}" for index in range(len(roles))]
    numbers = {int(name.removeprefix("llm_")) for name in names if name is not None}
    if missing := sorted({*range(1, max(numbers))} - numbers):
        raise ValueError(f"llm_{missing[0]} has no role, but llm_{max(numbers)} has. Number the policies without gaps.")
    if num_policies not in (None, len(numbers)):
        raise ValueError(
            f"num_policies={num_policies} conflicts with roles, which name {len(numbers)}. Remove num_policies."
        )
    return [name for name in names if name is not None]
