"""Advantages of a batch, against numbers computed from its rewards and log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from policies.learning import token_ppo
from policies.learning.credit import assign_part_credit
from policies.learning.estimation import AdvantageEstimator, RewardMoments
from policies.learning.rows import TrainRows, make_rows
from tests.paper import paper_credit, paper_hyperparameters
from tests.policies.learning.batches import make_batch

LENGTHS = [2, 5, 3, 1, 4, 6]
SCORES = [3.0, 1.0, 8.0, 5.0, 5.0, 2.0]
"""Scores of three responses to each of two queries."""


def make_estimator(**hyperparameters: Any) -> AdvantageEstimator:
    return AdvantageEstimator(paper_hyperparameters(**{"kl_coef": 0.5, **hyperparameters}))


def scored(scores: list[float] = SCORES) -> TrainRows:
    """Rows whose log-probabilities differ from the reference's, as a learner scores them."""
    count = len(scores)
    tokens = [[1] * length for length in LENGTHS[:count]]
    rows = make_rows([[1]] * count, tokens, [[0.0] * length for length in LENGTHS[:count]], scores, [False] * count)
    random, mask = torch.Generator().manual_seed(0), rows.mask
    noise = [torch.randn(mask.shape, generator=random) * mask for _ in range(4)]
    return make_batch(
        **rows.columns()
        | {
            "groups": torch.tensor([4, 4, 4, 2, 2, 2][:count]),
            "rewards": torch.tensor(scores),
            "logprobs": noise[0] - 2.0 * mask,
            "reference_logprobs": noise[0] - 2.0 * mask - 0.3 * noise[1],
            "full_kl": noise[2].abs(),
            "values": noise[3],
        }
    )


def kl_to_go(rows: TrainRows, row: int) -> list[float]:
    """The k1 estimate of one response, summed from each token to the last."""
    kl = (rows.logprobs - rows.columns()["reference_logprobs"])[row].tolist()
    return [sum(kl[step : LENGTHS[row]]) for step in range(LENGTHS[row])]


def leave_one_out(totals: list[float]) -> list[float]:
    return [total - (sum(totals) - total) / (len(totals) - 1) for total in totals]


def test_the_overlong_penalty_lowers_a_responses_own_reward_by_its_roles_limit() -> None:
    limits: dict[str, Any] = {"overlong": "penalty", "overlong_buffer": 3, "response_limits": (6, 5)}
    rows = replace(scored(), positions=torch.tensor([0, 0, 0, 0, 0, 1]))
    expected = [0.0, -2 * 2 / 3, 0.0, 0.0, -2 * 1 / 3, -2.0]  # lengths 2, 5, 3, 1, 4, and 6 with a limit of 5
    plain, plain_metrics = make_estimator(advantage="rloo").estimate(rows, rows.rewards)
    estimates, metrics = make_estimator(advantage="rloo", overlong_penalty=2.0, **limits).estimate(rows, rows.rewards)
    assert estimates.rewards.tolist() == pytest.approx([score + p for score, p in zip(SCORES, expected, strict=True)])
    assert torch.equal(plain.rewards, rows.rewards) and "overlong_penalty" not in plain_metrics
    assert metrics["overlong_penalty"] == pytest.approx(sum(expected) / 6)
    changes = (estimates.advantages - plain.advantages)[:, 0].tolist()
    assert changes == pytest.approx(leave_one_out(expected[:3]) + leave_one_out(expected[3:]), abs=1e-6)


def test_a_group_in_which_only_a_reward_of_weight_0_differs_has_zero_variance() -> None:
    chains = torch.arange(6)
    metric = torch.tensor(SCORES, dtype=torch.float64)
    parts = torch.stack([metric * (chains < 3), metric], 1)  # in the second group, only the second reward differs
    rows = replace(scored(), chains=chains, task_reward_parts=parts)
    for weights, share in (((1.0, 0.0), 0.5), ((0.0, 1.0), 0.0), ((0.0, 0.0), 1.0)):
        credited = assign_part_credit({"llm_1": rows}, paper_credit(), {}, weights)["llm_1"]
        estimator = make_estimator(advantage="gdpo", gdpo_weights=weights)
        estimates, metrics = estimator.estimate(rows, rows.rewards, credited)
        assert metrics["frac_zero_std"] == share
        assert int(estimates.advantages.any(1).sum()) == 6 * (1 - share)


def test_with_the_kl_in_the_reward_a_zero_variance_group_compares_its_kl_penalties_alone() -> None:
    rows = scored([5.0] * 6)
    estimates, metrics = make_estimator(advantage="rloo", kl_coef=0.5).estimate(rows, rows.rewards)
    penalties = [-0.5 * kl_to_go(rows, row)[0] for row in range(6)]
    expected = leave_one_out(penalties[:3]) + leave_one_out(penalties[3:])
    assert estimates.advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert metrics["frac_zero_std"] == 1.0 and estimates.advantages[:, 0].abs().min() > 0
    without_kl, _ = make_estimator(advantage="rloo", kl_coef=0.0).estimate(rows, rows.rewards)
    in_loss, _ = make_estimator(advantage="dr_grpo", kl_coef=0.5, kl_estimator="k3").estimate(rows, rows.rewards)
    assert not without_kl.advantages.any() and not in_loss.advantages.any()


def test_without_the_reference_there_is_no_penalty() -> None:
    rows = replace(scored(), reference_logprobs=None, full_kl=None)
    estimates, _ = make_estimator(advantage="rloo", kl_coef=0.0).estimate(rows, rows.rewards)
    expected, _ = make_estimator(advantage="rloo", kl_coef=0.0).estimate(scored(), scored().rewards)
    assert torch.equal(estimates.advantages, expected.advantages) and not estimates.kl.any()


@pytest.mark.parametrize("estimator", ["full", "k1", "k3"])
def test_with_a_critic_advantages_are_whitened_gae_and_the_kl_is_in_the_reward(estimator: str) -> None:
    rows = scored()
    estimates, metrics = make_estimator(kl_estimator=estimator, gamma=0.9, lam=0.8).estimate(rows, rows.rewards)
    mask, log_ratio = rows.mask, rows.logprobs - rows.columns()["reference_logprobs"]
    kl = {"full": rows.columns()["full_kl"], "k1": log_ratio, "k3": torch.expm1(-log_ratio) + log_ratio}[
        estimator
    ] * mask
    torch.testing.assert_close(estimates.kl, kl)
    rewards = token_ppo.token_rewards(rows.rewards, kl, mask, 0.5)
    advantages, returns = token_ppo.gae(rewards, rows.columns()["values"], mask, 0.9, 0.8)
    torch.testing.assert_close(estimates.returns, returns)
    valid = advantages[mask.bool()]
    torch.testing.assert_close(estimates.advantages[mask.bool()], (valid - valid.mean()) / valid.std())
    assert (estimates.advantages * (1 - mask) == 0).all()
    assert metrics == {"kl_coef": 0.5, "credited_reward": pytest.approx(sum(SCORES) / 6)}


def test_rloo_subtracts_the_mean_of_the_other_responses_to_the_query_from_reward_minus_kl() -> None:
    rows = scored()
    estimates, _ = make_estimator(advantage="rloo").estimate(rows, rows.rewards)
    totals = [score - 0.5 * kl_to_go(rows, row)[0] for row, score in enumerate(SCORES)]
    assert max(abs(total - score) for total, score in zip(totals, SCORES, strict=True)) > 1e-2
    expected = torch.tensor(leave_one_out(totals[:3]) + leave_one_out(totals[3:])).unsqueeze(1) * rows.mask
    torch.testing.assert_close(estimates.advantages, expected, rtol=1e-4, atol=1e-4)


def test_reinforce_whitens_the_score_minus_the_kl_to_go_over_all_tokens() -> None:
    rows = scored()
    estimates, metrics = make_estimator(advantage="reinforce").estimate(rows, rows.rewards)
    reward_to_go = [score - 0.5 * kl for row, score in enumerate(SCORES) for kl in kl_to_go(rows, row)]
    expected = torch.tensor(reward_to_go)
    expected = (expected - expected.mean()) / expected.std()
    torch.testing.assert_close(estimates.advantages[rows.mask.bool()], expected, rtol=1e-4, atol=1e-4)
    assert estimates.returns is None and metrics.keys() == {"kl_coef", "credited_reward"}


@pytest.mark.parametrize(("advantage", "stds"), [("grpo", (13**0.5, 3**0.5)), ("dr_grpo", (1.0, 1.0))])
def test_grpo_compares_scores_without_the_kl(advantage: str, stds: tuple[float, float]) -> None:
    rows = scored()
    estimates, _ = make_estimator(advantage=advantage, kl_estimator="k3").estimate(rows, rows.rewards)
    expected = [*(x / stds[0] for x in (-1, -3, 4)), *(x / stds[1] for x in (1, 1, -2))]
    torch.testing.assert_close(
        estimates.advantages, torch.tensor(expected).unsqueeze(1) * rows.mask, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("advantage", ["rloo", "grpo", "dr_grpo"])
def test_a_failed_reward_leaves_a_smaller_group_and_a_group_of_one_gets_zero_advantage(
    advantage: str,
) -> None:
    estimates, _ = make_estimator(advantage=advantage, kl_coef=0.0).estimate(
        scored(SCORES[:4]), torch.tensor(SCORES[:4])
    )
    scale = {"rloo": 3 / 2, "grpo": 13**-0.5, "dr_grpo": 1.0}[advantage]
    assert estimates.advantages[:, 0].tolist() == pytest.approx([-1 * scale, -3 * scale, 4 * scale, 0.0], rel=1e-3)


@pytest.mark.parametrize("target", [0.6, None])
def test_the_kl_coefficient_follows_the_measured_kl_only_with_a_target(target: float | None) -> None:
    estimator = make_estimator(kl_target=target, kl_horizon=40)
    for _ in range(2):
        before, kl = estimator.kl_coef, estimator.estimate(scored(), scored().rewards)[0].kl
        estimator.update_kl_coef(kl)
        adapted = token_ppo.adapt_kl_coef(before, float(kl.sum()) / 6, 0.6, batch=6, horizon=40)
        assert adapted != pytest.approx(before)
        assert estimator.kl_coef == (0.5 if target is None else adapted)


def test_reward_scaling_changes_the_returns_but_not_the_reported_reward() -> None:
    rows, without_kl = scored([-1.0, 3.0, 7.0, 11.0]), {"kl_coef": 0.0, "lam": 1.0}  # std sqrt(80 / 3), mean 5
    returns, means = {}, set()
    for mode in ("none", "scale", "normalize"):
        estimates, metrics = make_estimator(**without_kl, reward_scaling=mode).estimate(rows, rows.rewards)
        returns[mode] = estimates.columns()["returns"][:, 0]
        means.add(metrics["credited_reward"])
    assert means == {5.0}
    torch.testing.assert_close(returns["none"], rows.rewards)
    torch.testing.assert_close(returns["scale"], rows.rewards / (80 / 3) ** 0.5)
    torch.testing.assert_close(returns["normalize"], (rows.rewards - 5) / (80 / 3) ** 0.5)


def test_a_state_restores_moments_and_an_adaptive_coefficient_but_not_a_fixed_one() -> None:
    adaptive = {"kl_target": 6.0, "kl_horizon": 40, "reward_scaling": "normalize"}
    first, second = make_estimator(**adaptive), make_estimator(**adaptive)
    first.update_kl_coef(first.estimate(scored(), scored().rewards)[0].kl)
    second.load(first.state())
    assert second.kl_coef == first.kl_coef != 0.5 and second.reward_moments == first.reward_moments
    fixed = make_estimator(kl_coef=0.2)
    fixed.load(first.state())
    assert fixed.kl_coef == 0.2 and fixed.reward_moments == first.reward_moments
    first.reset()
    assert first.kl_coef == 0.5 and first.reward_moments == RewardMoments()
