"""The rewards that agents train on, against numbers computed by hand."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cory_env.functions import SpecError
from policies.learning.credit import (
    CreditError,
    assign_credit,
    assign_part_credit,
    chain_rewards,
    check_custom_credit,
    collective_rewards,
)
from policies.learning.estimation import AdvantageEstimator
from policies.learning.hyperparameters import Credit
from policies.learning.rows import Rows
from tests.paper import paper_credit, paper_hyperparameters, paper_settings
from tests.policies.learning.batches import make_batch


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(1.0, [7.0, 7.0, 7.0]), (0.0, [1.0, 2.0, 4.0]), (-1.0, [-5.0, -3.0, 1.0]), (0.5, [4.0, 4.5, 5.5])],
)
def test_the_sum_is_the_own_reward_plus_a_share_of_all_others(alpha: float, expected: list[float]) -> None:
    rewards = collective_rewards(torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]], dtype=torch.float64), alpha)
    assert rewards.tolist() == [expected, [0.0, 0.0, 0.0]] and rewards.dtype == torch.float64


def test_a_single_agent_gets_its_own_reward_whatever_the_share() -> None:
    assert collective_rewards(torch.tensor([[3.0]], dtype=torch.float64), 1.0).tolist() == [[3.0]]


def rows(chains: list[int], positions: list[int], task_rewards: list[float]) -> Rows:
    return make_batch(
        chains=torch.tensor(chains),
        positions=torch.tensor(positions),
        task_rewards=torch.tensor(task_rewards, dtype=torch.float64),
    )


def test_rows_are_joined_by_chain_whichever_policy_had_which_role() -> None:
    rewards = assign_credit(
        {
            "llm_1": rows([2, 0, 1], [1, 0, 0], [4.0, 1.0, 2.0]),  # not in the order of the chains
            "llm_2": rows([0, 1, 2], [1, 1, 0], [10.0, 20.0, 40.0]),
        },
        paper_credit(partner_reward=0.5),
        {},
    )
    assert rewards["llm_1"].tolist() == [4 + 20, 1 + 5, 2 + 10]
    assert rewards["llm_2"].tolist() == [10 + 0.5, 20 + 1, 40 + 2]
    assert rewards["llm_1"].dtype == torch.float32


def test_one_policy_may_have_several_rows_of_a_chain() -> None:
    rewards = assign_credit({"llm_1": rows([0, 0, 1, 1], [0, 1, 0, 1], [1.0, 2.0, 3.0, 4.0])}, paper_credit(), {})
    assert rewards["llm_1"].tolist() == [3.0, 3.0, 7.0, 7.0]


def test_credit_of_several_reward_functions_is_assigned_to_each_apart() -> None:
    parts = torch.tensor([[1.0, 7.0], [5.0, 8.0]]).double()
    pioneers = replace(rows([0, 1], [0, 0], [8.0, 13.0]), task_reward_parts=parts)
    observers = rows([0, 1], [1, 1], [math.nan] * 2)  # a role without a reward
    by_policy = {"llm_1": pioneers, "llm_2": observers}
    rewards = assign_part_credit(by_policy, paper_credit(partner_reward=0.5), {}, (1.0, 0.5))
    assert rewards["llm_1"].tolist() == [[1.0, 7.0], [5.0, 8.0]]
    assert rewards["llm_2"].tolist() == [[0.5, 3.5], [2.5, 4.0]]
    rewards = assign_part_credit(by_policy, paper_credit(partner_reward=0.5), {}, (0.0, 0.5))
    assert rewards["llm_1"].tolist() == [[0.0, 7.0], [0.0, 8.0]]


def rewards_of_two_chains(chain_gamma: float, chain_lam: float) -> list[list[float]]:
    """Two chains of three agents: V is 10 and 20 for the later agents, and their G is their reward minus 0.5."""
    values = {1: 10.0, 2: 20.0}
    task_rewards = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, -1.0]], dtype=torch.float64)
    rewards = chain_rewards(
        task_rewards,
        lambda position, rewards: (torch.full_like(rewards, values[position]), rewards - 0.5),
        chain_gamma,
        chain_lam,
    )
    assert task_rewards.tolist() == [[1.0, 2.0, 4.0], [3.0, 0.0, -1.0]]  # the argument is unchanged
    return [[round(x, 9) for x in row] for row in rewards.tolist()]


def test_chain_credit_spans_own_reward_reward_to_go_and_bootstrapped_value() -> None:
    assert rewards_of_two_chains(0.0, 1.0) == rewards_of_two_chains(0.0, 0.3) == [[1.0, 2.0, 4.0], [3.0, 0.0, -1.0]]
    # The last agent's G is 3.5 and -1.5, so the second's R is 5.5 and -1.5, and its G 5 and -2.
    assert rewards_of_two_chains(1.0, 1.0) == [[6.0, 5.5, 4.0], [1.0, -1.5, -1.0]]
    assert rewards_of_two_chains(1.0, 0.0) == [[11.0, 22.0, 4.0], [13.0, 20.0, -1.0]]
    # 2 + 0.5 (0.75 * 20 + 0.25 * 3.5) = 9.9375; 1 + 0.5 (0.75 * 10 + 0.25 * 9.4375) = 5.9296875.
    assert rewards_of_two_chains(0.5, 0.25)[0] == [5.9296875, 9.9375, 4.0]


def scored(columns: Rows, values: float) -> Rows:
    """Two tokens per response (in odd chains the second is padding) and a KL of 0.1 nats per token."""
    mask = torch.ones(len(columns.chains), 2)
    mask[columns.chains % 2 == 1, 1] = 0.0
    logprobs = torch.full_like(mask, -1.0)
    scores = {"logprobs": logprobs, "reference_logprobs": logprobs - 0.1, "full_kl": mask, "values": mask * values}
    return replace(columns, mask=mask, **scores)


def make_estimators(**hyperparameters: Any) -> dict[str, AdvantageEstimator]:
    h = paper_hyperparameters(kl_coef=2.0, lam=1.0, **hyperparameters)
    return {policy_id: AdvantageEstimator(h) for policy_id in ("llm_1", "llm_2")}


CHAINS = {
    "llm_1": scored(rows([1, 0], [0, 1], [3.0, 5.0]), values=7.0),
    "llm_2": scored(rows([0, 1], [0, 1], [1.0, 2.0]), values=9.0),
}
"""In chain 0 llm_2 is the pioneer, in chain 1 llm_1."""


def test_value_and_return_of_the_next_agent_come_from_the_other_policy() -> None:
    to_go = assign_credit(CHAINS, paper_credit("chain", chain_gamma=1.0, chain_lam=1.0), make_estimators())
    assert to_go["llm_2"].tolist() == pytest.approx([1 + 5 - 2 * 0.2, 2.0])  # two tokens of KL 0.1, times kl_coef 2
    assert to_go["llm_1"].tolist() == pytest.approx([3 + 2 - 2 * 0.1, 5.0])
    expected = assign_credit(CHAINS, paper_credit("chain", chain_gamma=0.5, chain_lam=0.0), make_estimators())
    assert expected["llm_2"].tolist() == pytest.approx([1 + 0.5 * 7, 2.0])
    assert expected["llm_1"].tolist() == pytest.approx([3 + 0.5 * 9, 5.0])


def test_without_a_critic_the_return_is_the_sum_of_rewards() -> None:
    rewards = assign_credit(CHAINS, paper_credit("chain"), make_estimators(advantage="rloo"))
    assert rewards["llm_2"].tolist() == pytest.approx([1 + 5 - 2 * 0.2, 2.0])
    in_loss = assign_credit(CHAINS, paper_credit("chain"), make_estimators(advantage="grpo", kl_estimator="k3"))
    assert in_loss["llm_2"].tolist() == [6.0, 2.0]  # with GRPO the KL is not part of the reward


def test_chain_credit_with_gamma_0_equals_the_sum_with_partner_reward_0() -> None:
    chain = assign_credit(CHAINS, paper_credit("chain", chain_gamma=0.0), make_estimators())
    independent = assign_credit(CHAINS, paper_credit("sum", partner_reward=0.0), make_estimators())
    assert {name: r.tolist() for name, r in chain.items()} == {name: r.tolist() for name, r in independent.items()}


def test_a_team_reward_is_the_last_response_s_and_credit_passes_it_to_the_others() -> None:
    everyone = assign_credit(CHAINS, paper_credit(reward_scope="last"), {})
    assert everyone["llm_2"].tolist() == [5.0, 2.0] and everyone["llm_1"].tolist() == [2.0, 5.0]
    halves = assign_credit(CHAINS, paper_credit(partner_reward=0.5, reward_scope="last"), {})
    assert halves["llm_2"].tolist() == [2.5, 2.0] and halves["llm_1"].tolist() == [1.0, 5.0]
    to_go = assign_credit(CHAINS, paper_credit("chain", reward_scope="last"), make_estimators())
    assert to_go["llm_2"].tolist() == pytest.approx([5 - 2 * 0.2, 2.0])
    assert to_go["llm_1"].tolist() == pytest.approx([2 - 2 * 0.1, 5.0])
    expected = assign_credit(CHAINS, paper_credit("chain", chain_lam=0.0, reward_scope="last"), make_estimators())
    assert expected["llm_2"].tolist() == pytest.approx([7.0, 2.0])  # the observer's V
    assert CHAINS["llm_2"].task_rewards.tolist() == [1.0, 2.0]  # the reported task rewards are unchanged


def test_a_single_agent_is_the_last_one() -> None:
    single = {"llm_1": rows([0, 1], [0, 0], [3.0, 4.0])}
    assert assign_credit(single, paper_credit(reward_scope="last"), {})["llm_1"].tolist() == [3.0, 4.0]


CREDIT_FUNCTIONS = """
def improvement(task_rewards, share="1"):
    rewards = task_rewards.clone()
    rewards[:, 1:] += float(share) * (task_rewards[:, 1:] - task_rewards[:, :-1])
    task_rewards.zero_()
    return rewards

def team(task_rewards):
    return task_rewards.mean(1, keepdim=True).expand_as(task_rewards)

def first_agent(task_rewards):
    return task_rewards[:, 0]

def fails(task_rewards):
    raise KeyError("nobody")

def infinite(task_rewards):
    return task_rewards / 0
"""


def custom_credit(name: str) -> Credit:
    return paper_settings(credit=f"credit_functions:{name}").credit_assignment


def test_a_custom_credit_is_a_function_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "credit_functions.py").write_text(CREDIT_FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    by_policy = {"llm_1": rows([0, 1], [0, 0], [1.0, 2.0]), "llm_2": rows([0, 1], [1, 1], [4.0, 0.0])}
    rewards = assign_credit(by_policy, custom_credit("improvement?share=0.5"), {})
    assert rewards["llm_1"].tolist() == [1.0, 2.0] and rewards["llm_2"].tolist() == [5.5, -1.0]
    last = assign_credit(by_policy, custom_credit("improvement")._replace(reward_scope="last"), {})
    assert last["llm_1"].tolist() == [0.0, 0.0] and last["llm_2"].tolist() == [8.0, 0.0]
    team = assign_credit(by_policy, custom_credit("team"), {})
    assert team["llm_2"].tolist() == [2.5, 1.0]  # although its rows share memory
    check_custom_credit(custom_credit("improvement"), [True] * 3)
    for name, message in (
        ("first_agent", r"returned shape \(2,\) for task rewards of shape \(2, 3\)"),
        ("fails", "raised KeyError: 'nobody'"),
        ("infinite", "returned NaN or infinity"),
    ):
        with pytest.raises(CreditError, match=message):
            check_custom_credit(custom_credit(name), [True] * 3)
    with pytest.raises(SpecError, match=r"has no function 'nowhere'. Correct the credit's name"):
        custom_credit("nowhere")
