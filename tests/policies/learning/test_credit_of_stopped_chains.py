"""The rewards that agents train on if chains stopped early, against numbers computed by hand."""

import math
import sys
from pathlib import Path

import pytest
import torch

from policies.learning.credit import (
    CreditError,
    assign_credit,
    check_custom_credit,
    collective_rewards,
    last_agent_rewards,
)
from policies.learning.hyperparameters import Credit
from tests.paper import paper_credit, paper_settings
from tests.policies.learning.test_credit import make_estimators, rows, scored

NAN = math.nan
TASK_REWARDS = torch.tensor([[1.0, NAN, NAN], [2.0, 4.0, NAN], [1.0, 2.0, 8.0]], dtype=torch.float64)
STOPPED = {
    "llm_1": scored(rows([0, 1], [0, 0], [1.0, 2.0]), values=7.0),
    "llm_2": scored(rows([1], [1], [4.0]), values=9.0),
}
"""Chain 0 stopped after its first response, which scores 1; the responses of chain 1 score 2 and 4."""


def assert_equal(rewards: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(rewards, torch.tensor(expected, dtype=torch.float64), equal_nan=True)


def test_the_sum_is_over_the_responses_that_exist() -> None:
    # At positions that a chain lacks there is no row, so the value there has no effect.
    expected = [[1.0, 0.5, 0.5], [2 + 2, 4 + 1, 3.0], [1 + 5, 2 + 4.5, 8 + 1.5]]
    assert_equal(collective_rewards(TASK_REWARDS, 0.5), expected)
    rewards = assign_credit(STOPPED, paper_credit(partner_reward=0.5), {})
    assert rewards["llm_1"].tolist() == [1.0, 4.0] and rewards["llm_2"].tolist() == [5.0]


def test_the_last_reward_is_that_of_the_last_response_given() -> None:
    assert_equal(last_agent_rewards(TASK_REWARDS), [[1.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 8.0]])
    rewards = assign_credit(STOPPED, paper_credit(reward_scope="last"), {})
    assert rewards["llm_1"].tolist() == [1.0, 4.0] and rewards["llm_2"].tolist() == [4.0]


@pytest.mark.parametrize(
    ("credit", "advantage", "expected"),
    [
        (paper_credit("chain", chain_gamma=1.0, chain_lam=1.0), "gae", [1.0, 2 + 4 - 2 * 0.1]),
        (paper_credit("chain", chain_gamma=0.5, chain_lam=0.0), "gae", [1.0, 2 + 0.5 * 9]),  # the observer's V
        (paper_credit("chain"), "rloo", [1.0, 2 + 4 - 2 * 0.1]),
        (paper_credit("chain", reward_scope="last"), "rloo", [1.0, 4 - 2 * 0.1]),
    ],
)
def test_nothing_flows_back_from_positions_that_a_chain_lacks(
    credit: Credit, advantage: str, expected: list[float]
) -> None:
    rewards = assign_credit(STOPPED, credit, make_estimators(advantage=advantage))
    assert rewards["llm_1"].tolist() == pytest.approx(expected) and rewards["llm_2"].tolist() == [4.0]


def test_if_all_chains_stop_at_once_only_the_first_policy_gets_rewards() -> None:
    alone = {"llm_1": STOPPED["llm_1"]}
    for credit in (paper_credit(), paper_credit(reward_scope="last"), paper_credit("chain")):
        assert assign_credit(alone, credit, make_estimators())["llm_1"].tolist() == [1.0, 2.0]


def credit_of(name: str) -> Credit:
    return paper_settings(credit=f"credit_of_stopped:{name}").credit_assignment


CREDIT_FUNCTIONS = """
def team(task_rewards):
    return task_rewards.mean(1, keepdim=True).expand_as(task_rewards)

def careful(task_rewards):
    return task_rewards.nanmean(1, keepdim=True).expand_as(task_rewards)

def shifted(task_rewards):
    assert task_rewards.isnan()[:, 1:].any()
    return task_rewards + 1
"""


def test_a_custom_credit_gets_nan_and_may_return_it_where_there_is_no_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credit_of_stopped.py").write_text(CREDIT_FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    for name, expected in (("careful", ([1.0, 3.0], [3.0])), ("shifted", ([2.0, 3.0], [5.0]))):
        rewards = assign_credit(STOPPED, credit_of(name), {})
        assert (rewards["llm_1"].tolist(), rewards["llm_2"].tolist()) == expected
        check_custom_credit(credit_of(name), [True] * 3, can_stop=True)
    check_custom_credit(credit_of("team"), [True] * 3)
    with pytest.raises(CreditError, match=r"returned NaN or infinity.* use nansum, or mask them"):
        check_custom_credit(credit_of("team"), [True] * 3, can_stop=True)
