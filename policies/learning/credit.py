"""What each agent of a chain is paid, from the task rewards of all: pure functions.

`C` chains, `n` positions in them, 0 the pioneer's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from policies.learning.rows import Rows


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


def pay(rows: Mapping[str, Rows], partner_reward: float) -> dict[str, Tensor]:
    """Joins the rows of all LLMs by chain, and returns what each row is paid.

    Args:
        rows: by LLM; of their columns `chains` and `positions`, which together hold every position of every chain once,
            and `task_rewards`.
        partner_reward: as in `collective`.

    Returns:
        By LLM `[B]`, fp32.
    """
    at = torch.cat([torch.stack([each["chains"], each["positions"]]) for each in rows.values()], dim=1)
    chains, positions = at.unbind()
    task_rewards = torch.zeros(int(chains.max()) + 1, int(positions.max()) + 1, dtype=torch.float64)
    task_rewards[chains, positions] = torch.cat([each["task_rewards"] for each in rows.values()])
    paid = collective(task_rewards, partner_reward)
    return {name: paid[each["chains"], each["positions"]].float() for name, each in rows.items()}
