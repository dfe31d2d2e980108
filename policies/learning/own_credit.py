"""Credit schemes of the user's own: a function from the task rewards of chains to what each response is paid."""

from __future__ import annotations

import torch
from torch import Tensor

from policies.learning.hyperparameters import Credit


class CreditError(ValueError):
    """A credit scheme of the user's cannot be used; the message says why."""


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
