"""Roles in learning: rewards, groups of drafts, KL coefficients and loss weights, against numbers computed by hand."""

from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import pytest
import torch

from cory_env.chain import Chain
from cory_env.chain_settings import Role, make_positions
from policies.learning.advantages import rloo
from policies.learning.credit import (
    assign_credit,
    chain_rewards,
    check_custom_credit,
    collective_rewards,
    custom_rewards,
)
from policies.learning.estimation import AdvantageEstimator
from policies.learning.hyperparameters import Credit
from policies.learning.metrics import compute_metrics
from policies.learning.rows import Rows
from policies.rllib.token_batch import rows_from_episodes
from policies.rollout.role_mapping import make_mapping
from tests.paper import make_settings, paper_credit, paper_hyperparameters
from tests.policies.learning.batches import make_batch
from tests.policies.learning.test_policy_learner import make_learner, make_row_batch, path
from tests.policies.rllib.test_token_batch import make_episode

__all__ = ["path"]
STAGES = (0, 0, 2, 3)  # two drafts, a critic, a reviser
TASK_REWARDS = [[1.0, 2.0, nan, 8.0], [4.0, 0.0, nan, 16.0]]


def rows_of_team(rewards: list[list[float]]) -> dict[str, Rows]:
    """Drafts and reviser of the first LLM, the critic of the second one."""

    def rows(positions: list[int]) -> Rows:
        pairs = [(chain, position) for chain in range(len(rewards)) for position in positions]
        return make_batch(
            chains=torch.tensor([chain for chain, _ in pairs]),
            positions=torch.tensor([position for _, position in pairs]),
            task_rewards=torch.tensor([rewards[chain][position] for chain, position in pairs], dtype=torch.float64),
        )

    return {"llm_1": rows([0, 1, 3]), "llm_2": rows([2])}


def credited(credit: Credit) -> tuple[list[float], list[float]]:
    rewards = assign_credit(rows_of_team(TASK_REWARDS), credit, {})
    return rewards["llm_1"].tolist(), rewards["llm_2"].tolist()


def test_a_role_without_reward_gets_its_share_of_the_others_and_adds_nothing_to_theirs() -> None:
    team, critic = credited(paper_credit(partner_reward=0.5))
    assert team == [1 + 5, 2 + 4.5, 8 + 1.5, 4 + 8, 0 + 10, 16 + 2]
    assert critic == [5.5, 10]


def test_right_and_wrong_drafts_of_a_chain_have_different_advantages() -> None:
    s = make_settings({"roles": [{"name": "solver", "count": 4}], "backend": "transformers"})
    assert s.credit_assignment.credit == "sum" and s.partner_reward == 1.0
    own = [1.0, 0.0, 0.0, 1.0]
    drafts = make_batch(positions=torch.arange(4), task_rewards=torch.tensor(own, dtype=torch.float64))
    rewards = assign_credit({"llm_1": drafts}, s.credit_assignment, {})["llm_1"]
    assert rewards.tolist() == own
    assert rloo(rewards, torch.zeros(4, dtype=torch.int64)).tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_sum_leaves_out_other_drafts_in_any_chain() -> None:
    random = np.random.default_rng(3)
    for _ in range(40):
        counts = [int(count) for count in random.integers(1, 4, size=random.integers(1, 5))]
        roles = [Role(f"r{k}", count=count) for k, count in enumerate(counts)]
        stages = tuple(position.stage for position in make_positions(roles))
        agents, alpha = len(stages), float(random.choice([-1.0, 0.0, 0.5, 1.0]))
        own = torch.from_numpy(random.integers(-4, 5, size=(3, agents)).astype(float))
        own[torch.from_numpy(random.random((3, agents)) < 0.2)] = nan
        role_of = [k for k, count in enumerate(counts) for _ in range(count)]
        for chain, rewards in enumerate(collective_rewards(own, alpha, stages).tolist()):
            for i in range(agents):
                others = [float(own[chain, j]) for j in range(agents) if role_of[j] != role_of[i]]
                expected = own[chain, i].nan_to_num(0.0) + alpha * sum(r for r in others if r == r)
                assert rewards[i] == expected


def test_with_reward_scope_last_all_get_the_last_rewarded_response() -> None:
    team, critic = credited(paper_credit(reward_scope="last", partner_reward=0.5))
    assert team == [4, 4, 8, 8, 8, 16] and critic == [4, 8]


def rewards_along_chain(chain_gamma: float, chain_lam: float, stages: tuple[int, ...]) -> list[list[float]]:
    """V is 10 and 100 for the critic and the reviser; G is the reward there."""
    return chain_rewards(
        torch.tensor(TASK_REWARDS, dtype=torch.float64),
        lambda position, rewards: (torch.full_like(rewards, {1: 7.0, 2: 10.0, 3: 100.0}[position]), rewards),
        chain_gamma,
        chain_lam,
        stages,
    ).tolist()


def test_drafts_are_credited_for_later_roles_but_not_for_each_other() -> None:
    assert rewards_along_chain(1.0, 1.0, STAGES) == [[9, 10, 8, 8], [20, 16, 16, 16]]
    assert rewards_along_chain(0.5, 1.0, STAGES) == [[1 + 2, 2 + 2, 4, 8], [4 + 4, 0 + 4, 8, 16]]
    assert rewards_along_chain(1.0, 0.0, STAGES) == [[11, 12, 100, 8], [14, 10, 100, 16]]
    assert rewards_along_chain(1.0, 1.0, ()) == [[11, 10, 8, 8], [20, 16, 16, 16]]  # a chain without drafts


def test_the_agent_before_drafts_is_credited_for_their_mean_over_those_that_exist() -> None:
    rewards = chain_rewards(
        torch.tensor([[1.0, 2.0, 6.0], [1.0, 2.0, nan]], dtype=torch.float64),  # the second chain stopped at a draft
        lambda position, rewards: (rewards, torch.where(torch.tensor([True, position == 1]), rewards, torch.nan)),
        1.0,
        1.0,
        (0, 1, 1),
    )
    assert rewards.tolist() == [[5, 2, 6], [3, 2, 0]]


def test_credit_knows_the_stages_of_a_run() -> None:
    s = make_settings({"roles": [{"name": "a", "count": 2}, {"name": "b"}], "backend": "transformers"})
    assert s.credit_assignment.stages == (0, 0, 2)


def test_a_custom_function_gets_nan_for_roles_without_reward_and_is_tested_with_it() -> None:
    def improvement(rewards: torch.Tensor) -> torch.Tensor:
        return rewards.nan_to_num(0.0)

    def forgetful(rewards: torch.Tensor) -> torch.Tensor:
        return rewards.sum(1, keepdim=True).expand_as(rewards)

    own, has_reward = paper_credit("m:f", custom_function=improvement), [True, True, False, True]
    check_custom_credit(own, has_reward)
    rewards = torch.tensor(TASK_REWARDS, dtype=torch.float64)
    result = custom_rewards(own, rewards, torch.ones_like(rewards, dtype=torch.bool))
    assert result.tolist() == [[1, 2, 0, 8], [4, 0, 0, 16]]
    with pytest.raises(ValueError, match="Task rewards are NaN without a reward: use nansum"):
        check_custom_credit(paper_credit("m:f", custom_function=forgetful), has_reward)
    check_custom_credit(paper_credit("m:f", custom_function=forgetful), [True] * 4)
    check_custom_credit(paper_credit("m:f", reward_scope="last", custom_function=forgetful), has_reward)  # 0


def role_rows(rewards: list[float], query: int = 0, sample: int = 0) -> tuple[Chain, Any]:
    roles = [
        {"name": "solver", "count": 2, "policy": "llm_1"},
        {"name": "critic", "produces_response": False, "policy": "llm_2"},
        {"name": "reviser", "policy": "llm_1"},
    ]
    s = make_settings({"roles": roles, "backend": "transformers", "max_prompt_tokens": 128})
    chain = s.make_chain(s.make_task(), s.make_tokenizers())
    return chain, make_episode(chain, make_mapping(s), query, [[5], [6], [7], [8]], rewards, sample)[1]


def test_drafts_of_a_query_are_one_group_and_other_roles_have_their_own() -> None:
    episodes = [role_rows([1.0, 2.0, nan, 4.0], query, sample)[1] for query in (0, 1) for sample in (0, 1)]
    rows = rows_from_episodes(episodes)
    by_position = {
        position: rows["llm_1"].groups[rows["llm_1"].positions == position].tolist() for position in (0, 1, 3)
    }
    assert by_position[0] == by_position[1] and len(set(by_position[0])) == 2  # a group per query
    assert not set(by_position[0]) & set(by_position[3]) and len(set(by_position[3])) == 2
    assert rows["llm_2"].task_rewards.isnan().all()


def test_rloo_compares_each_draft_with_all_other_drafts_of_the_query() -> None:
    estimator = AdvantageEstimator(paper_hyperparameters(advantage="rloo", kl_coef=0.0))
    rows = make_batch(positions=torch.tensor([0, 1, 0, 1]))  # two drafts in each of two generations, one group
    columns, _ = estimator.estimate(rows, torch.tensor([1.0, 2.0, 3.0, 6.0]))
    expected = [1 - 11 / 3, 2 - 10 / 3, 3 - 3.0, 6 - 2.0]
    torch.testing.assert_close(columns.advantages.squeeze(1), torch.tensor(expected))


def test_metrics_of_a_role_without_reward_are_nan_and_do_not_change_those_of_its_llm(path: str) -> None:
    learner = make_learner(path, "full")
    task_rewards = torch.tensor([1.0, nan, 3.0, nan, 5.0, nan], dtype=torch.float64)
    rows = replace(make_row_batch().with_scores(learner.score(make_row_batch())), task_rewards=task_rewards)
    metrics = compute_metrics(rows, 0.0)
    assert metrics["task_reward"] == 3.0 and metrics["task_reward_std"] == pytest.approx((8 / 3) ** 0.5)
    alone = compute_metrics(rows.select(torch.tensor([1, 3, 5])), 0.0)
    assert all(alone[name] != alone[name] for name in ("task_reward", "combined_reward", "task_reward_std"))
    assert alone["response_length"] == pytest.approx((8 + 5 + 7) / 3)
