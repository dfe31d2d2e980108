"""What each agent of a chain is paid, from the task rewards of all: pure functions, and those that users bring along.

`C` chains, `n` positions in them, 0 the pioneer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from policies.learning.estimation import Estimation
from policies.learning.hyperparameters import Credit
from policies.learning.rows import Rows, at_position


class CreditError(ValueError):
    """A credit scheme of the user's cannot be used; the message says why."""


def collective(task_rewards: Tensor, partner_reward: float) -> Tensor:
    """The paper's sum (§2, collective reward): r_i + α · Σ_{j≠i} r_j.

    Args:
        task_rewards: `[C, n]`, float64.
        partner_reward: α; 1 cooperative as in the paper, 0 independent, -1 competitive.

    Returns:
        `[C, n]`, float64.
    """
    agents = task_rewards.shape[1]
    weights = torch.full((agents, agents), partner_reward, dtype=task_rewards.dtype).fill_diagonal_(1.0)
    return task_rewards @ weights


def last_alone(task_rewards: Tensor) -> Tensor:
    """A team's reward: that of the chain's last answer, and 0 for those before it.

    Args:
        task_rewards: `[C, n]`.

    Returns:
        `[C, n]`.
    """
    kept = torch.zeros_like(task_rewards)
    kept[:, -1] = task_rewards[:, -1]
    return kept


def along_chain(
    task_rewards: Tensor,
    outlook: Callable[[int, Tensor], tuple[Tensor, Tensor]],
    chain_gamma: float,
    chain_lam: float,
) -> Tensor:
    """The chain as one trajectory: the tokens of agent 1, then of agent 2, …, with r_i at the last token of agent i.

    What comes after agent i's last token is worth γ_c · ((1 − λ_c) · V_{i+1} + λ_c · G_{i+1}): V_{i+1} is the next
    agent's critic before its first token, G_{i+1} its return from there, which holds what comes after it in turn. Paid
    at the last token, that makes generalised advantage estimation within agent i's response one over the rest of the
    chain, with γ_c and λ_c where agents meet. γ_c = 0 is the own reward alone; γ_c = 1 is the reward to go with
    λ_c = 1, and r_i + V_{i+1} with λ_c = 0.

    Args:
        task_rewards: `[C, n]`, float64.
        outlook: of a position, and of what it is paid in each chain `[C]`: V and G of each chain, `[C]` each.
        chain_gamma: γ_c, discount from an agent to the next.
        chain_lam: λ_c.

    Returns:
        `[C, n]`, float64.
    """
    paid = task_rewards.clone()
    for position in range(task_rewards.shape[1] - 1, 0, -1):
        value, to_go = outlook(position, paid[:, position])
        paid[:, position - 1] += chain_gamma * ((1.0 - chain_lam) * value + chain_lam * to_go)
    return paid


def by_own_scheme(credit: Credit, task_rewards: Tensor) -> Tensor:
    """A user's scheme: a function that is called with `task_rewards` and returns what each response is paid.

    Args:
        credit: with the function, and its name.
        task_rewards: `[C, n]`, float64.

    Returns:
        `[C, n]`, float64.

    Raises:
        CreditError: it raised, or returned anything but as many finite numbers.
    """
    assert credit.own is not None
    try:
        paid = torch.as_tensor(credit.own(task_rewards.clone()), dtype=torch.float64).clone()  # it may be expanded
    except Exception as error:
        raise CreditError(f"The credit {credit.credit} raised {type(error).__name__}: {error}") from error
    if paid.shape != task_rewards.shape:
        raise CreditError(
            f"The credit {credit.credit} returned {tuple(paid.shape)} for task rewards of {tuple(task_rewards.shape)} "
            "(chains, agents). Let it return what each response is paid, in the same places."
        )
    if not paid.isfinite().all():
        raise CreditError(f"The credit {credit.credit} returned NaN or infinity. Let it return finite numbers.")
    return paid


def check_scheme(credit: Credit, agents: int) -> None:
    """Tries a user's scheme, if there is one, on the rewards of two chains.

    Raises:
        CreditError: it cannot be used.
    """
    if credit.own is not None:
        by_own_scheme(credit, torch.arange(2.0 * agents, dtype=torch.float64).view(2, agents))


def assign_credit(rows: Mapping[str, Rows], credit: Credit, estimations: Mapping[str, Estimation]) -> dict[str, Tensor]:
    """Joins the rows of all LLMs by chain, and returns what each row is paid.

    Args:
        rows: by LLM; of their columns `task_rewards`, `chains`, `forks` and `positions`. Together they hold every later
            position of every chain once, and every response of a pioneer once, which several chains may have in common.
            For credit along the chain they are scored.
        credit: who is paid for what.
        estimations: by LLM; asked for the outlook of its responses, for credit along the chain.

    Returns:
        By LLM `[B]`, fp32; a pioneer's pay is the mean over the chains that go on from its response.

    Raises:
        CreditError: a scheme of the user's own cannot be used.
    """
    names = ("chains", "forks", "positions", "task_rewards")
    chains, fork, positions, rewards = (torch.cat([each[name] for each in rows.values()]) for name in names)
    task_rewards = torch.zeros(int(chains.max()) + 1, int(positions.max()) + 1, dtype=torch.float64)
    task_rewards[chains, positions] = rewards
    forks = torch.empty(len(task_rewards), dtype=torch.int64)
    forks[chains] = fork
    task_rewards[:, 0] = task_rewards[forks, 0]

    def joined(position: int, paid: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.zeros(2, len(paid), dtype=torch.float64)
        for name, each in rows.items():
            part = at_position(each, position)
            if len(chains := part["chains"]):
                found[:, chains] = torch.stack(estimations[name].value_and_return(part, paid[chains].float())).double()
        return found[0], found[1]

    if credit.reward_scope == "last":
        task_rewards = last_alone(task_rewards)
    if credit.credit == "sum":
        paid = collective(task_rewards, credit.partner_reward)
    elif credit.own is not None:
        paid = by_own_scheme(credit, task_rewards)
    else:
        paid = along_chain(task_rewards, joined, credit.chain_gamma, credit.chain_lam)
    paid[:, 0] = (torch.zeros_like(paid[:, 0]).index_add(0, forks, paid[:, 0]) / forks.bincount(minlength=len(paid)))[
        forks
    ]
    return {name: paid[each["chains"], each["positions"]].float() for name, each in rows.items()}
