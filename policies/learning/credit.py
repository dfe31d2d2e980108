"""Credit assignment: from the task rewards of a chain's agents to the reward that each agent trains on.

Functions on `[C, n]` tensors: `C` chains of up to `n` agents; position 0 is the pioneer. A chain that stopped early
(`stop_when`) lacks its last positions, whose task rewards are NaN. The default is the collective reward of the CORY
paper (Ma et al. 2024, arXiv 2410.06101).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from policies.learning.estimation import AdvantageEstimator
from policies.learning.hyperparameters import Credit
from policies.learning.rows import Rows, select_position


class CreditError(ValueError):
    """A custom credit function cannot be used; the message names the reason."""


def collective_rewards(task_rewards: Tensor, partner_reward: float) -> Tensor:
    """Collective reward (CORY paper §2): r_i + α · Σ_{j≠i} r_j, over the agents that responded.

    Args:
        task_rewards: `[C, n]`, float64, NaN at missing positions.
        partner_reward: α; 1 is cooperative as in the paper, 0 independent, -1 competitive.

    Returns:
        `[C, n]`, float64, NaN at missing positions.
    """
    agents = task_rewards.shape[1]
    weights = torch.full((agents, agents), partner_reward, dtype=task_rewards.dtype).fill_diagonal_(1.0)
    missing = task_rewards.isnan()
    return (task_rewards.masked_fill(missing, 0.0) @ weights).masked_fill(missing, torch.nan)


def last_agent_rewards(task_rewards: Tensor) -> Tensor:
    """Team reward: keeps the task reward of each chain's last response and sets all earlier ones to 0.

    Args:
        task_rewards: `[C, n]`, NaN at missing positions.

    Returns:
        `[C, n]`, NaN at missing positions.
    """
    missing = task_rewards.isnan()
    next_missing = torch.cat([missing[:, 1:], torch.ones_like(missing[:, :1])], dim=1)
    return task_rewards.masked_fill(~next_missing, 0.0)


def chain_rewards(
    task_rewards: Tensor,
    value_and_return: Callable[[int, Tensor], tuple[Tensor, Tensor]],
    chain_gamma: float,
    chain_lam: float,
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

    Args:
        task_rewards: `[C, n]`, float64, NaN at missing positions.
        value_and_return: takes a position and the rewards R `[C]` there; returns V and G, `[C]` each, 0 for chains that
            lack the position.
        chain_gamma: γ_c, the discount from one agent to the next.
        chain_lam: λ_c.

    Returns:
        R, `[C, n]`, float64, NaN at missing positions.
    """
    rewards = task_rewards.clone()
    for position in range(task_rewards.shape[1] - 1, 0, -1):
        value, lambda_return = value_and_return(position, rewards[:, position])
        rewards[:, position - 1] += chain_gamma * ((1.0 - chain_lam) * value + chain_lam * lambda_return)
    return rewards


def custom_rewards(credit: Credit, task_rewards: Tensor) -> Tensor:
    """Calls the user's credit function with `task_rewards` and checks the rewards that it returns.

    Args:
        credit: has the function and its name.
        task_rewards: `[C, n]`, float64, NaN at missing positions.

    Returns:
        `[C, n]`, float64, NaN at missing positions.

    Raises:
        CreditError: the function raised, or did not return finite numbers of the same shape.
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
    missing = task_rewards.isnan()
    if not rewards[~missing].isfinite().all():
        hint = " Positions that a stopped chain lacks are NaN: use nansum, or mask them." if missing.any() else ""
        raise CreditError(f"The credit function {credit.credit} returned NaN or infinity. Return finite numbers.{hint}")
    return rewards.masked_fill(missing, torch.nan)


def check_custom_credit(credit: Credit, agents: int, can_stop: bool = False) -> None:
    """Tests the user's credit function, if there is one, on the rewards of two chains.

    Args:
        credit: has the function.
        agents: of the longest chain.
        can_stop: whether chains may be shorter; then the second one is.

    Raises:
        CreditError: the function cannot be used.
    """
    if credit.custom_function is not None:
        rewards = torch.arange(2.0 * agents, dtype=torch.float64).view(2, agents)
        if can_stop:
            rewards[1, 1:] = torch.nan
        custom_rewards(credit, rewards)


def assign_credit(
    rows: Mapping[str, Rows], credit: Credit, estimators: Mapping[str, AdvantageEstimator]
) -> dict[str, Tensor]:
    """Joins the rows of all policies by chain and computes the reward that each row trains on.

    Several chains may fork from one pioneer response. That response is one row; its reward is the mean over its chains.

    Args:
        rows: rows by policy id, with the columns `task_rewards`, `chains`, `forks`, `positions` and `earlier_rewards`.
            Together they hold every later response of every chain once, and every pioneer response once. Positions
            without a row are missing. With `credit=chain` the rows must be scored.
        credit: the credit settings.
        estimators: advantage estimators by policy id; with `credit=chain` they supply V and G.

    Returns:
        By policy id the rewards, `[B]`, fp32.

    Raises:
        CreditError: a custom credit function cannot be used.
    """
    names = ("chains", "forks", "positions", "task_rewards")
    chains, row_forks, positions, rewards = (torch.cat([columns[name] for columns in rows.values()]) for name in names)
    agents = 1 + max(columns["earlier_rewards"].shape[1] for columns in rows.values())
    task_rewards = torch.full((int(chains.max()) + 1, agents), torch.nan, dtype=torch.float64)
    task_rewards[chains, positions] = rewards
    forks = torch.arange(len(task_rewards))
    forks[chains] = row_forks
    task_rewards[:, 0] = task_rewards[forks, 0]

    def value_and_return(position: int, rewards: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.zeros(2, len(rewards), dtype=torch.float64)
        for policy_id, columns in rows.items():
            part = select_position(columns, position)
            if len(chains := part["chains"]):
                estimator = estimators[policy_id]
                joined[:, chains] = torch.stack(estimator.value_and_return(part, rewards[chains].float())).double()
        return joined[0], joined[1]

    if credit.reward_scope == "last":
        task_rewards = last_agent_rewards(task_rewards)
    if credit.credit == "sum":
        rewards = collective_rewards(task_rewards, credit.partner_reward)
    elif credit.custom_function is not None:
        rewards = custom_rewards(credit, task_rewards)
    else:
        rewards = chain_rewards(task_rewards, value_and_return, credit.chain_gamma, credit.chain_lam)
    fork_sums = torch.zeros_like(rewards[:, 0]).index_add(0, forks, rewards[:, 0])
    rewards[:, 0] = (fork_sums / forks.bincount(minlength=len(rewards)))[forks]
    return {policy_id: rewards[columns["chains"], columns["positions"]].float() for policy_id, columns in rows.items()}
