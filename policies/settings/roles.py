"""Which LLM has which role."""

from __future__ import annotations

from collections.abc import Sequence

from cory_env.chain_settings import Role


def assign_policies(roles: Sequence[Role], num_policies: int | None) -> list[str]:
    """Returns the policy id that has each role at first: `llm_1`, ..., or `frozen_1`, ... for frozen models.

    Raises:
        ValueError: only some roles name a trained LLM, all have frozen models, or LLMs are left over.
    """
    trained_ids = iter(_assign_trained([role for role in roles if role.frozen_model is None], num_policies))
    frozen_ids = {model: policy_id for policy_id, model in frozen_policies(roles).items()}
    return [next(trained_ids) if role.frozen_model is None else frozen_ids[role.frozen_model] for role in roles]


def frozen_policies(roles: Sequence[Role]) -> dict[str, str]:
    """Returns policy id → folder or hub id of the frozen models that have roles."""
    models = dict.fromkeys(role.frozen_model for role in roles if role.frozen_model is not None)
    return {f"frozen_{k}": model for k, model in enumerate(models, 1)}


def _assign_trained(roles: Sequence[Role], num_policies: int | None) -> list[str]:
    if not roles:
        raise ValueError("All roles have frozen models, so there is no LLM to train. Remove policy from one role.")
    names = [role.policy for role in roles if role.policy is not None]
    if names and len(names) < len(roles):
        unnamed = next(role.name for role in roles if role.policy is None)
        raise ValueError(f"Role {unnamed} names no policy, but others do. Name one for each role.")
    if not names:
        count = num_policies or len(roles)
        if count > len(roles):
            raise ValueError(
                f"num_policies={num_policies} is more than the {len(roles)} roles without a frozen model. Set it to "
                f"{len(roles)} or less."
            )
        return [f"llm_{index % count + 1}" for index in range(len(roles))]
    numbers = {int(name.removeprefix("llm_")) for name in names}
    if missing := sorted({*range(1, max(numbers))} - numbers):
        raise ValueError(f"llm_{missing[0]} has no role, but llm_{max(numbers)} has. Number the policies without gaps.")
    if num_policies not in (None, len(numbers)):
        raise ValueError(
            f"num_policies={num_policies} conflicts with roles, which name {len(numbers)}. Remove num_policies."
        )
    return names
