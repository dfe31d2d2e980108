"""What agents are paid, against numbers worked out by hand."""

import pytest
import torch

from policies.learning.credit import collective, pay
from policies.learning.rows import Rows


@pytest.mark.parametrize(
    ("alpha", "paid"),
    [(1.0, [7.0, 7.0, 7.0]), (0.0, [1.0, 2.0, 4.0]), (-1.0, [-5.0, -3.0, 1.0]), (0.5, [4.0, 4.5, 5.5])],
)
def test_the_sum_is_the_own_reward_and_a_share_of_all_others(alpha: float, paid: list[float]) -> None:
    found = collective(torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]], dtype=torch.float64), alpha)
    assert found.tolist() == [paid, [0.0, 0.0, 0.0]] and found.dtype == torch.float64


def test_an_agent_alone_is_paid_its_own_reward_whatever_the_share() -> None:
    assert collective(torch.tensor([[3.0]], dtype=torch.float64), 1.0).tolist() == [[3.0]]


def rows(chains: list[int], positions: list[int], task_rewards: list[float]) -> Rows:
    return {
        "chains": torch.tensor(chains),
        "positions": torch.tensor(positions),
        "task_rewards": torch.tensor(task_rewards, dtype=torch.float64),
    }


def test_rows_are_joined_by_chain_whichever_llm_played_which_role() -> None:
    found = pay(
        {
            "llm_1": rows([2, 0, 1], [1, 0, 0], [4.0, 1.0, 2.0]),  # not in the order of the chains
            "llm_2": rows([0, 1, 2], [1, 1, 0], [10.0, 20.0, 40.0]),
        },
        partner_reward=0.5,
    )
    assert found["llm_1"].tolist() == [4 + 20, 1 + 5, 2 + 10]
    assert found["llm_2"].tolist() == [10 + 0.5, 20 + 1, 40 + 2]
    assert found["llm_1"].dtype == torch.float32


def test_one_llm_may_have_several_rows_of_a_chain() -> None:
    found = pay({"llm_1": rows([0, 0, 1, 1], [0, 1, 0, 1], [1.0, 2.0, 3.0, 4.0])}, partner_reward=1.0)
    assert found["llm_1"].tolist() == [3.0, 3.0, 7.0, 7.0]
