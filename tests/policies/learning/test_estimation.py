"""Advantages of a batch, against numbers worked out from its rewards and log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from policies.learning import token_ppo
from policies.learning.estimation import Estimation, RewardMoments
from policies.learning.hyperparameters import Hyperparameters
from policies.learning.rows import Rows, make_rows

LENGTHS = [2, 5, 3, 1, 4, 6]
SCORES = [3.0, 1.0, 8.0, 5.0, 5.0, 2.0]
"""Of three responses each to two queries."""


def estimation(**others: Any) -> Estimation:
    return Estimation(Hyperparameters(**{"kl_coef": 0.5, **others}))


def scored(scores: list[float] = SCORES) -> Rows:
    """Rows whose log-probabilities differ from the reference's, as a learner scores them."""
    count = len(scores)
    tokens = [[1] * length for length in LENGTHS[:count]]
    rows = make_rows([[1]] * count, tokens, [[0.0] * length for length in LENGTHS[:count]], scores, [False] * count)
    random, mask = torch.Generator().manual_seed(0), rows["mask"]
    noise = [torch.randn(mask.shape, generator=random) * mask for _ in range(4)]
    return {
        **rows,
        "groups": torch.tensor([4, 4, 4, 2, 2, 2][:count]),
        "rewards": torch.tensor(scores),
        "logprobs": noise[0] - 2.0 * mask,
        "reference_logprobs": noise[0] - 2.0 * mask - 0.3 * noise[1],
        "full_kl": noise[2].abs(),
        "values": noise[3],
    }


def kl_to_come(rows: Rows, row: int) -> list[float]:
    """k1 of one response, summed from each token on."""
    kl = (rows["logprobs"] - rows["reference_logprobs"])[row].tolist()
    return [sum(kl[step : LENGTHS[row]]) for step in range(LENGTHS[row])]


def leave_one_out(totals: list[float]) -> list[float]:
    return [total - (sum(totals) - total) / (len(totals) - 1) for total in totals]


@pytest.mark.parametrize("estimator", ["full", "k1", "k3"])
def test_with_a_critic_advantages_are_whitened_gae_and_the_kl_is_in_the_reward(estimator: str) -> None:
    rows = scored()
    columns, figures = estimation(kl_estimator=estimator, gamma=0.9, lam=0.8).estimate(rows)
    mask, gap = rows["mask"], rows["logprobs"] - rows["reference_logprobs"]
    kl = {"full": rows["full_kl"], "k1": gap, "k3": torch.expm1(-gap) + gap}[estimator] * mask
    torch.testing.assert_close(columns["kl"], kl)
    rewards = token_ppo.token_rewards(rows["rewards"], kl, mask, 0.5)
    advantages, returns = token_ppo.gae(rewards, rows["values"], mask, 0.9, 0.8)
    torch.testing.assert_close(columns["returns"], returns)
    real = advantages[mask.bool()]
    torch.testing.assert_close(columns["advantages"][mask.bool()], (real - real.mean()) / real.std())
    assert (columns["advantages"] * (1 - mask) == 0).all()
    assert figures == {
        "kl_coef": 0.5,
        "credited_reward": pytest.approx(sum(SCORES) / 6),
        "explained_variance": token_ppo.explained_variance(rows["values"], returns, mask),
    }


def test_rloo_pays_each_whole_response_less_its_kl_and_compares_it_with_the_others_to_its_query() -> None:
    rows = scored()
    columns, _ = estimation(advantage="rloo").estimate(rows)
    totals = [score - 0.5 * kl_to_come(rows, row)[0] for row, score in enumerate(SCORES)]
    assert max(abs(total - score) for total, score in zip(totals, SCORES, strict=True)) > 1e-2
    expected = torch.tensor(leave_one_out(totals[:3]) + leave_one_out(totals[3:])).unsqueeze(1) * rows["mask"]
    torch.testing.assert_close(columns["advantages"], expected, rtol=1e-4, atol=1e-4)


def test_reinforce_pays_each_token_the_score_less_the_kl_to_come_and_whitens_over_the_batch() -> None:
    rows = scored()
    columns, figures = estimation(advantage="reinforce").estimate(rows)
    to_come = [score - 0.5 * kl for row, score in enumerate(SCORES) for kl in kl_to_come(rows, row)]
    expected = torch.tensor(to_come)
    expected = (expected - expected.mean()) / expected.std()
    torch.testing.assert_close(columns["advantages"][rows["mask"].bool()], expected, rtol=1e-4, atol=1e-4)
    assert columns.keys() == {"kl", "advantages"} and figures.keys() == {"kl_coef", "credited_reward"}


@pytest.mark.parametrize(("advantage", "deviations"), [("grpo", (13**0.5, 3**0.5)), ("dr_grpo", (1.0, 1.0))])
def test_grpo_compares_bare_scores(advantage: str, deviations: tuple[float, float]) -> None:
    rows = scored()
    columns, _ = estimation(advantage=advantage, kl_estimator="k3").estimate(rows)
    expected = [*(x / deviations[0] for x in (-1, -3, 4)), *(x / deviations[1] for x in (1, 1, -2))]
    torch.testing.assert_close(
        columns["advantages"], torch.tensor(expected).unsqueeze(1) * rows["mask"], rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("advantage", ["rloo", "grpo", "dr_grpo"])
def test_a_response_whose_reward_failed_leaves_a_smaller_group_and_one_left_alone_learns_nothing(
    advantage: str,
) -> None:
    columns, _ = estimation(advantage=advantage, kl_coef=0.0).estimate(scored(SCORES[:4]))
    scale = {"rloo": 3 / 2, "grpo": 13**-0.5, "dr_grpo": 1.0}[advantage]
    assert columns["advantages"][:, 0].tolist() == pytest.approx([-1 * scale, -3 * scale, 4 * scale, 0.0], rel=1e-3)


@pytest.mark.parametrize("control", ["adaptive", "fixed"])
def test_the_kl_coefficient_follows_the_measured_kl_only_where_it_is_adaptive(control: str) -> None:
    found = estimation(kl_control=control, kl_target=0.6, kl_horizon=40)
    for _ in range(2):
        before, kl = found.kl_coef, found.estimate(scored())[0]["kl"]
        found.adapt(kl)
        adapted = token_ppo.adapt_kl_coef(before, float(kl.sum()) / 6, 0.6, batch=6, horizon=40)
        assert adapted != pytest.approx(before)
        assert found.kl_coef == (adapted if control == "adaptive" else 0.5)


def test_score_scaling_changes_what_is_trained_on_and_not_what_is_reported() -> None:
    rows, without_kl = scored([-1.0, 3.0, 7.0, 11.0]), {"kl_coef": 0.0, "lam": 1.0}  # deviation sqrt(80 / 3), mean 5
    returns, means = {}, set()
    for mode in ("none", "scale", "normalize"):
        columns, figures = estimation(**without_kl, reward_scaling=mode).estimate(rows)
        returns[mode] = columns["returns"][:, 0]
        means.add(figures["credited_reward"])
    assert means == {5.0}
    torch.testing.assert_close(returns["none"], rows["rewards"])
    torch.testing.assert_close(returns["scale"], rows["rewards"] / (80 / 3) ** 0.5)
    torch.testing.assert_close(returns["normalize"], (rows["rewards"] - 5) / (80 / 3) ** 0.5)


def test_a_state_holds_coefficient_and_moments_and_a_fixed_coefficient_stays_that_of_the_settings() -> None:
    adaptive = {"kl_control": "adaptive", "kl_horizon": 40, "reward_scaling": "normalize"}
    first, second = estimation(**adaptive), estimation(**adaptive)
    first.adapt(first.estimate(scored())[0]["kl"])
    second.load(first.state())
    assert second.kl_coef == first.kl_coef != 0.5 and second.reward_moments == first.reward_moments
    fixed = estimation(kl_coef=0.2)
    fixed.load(first.state())
    assert fixed.kl_coef == 0.2 and fixed.reward_moments == first.reward_moments
    first.forget()
    assert first.kl_coef == 0.5 and first.reward_moments == RewardMoments()
