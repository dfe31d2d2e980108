"""Credit assignment: from the task rewards of a chain's agents to the reward that each agent trains on.

Functions on `[C, n]` tensors: `C` chains of up to `n` agents; position 0 is the pioneer. Task rewards are NaN at the
last positions of a chain that stopped early (`stop_when`), which it lacks, and of roles without a reward. The default
is the collective reward of the CORY paper (Ma et al. 2024, arXiv 2410.06101).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from policies.learning.estimation import AdvantageEstimator
from policies.learning.hyperparameters import Credit
from policies.learning.rows import Rows


class CreditError(ValueError):
    """A custom credit function cannot be used; the message names the reason."""


def collective_rewards(task_rewards: Tensor, partner_reward: float, stages: Sequence[int] = ()) -> Tensor:
    """Collective reward (CORY paper §2): r_i + α · Σ_{j≠i} r_j, over the rewards that exist; `[C, n]`, float64.

    The sum leaves out the other drafts of agent i's own role: with them and α = 1, right and wrong drafts of a chain
    would have equal rewards. r_i counts as 0 for an agent without a reward.

    Args:
        partner_reward: α; 1 is cooperative as in the paper, 0 independent, -1 competitive.
        stages: see `Credit.stages`.
    """
    stage = torch.tensor(stages or range(task_rewards.shape[1]))
    weights = torch.full((len(stage), len(stage)), partner_reward, dtype=task_rewards.dtype)
    weights = weights.masked_fill(stage == stage.unsqueeze(1), 0.0).fill_diagonal_(1.0)
    return task_rewards.nan_to_num(0.0) @ weights


def last_agent_rewards(task_rewards: Tensor) -> Tensor:
    """Team reward: keeps the task reward of each chain's last rewarded response and sets all others to 0; `[C, n]`."""
    has_reward = ~task_rewards.isnan()
    is_last = has_reward & (has_reward.flip(1).cumsum(1).flip(1) == 1)
    return task_rewards.masked_fill(~is_last, 0.0)


def chain_rewards(
    task_rewards: Tensor,
    value_and_return: Callable[[int, Tensor], tuple[Tensor, Tensor]],
    chain_gamma: float,
    chain_lam: float,
    stages: Sequence[int] = (),
) -> Tensor:
    """Generalised advantage estimation over the whole chain, treated as one trajectory.

    The trajectory is the tokens of agent 1, then of agent 2, …, with the task reward r_i at agent i's last token. From
    the last agent back to the first,

        R_n = r_n
        R_i = r_i + γ_c · ((1 − λ_c) · V_{i+1} + λ_c · G_{i+1})

    V_{i+1} is the next agent's critic before its first token, and G_{i+1} its λ-return from there, computed with
    R_{i+1}. With R_i as the reward of agent i's last token, GAE (Schulman et al. 2016) within each response becomes
    GAE over the rest of the chain, with γ_c and λ_c between agents. γ_c = 0 is each agent's own reward; γ_c = 1 with
    λ_c = 1 is the reward-to-go of the chain, and with λ_c = 0 it is r_i + V_{i+1}.

    Drafts do not see each other, so none is credited for another: V_{i+1} and G_{i+1} of a draft are those of the agent
    after all drafts. For the agent before them, they are the means over the drafts.

    Args:
        task_rewards: `[C, n]`, float64, NaN without a reward.
        value_and_return: takes a position and the rewards R `[C]` there; returns V and G, `[C]` each, NaN for chains
            that lack the position.
        chain_gamma: γ_c, the discount from one agent to the next.
        chain_lam: λ_c.
        stages: see `Credit.stages`.

    Returns:
        R, `[C, n]`, float64; r_i counts as 0 for an agent without a reward.
    """
    rewards = task_rewards.nan_to_num(0.0)
    positions_by_stage: dict[int, list[int]] = {}
    for position in range(rewards.shape[1]):
        positions_by_stage.setdefault(stages[position] if stages else position, []).append(position)
    parts = [*positions_by_stage.values()]
    for earlier, later in reversed([*pairwise(parts)]):
        estimates = []
        for position in later:
            value, lambda_return = value_and_return(position, rewards[:, position])
            estimates.append((1.0 - chain_lam) * value + chain_lam * lambda_return)
        rewards[:, earlier] += chain_gamma * torch.stack(estimates).nanmean(0).nan_to_num(0.0).unsqueeze(1)
    return rewards


def custom_rewards(credit: Credit, task_rewards: Tensor, has_response: Tensor) -> Tensor:
    """Calls the user's credit function with `task_rewards` and checks the rewards that it returns.

    Args:
        has_response: `[C, n]`, bool; false at positions that a stopped chain lacks, whose values do not count.
    """
    assert credit.custom_function is not None
    try:
        rewards = torch.as_tensor(credit.custom_function(task_rewards.clone()), dtype=torch.float64)
        rewards = rewards.clone()  # it may be an expanded view, which cannot be written to
    except Exception as error:
        raise CreditError(f"The credit function {credit.credit} raised {type(error).__name__}: {error}") from error
    if rewards.shape != task_rewards.shape:
        raise CreditError(
            f"The credit function {credit.credit} returned shape {tuple(rewards.shape)} for task rewards of shape "
            f"{tuple(task_rewards.shape)} (chains, agents). Return one reward per response, in the same shape."
        )
    if not rewards[has_response].isfinite().all():
        hint = " Task rewards are NaN without a reward: use nansum, or mask them." if task_rewards.isnan().any() else ""
        raise CreditError(f"The credit function {credit.credit} returned NaN or infinity. Return finite numbers.{hint}")
    return rewards


def turn_rewards(rows: Rows, credit: Credit, estimator: AdvantageEstimator | None) -> Tensor:
    """The return of each response in an environment: what its agent got from then on, over its turns.

    Between two turns of an agent it is `chain_rewards`' recursion between two agents, with γ_c and λ_c,

        R_t = r_t + γ_c · ((1 − λ_c) · V_{t+1} + λ_c · G_{t+1})

    r_t is what the agent got until its next turn, plus α times what all others got. With R_t as the reward of the
    response's last token, GAE within each response becomes GAE over the agent's whole episode; without a critic and
    with γ_c = 1, R_t is the sum of the rewards and KL penalties from there on.

    Args:
        rows: one policy's, scored if the estimator has a critic.
        estimator: supplies V and G; None: the policy is frozen.

    Returns:
        R, `[B]`, float64.
    """
    assert rows.turns is not None and rows.partner_rewards is not None
    rewards = rows.task_rewards.nan_to_num(0.0) + credit.partner_reward * rows.partner_rewards
    agents = torch.stack([rows.chains, rows.positions], dim=1).unique(dim=0, return_inverse=True)[1]
    row_of = torch.full((int(agents.max()) + 1, int(rows.turns.max()) + 1), -1)
    row_of[agents, rows.turns] = torch.arange(len(rows))
    for turn in reversed(range(row_of.shape[1] - 1)):
        has_next = row_of[:, turn + 1] >= 0
        here, following = row_of[has_next, turn], row_of[has_next, turn + 1]
        value, lambda_return = rewards[following], rewards[following]
        if estimator is not None:
            value, lambda_return = estimator.value_and_return(rows.select(following), rewards[following].float())
        estimate = (1.0 - credit.chain_lam) * value.double() + credit.chain_lam * lambda_return.double()
        rewards[here] += credit.chain_gamma * estimate
    return rewards


def check_custom_credit(credit: Credit, has_reward: Sequence[bool], can_stop: bool = False) -> None:
    """Tests the user's credit function, if there is one, on the rewards of two chains.

    Args:
        has_reward: by position of the longest chain, whether the role has a reward.
        can_stop: whether chains may be shorter; then the second one is.
    """
    if credit.custom_function is not None:
        rewards = torch.arange(2.0 * len(has_reward), dtype=torch.float64).view(2, -1)
        has_response = torch.ones_like(rewards, dtype=torch.bool)
        if can_stop:
            has_response[1, 1:] = False
        rewards.masked_fill_(~has_response | ~torch.tensor(has_reward), torch.nan)
        if credit.reward_scope == "last":
            rewards = last_agent_rewards(rewards)
        custom_rewards(credit, rewards, has_response)


def assign_part_credit(
    rows: Mapping[str, Rows], credit: Credit, estimators: Mapping[str, AdvantageEstimator], weights: Sequence[float]
) -> dict[str, Tensor]:
    """Assigns the credit of each of several reward functions, `task_reward_parts`; see `assign_credit`.

    Args:
        weights: of the functions.

    Returns:
        By policy id the credited rewards of each function, `[B, K]`, fp32; 0 for functions of weight 0, which are only
        metrics, so that a group in which only they differ has zero variance.
    """
    credited = {name: torch.zeros(len(part), len(weights)) for name, part in rows.items()}
    for k in [k for k, weight in enumerate(weights) if weight]:
        part_rows = {name: replace(part, task_rewards=_reward_part(part, k)) for name, part in rows.items()}
        for name, rewards in assign_credit(part_rows, credit, estimators).items():
            credited[name][:, k] = rewards
    return credited


def _reward_part(rows: Rows, k: int) -> Tensor:
    parts = rows.task_reward_parts  # a policy whose roles have no reward lacks them
    return torch.full_like(rows.task_rewards, torch.nan) if parts is None else parts[:, k]


def assign_credit(
    rows: Mapping[str, Rows], credit: Credit, estimators: Mapping[str, AdvantageEstimator]
) -> dict[str, Tensor]:
    """Joins the rows of all policies by chain and computes the reward that each row trains on.

    Args:
        rows: rows by policy id. Together they hold every response of every chain once. Positions without a row are
            missing. With `credit=chain` the rows must be scored.
        estimators: advantage estimators by policy id; with `credit=chain` they supply V and G. Frozen models have none:
            their rewards stand for both.

    Returns:
        By policy id the rewards, `[B]`, fp32.

    Raises:
        CreditError: a custom credit function cannot be used.
    """
    if any(part.turns is not None for part in rows.values()):
        return {name: turn_rewards(part, credit, estimators.get(name)).float() for name, part in rows.items()}
    columns = ((part.chains, part.positions, part.task_rewards) for part in rows.values())
    chains, positions, rewards = map(torch.cat, zip(*columns, strict=True))
    agents = len(credit.stages) or 1 + int(positions.max())
    task_rewards = torch.full((int(chains.max()) + 1, agents), torch.nan, dtype=torch.float64)
    task_rewards[chains, positions] = rewards
    has_response = torch.zeros_like(task_rewards, dtype=torch.bool)
    has_response[chains, positions] = True

    def value_and_return(position: int, rewards: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.full((2, len(rewards)), torch.nan, dtype=torch.float64)
        for policy_id, policy_rows in rows.items():
            part = policy_rows.at_position(position)
            if policy_id not in estimators:
                joined[:, part.chains] = rewards[part.chains]
            elif len(part):
                estimates = estimators[policy_id].value_and_return(part, rewards[part.chains].float())
                joined[:, part.chains] = torch.stack(estimates).double()
        return joined[0], joined[1]

    if credit.reward_scope == "last":
        task_rewards = last_agent_rewards(task_rewards)
    if credit.credit == "sum":
        rewards = collective_rewards(task_rewards, credit.partner_reward, credit.stages)
    elif credit.custom_function is not None:
        rewards = custom_rewards(credit, task_rewards, has_response)
    else:
        rewards = chain_rewards(task_rewards, value_and_return, credit.chain_gamma, credit.chain_lam, credit.stages)
    return {policy_id: rewards[part.chains, part.positions].float() for policy_id, part in rows.items()}
