"""The formulas against numbers computed by hand."""

from math import log, sqrt

import pytest
import torch
from torch import Tensor

from policies.learning import token_ppo
from policies.learning.estimation import RewardMoments
from tests.policies.learning import plain_formulas

LN2, LN3 = log(2), log(3)
P = [1 / 2, 1 / 4, 1 / 4]
Q = [1 / 4, 1 / 2, 1 / 4]
UNIFORM = [1 / 3, 1 / 3, 1 / 3]
RAGGED = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])


def logits(*rows: list[list[float]]) -> Tensor:
    """Logits `[B, T, V]` of the given probabilities, plus a constant that must not matter."""
    return torch.tensor(rows).log() + 3.0


def close(ours: Tensor, theirs: object) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(theirs, dtype=ours.dtype), rtol=1e-5, atol=1e-6)


def test_score_tokens_gives_the_results_of_the_four_formulas() -> None:
    tokens = torch.tensor([[0, 1, 2], [1, 0, 2]])
    policy, reference = logits([P, P, Q], [Q, UNIFORM, UNIFORM]), logits([Q, P, P], [UNIFORM, UNIFORM, P])
    plain = (
        plain_formulas.token_logprobs(policy, tokens),
        plain_formulas.entropy(policy),
        plain_formulas.token_logprobs(reference, tokens),
        plain_formulas.full_kl(policy, reference),
    )
    fast = token_ppo.score_tokens(policy.log_softmax(-1), reference.log_softmax(-1), tokens)
    for ours, theirs in zip(fast, plain, strict=True):
        close(ours, theirs)
    without_reference = token_ppo.score_tokens(policy.log_softmax(-1), None, tokens)
    assert all(map(torch.equal, without_reference, fast[:2])) and len(without_reference) == 2


def test_entropy_is_ln_v_for_a_uniform_token_and_zero_for_a_certain_one() -> None:
    # P: 1/2 ln 2 + 2 * 1/4 ln 4 = 3/2 ln 2
    close(plain_formulas.entropy(logits([P, UNIFORM])), [[1.5 * LN2, LN3]])
    close(plain_formulas.entropy(torch.tensor([[[50.0, 0.0, 0.0]]])), [[0.0]])


def test_the_full_kl_sums_over_the_vocabulary_and_is_exactly_zero_for_equal_logits() -> None:
    # KL(P || Q) = 1/2 ln 2 - 1/4 ln 2; KL(P || uniform) = ln 3 - H(P)
    close(plain_formulas.full_kl(logits([P, P]), logits([Q, UNIFORM])), [[0.25 * LN2, LN3 - 1.5 * LN2]])
    assert plain_formulas.full_kl(logits([P, Q]), logits([P, Q])).tolist() == [[0.0, 0.0]]


def test_k1_is_the_log_ratio_and_k3_adds_the_inverse_ratio_minus_one() -> None:
    logprobs, reference = torch.tensor([[-LN2, -2 * LN2, -1.0]]), torch.tensor([[-2 * LN2, -LN2, -1.0]])
    close(token_ppo.sampled_kl(logprobs, reference, "k1"), [[LN2, -LN2, 0.0]])
    # ratios pi_ref/pi: 1/2, 2, 1
    close(token_ppo.sampled_kl(logprobs, reference, "k3"), [[-1 / 2 + LN2, 1 - LN2, 0.0]])


def test_k3_is_never_negative_and_both_estimators_average_to_the_full_kl() -> None:
    ours = token_ppo.sampled_kl(torch.linspace(-3, 0, 61).unsqueeze(0), torch.full((1, 61), -1.5), "k3")
    assert (ours >= 0).all()
    policy, reference = logits([P, P, P]), logits([Q, Q, Q])
    every_token = torch.tensor([[0, 1, 2]])
    logprobs, others = (plain_formulas.token_logprobs(x, every_token) for x in (policy, reference))
    for kl in (token_ppo.sampled_kl(logprobs, others, "k1"), token_ppo.sampled_kl(logprobs, others, "k3")):
        assert float((kl * torch.tensor(P)).sum()) == pytest.approx(0.25 * LN2, abs=1e-6)


def test_token_rewards_are_the_kl_penalty_plus_the_score_at_the_last_token() -> None:
    kl = torch.tensor([[0.2, 0.4, 0.0, 1.0], [0.2, 0.4, 9.0, 9.0], [0.6, 9.0, 9.0, 9.0]])
    ours = token_ppo.token_rewards(torch.tensor([1.0, 2.0, 3.0]), kl, RAGGED, kl_coef=0.5)
    close(ours, [[-0.1, -0.2, 0.0, -0.5 + 1.0], [-0.1, -0.2 + 2.0, 0.0, 0.0], [-0.3 + 3.0, 0.0, 0.0, 0.0]])
    assert float(kl[1, 2]) == 9.0  # the input is unchanged


def test_a_row_without_tokens_gets_no_reward() -> None:
    ours = token_ppo.token_rewards(torch.tensor([5.0]), torch.ones(1, 3), torch.zeros(1, 3), kl_coef=0.5)
    close(ours, [[0.0, 0.0, 0.0]])


def test_gae_sums_discounted_td_errors_with_a_value_of_zero_after_the_last_token() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 7.0, 7.0], [1.0, 7.0, 7.0, 7.0]])
    values = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 9.0, 9.0], [0.25, 9.0, 9.0, 9.0]])
    advantages, returns = token_ppo.gae(rewards, values, RAGGED, gamma=1.0, lam=0.5)
    # errors r + V' - V of row 0: 0, 0, 1, -1/2; backwards with weight 1/2: -1/2, 1 - 1/4, 3/8, 3/16.
    # row 1: 0, 1/2 -> 1/2, 1/4. row 2: one token, 1 - 1/4.
    expected = torch.tensor([[3 / 16, 3 / 8, 3 / 4, -1 / 2], [1 / 4, 1 / 2, 0.0, 0.0], [3 / 4, 0.0, 0.0, 0.0]])
    close(advantages, expected)
    close(returns, expected + values * RAGGED)


def test_gae_with_lambda_one_gives_discounted_rewards_to_go() -> None:
    advantages, returns = token_ppo.gae(
        torch.ones(1, 3), torch.full((1, 3), 0.25), torch.ones(1, 3), gamma=0.5, lam=1.0
    )
    close(returns, [[1.75, 1.5, 1.0]])
    close(advantages, [[1.5, 1.25, 0.75]])


def test_gae_with_lambda_zero_is_the_one_step_td_error() -> None:
    advantages, _ = token_ppo.gae(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.ones(1, 2), 0.5, 0.0)
    close(advantages, [[1 + 0.5 * 4 - 3, 2.0 - 4]])


def test_gae_of_a_response_of_one_token_is_reward_minus_value() -> None:
    advantages, returns = token_ppo.gae(torch.tensor([[2.0]]), torch.tensor([[0.5]]), torch.ones(1, 1), 0.9, 0.9)
    close(advantages, [[1.5]])
    close(returns, [[2.0]])


def test_moments_ignore_masked_tokens() -> None:
    x = torch.tensor([[1.0, 3.0, 100.0], [5.0, 100.0, 100.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    moments = token_ppo.masked_moments(x, mask)
    assert moments.dtype == torch.float64
    assert moments.tolist() == [3.0, 9.0, 35.0]
    parts = [token_ppo.masked_moments(x[row], mask[row]) for row in range(2)]
    assert (parts[0] + parts[1]).tolist() == moments.tolist()


def test_whitening_uses_the_unbiased_variance() -> None:
    x = torch.tensor([[1.0, 3.0, 100.0], [5.0, 100.0, 100.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    moments = token_ppo.masked_moments(x, mask)  # mean 3, variance (4 + 0 + 4) / 2 = 4
    close(token_ppo.whiten(x, mask, moments), [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])


def test_whitening_uses_the_given_moments_and_not_those_of_its_rows() -> None:
    moments = torch.tensor([3.0, 9.0, 35.0], dtype=torch.float64)
    close(token_ppo.whiten(torch.tensor([[5.0]]), torch.ones(1, 1), moments), [[1.0]])


@pytest.mark.parametrize("value", [0.0, 0.1, 1e4])
@pytest.mark.parametrize("mask", [RAGGED, RAGGED[2:]], ids=["ragged", "one token"])
def test_equal_advantages_whiten_to_zero(value: float, mask: Tensor) -> None:
    x = torch.full_like(mask, value)
    ours = token_ppo.whiten(x, mask, token_ppo.masked_moments(x, mask))
    close(ours, torch.zeros_like(mask))


def test_the_value_loss_clips_the_change_and_takes_the_worse_error() -> None:
    values, old = torch.tensor([[0.5, -0.5, 0.1]]), torch.zeros(1, 3)
    # clipped values 0.2, -0.2, 0.1: half of max(0.5², 0.8²), max(1.5², 1.2²), 0.9²
    close(token_ppo.value_loss(values, old, torch.ones(1, 3), clip=0.2), [[0.32, 1.125, 0.405]])


def test_explained_variance_is_one_for_perfect_values_and_zero_for_constant_ones() -> None:
    returns = torch.tensor([[1.0, 2.0, 50.0], [4.0, 50.0, 50.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert token_ppo.explained_variance(returns * mask, returns, mask) == pytest.approx(1.0)
    assert token_ppo.explained_variance(torch.full_like(returns, 7.0), returns, mask) == pytest.approx(0.0, abs=1e-12)
    assert token_ppo.explained_variance(-returns, returns, mask) == pytest.approx(-3.0)  # Var(2R) = 4 Var(R)
    assert token_ppo.explained_variance(returns, torch.ones_like(returns), mask) == 0.0


@pytest.mark.parametrize(
    ("kl", "factor"),
    # batch / horizon = 1/4, and the error is clipped to ±0.2
    [(6.0, 1.0), (6.6, 1.025), (5.4, 0.975), (7.2, 1.05), (600.0, 1.05), (4.8, 0.95), (0.0, 0.95), (-6.0, 0.95)],
)
def test_the_adaptive_kl_controller_changes_by_at_most_a_fifth_per_horizon(kl: float, factor: float) -> None:
    assert token_ppo.adapt_kl_coef(0.4, kl, target=6.0, batch=25, horizon=100) == pytest.approx(0.4 * factor)


def test_reward_moments_z_score_the_first_batch_exactly() -> None:
    moments = RewardMoments()
    scores = torch.tensor([1.0, 3.0])
    assert moments.update(scores) == 2.0
    assert (moments.mean, moments.variance, moments.count) == pytest.approx((2.0, 1.0, 2.0))
    close(moments.scale(scores, "normalize"), [-1 / sqrt(2), 1 / sqrt(2)])
    close(moments.scale(scores, "scale"), [1 / sqrt(2), 3 / sqrt(2)])
    assert torch.equal(moments.scale(scores, "none"), scores)


def test_reward_moments_of_two_batches_are_those_of_their_union() -> None:
    moments = RewardMoments()
    moments.update(torch.tensor([1.0, 3.0]))
    assert moments.update(torch.tensor([5.0, 7.0])) == 6.0  # of this batch alone
    assert (moments.mean, moments.variance, moments.count) == pytest.approx((4.0, 5.0, 4.0))  # of 1, 3, 5, 7
    assert moments.std == pytest.approx(sqrt(20 / 3))
    close(moments.scale(torch.tensor([4.0]), "normalize"), [0.0])


@pytest.mark.parametrize("scores", [[2.0], [2.0, 2.0, 2.0], [0.1, 0.1, 0.1]])
def test_equal_scores_are_not_divided_by_a_zero_deviation(scores: list[float]) -> None:
    moments = RewardMoments()
    moments.update(torch.tensor(scores))
    close(moments.scale(torch.tensor(scores), "normalize"), torch.zeros(len(scores)))
    close(moments.scale(torch.tensor(scores), "scale"), scores)
