"""Critic-free advantage estimators, against numbers computed by hand."""

from __future__ import annotations

import pytest
import torch

from policies.learning import advantages

SCORES = torch.tensor([1.0, 5.0, 2.0, 4.0, 3.0, 6.0])
QUERIES = torch.tensor([7, 2, 7, 9, 2, 7])  # scores by group: (1, 2, 6), (5, 3) and (4)


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    expected = [1 - (2 + 6) / 2, 5 - 3, 2 - (1 + 6) / 2, 0.0, 3 - 5, 6 - (1 + 2) / 2]
    assert advantages.rloo(SCORES, QUERIES).tolist() == pytest.approx(expected)


def test_dr_grpo_compares_with_the_mean_of_all() -> None:
    assert advantages.dr_grpo(SCORES, QUERIES).tolist() == pytest.approx([-2.0, 1.0, -1.0, 0.0, -1.0, 3.0])


def test_grpo_also_divides_by_the_groups_unbiased_standard_deviation() -> None:
    first, second = 7**0.5 + 1e-4, 2**0.5 + 1e-4  # (4 + 1 + 9) / 2 and (1 + 1) / 1
    expected = [-2 / first, 1 / second, -1 / first, 0.0, -1 / second, 3 / first]
    assert advantages.grpo(SCORES, QUERIES).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", advantages.GROUP_ESTIMATORS.values(), ids=list(advantages.GROUP_ESTIMATORS))
def test_a_group_of_equal_scores_gets_zero_advantage(estimator: advantages.GroupEstimator) -> None:
    scores, queries = torch.tensor([0.1, 0.1, 0.1, 8.0]), torch.tensor([1, 1, 1, 3])
    assert estimator(scores, queries).tolist() == [0.0] * 4


@pytest.mark.parametrize("estimator", advantages.GROUP_ESTIMATORS.values(), ids=list(advantages.GROUP_ESTIMATORS))
def test_rewards_that_differ_by_rounding_alone_are_equal(estimator: advantages.GroupEstimator) -> None:
    rewards = torch.tensor([300.0, 300.0001, 300.0, 300.01, 0.3, 0.1 + 0.2], dtype=torch.float64)  # limits 3e-4, 3e-7
    queries = torch.tensor([1, 1, 2, 2, 3, 3])
    result = estimator(rewards, queries)
    assert result[[0, 1, 4, 5]].tolist() == [0.0] * 4 and (result[2:4] != 0).all()
    assert advantages.has_nonzero_std(rewards, queries).tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize("estimator", advantages.GROUP_ESTIMATORS.values(), ids=list(advantages.GROUP_ESTIMATORS))
def test_a_constant_added_to_all_rewards_of_a_query_changes_no_advantage(estimator: advantages.GroupEstimator) -> None:
    easier = SCORES + 100.0 * (QUERIES == 7)
    torch.testing.assert_close(estimator(easier, QUERIES), estimator(SCORES, QUERIES))


def test_gdpo_normalizes_each_reward_apart_and_whitens_their_sum() -> None:
    rewards = torch.tensor([[0.0, 100.0], [1.0, 100.0], [2.0, 400.0], [5.0, 7.0], [5.0, 7.0]])
    groups, lengths = torch.tensor([1, 1, 1, 2, 2]), torch.tensor([2, 1, 2, 1, 1])
    mask = (torch.arange(2) < lengths.unsqueeze(1)).float()
    # the first reward: -1, 0, 1 over std 1; the second: -100, -100, 200 over std 173.2, times 0.5; then 0, 0
    second = 100 / 30000**0.5
    totals = [-1 - 0.5 * second, -0.5 * second, 1 + second]
    tokens = torch.tensor([totals[0], totals[0], totals[1], totals[2], totals[2], 0.0, 0.0])
    whitened = ((tokens - tokens.mean()) / tokens.std()).tolist()
    expected = [[whitened[0]] * 2, [whitened[2], 0.0], [whitened[3]] * 2, [0.0, 0.0], [0.0, 0.0]]
    result = advantages.gdpo(rewards, groups, [1.0, 0.5], mask)
    torch.testing.assert_close(result, torch.tensor(expected), rtol=2e-4, atol=2e-4)
    assert not result[3:].any()  # exactly, though the batch's mean is not 0
    assert advantages.has_nonzero_std(rewards, groups).tolist() == [True] * 3 + [False] * 2


def test_gdpo_has_one_advantage_per_response_as_gspo_requires() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, mask = torch.randn(8, 3, generator=generator), (torch.rand(8, 5, generator=generator) < 0.7).float()
    result = advantages.gdpo(rewards, torch.arange(8) // 4, [1.0, 0.5, -2.0], mask)
    per_response = result.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(result, per_response * mask)


def test_gdpo_ignores_a_reward_of_weight_0() -> None:
    rewards = torch.tensor([[0.0, 3.0], [1.0, 3.0], [5.0, 7.0], [5.0, 8.0]])  # a metric alone differs in group 2
    groups, mask = torch.tensor([1, 1, 2, 2]), torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    result = advantages.gdpo(rewards, groups, [1.0, 0.0], mask)
    assert not result[2:].any() and result[:2, 0].all()
    assert result.tolist() == advantages.gdpo(rewards[:, :1], groups, [1.0], mask).tolist()


def test_reinforce_whitens_the_reward_to_go_over_all_tokens_of_the_batch() -> None:
    rewards, mask = torch.tensor([[1.0, 2.0], [3.0, 9.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    result = advantages.reinforce(rewards, mask, gamma=0.5)
    # reward-to-go: 1 + 2 / 2, 2 and 3; mean 7/3, variance (1/9 + 1/9 + 4/9) / 2
    std = (1 / 3) ** 0.5
    expected = torch.tensor([[-1 / 3, -1 / 3], [2 / 3, 0.0]]) / std
    torch.testing.assert_close(result, expected)


def test_zero_std_groups_are_those_with_equal_rewards_and_groups_of_one() -> None:
    rewards, groups = torch.tensor([0.1, 2.0, 0.1, 8.0, 2.5]), torch.tensor([1, 5, 1, 3, 5])
    assert advantages.has_nonzero_std(rewards, groups).tolist() == [False, True, False, False, True]
