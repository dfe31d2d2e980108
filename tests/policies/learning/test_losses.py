"""Policy losses and importance sampling weights on numbers computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from policies.learning import losses, token_ppo
from policies.learning.hyperparameters import ImportanceSamplingMode
from tests.paper import paper_hyperparameters
from tests.policies.learning.batches import make_batch

MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])


def close(ours: Tensor, theirs: object) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(theirs, dtype=ours.dtype), rtol=0, atol=1e-6)


def gradient(loss: Tensor, logprobs: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss.sum(), logprobs)
    return grad


def test_ppo_is_pessimistic_about_ratios_outside_the_clip_range() -> None:
    old = torch.full((2, 3), -1.0)
    new = old + torch.tensor([[1.5, 1.5, 1.0], [0.5, 0.5, 1.1]]).log()
    advantages = torch.tensor([[1.0, -1.0, 2.0], [1.0, -1.0, 1.0]])
    loss, clipped = losses.ppo(new, old, advantages, clip_ratio=0.2)
    # ratio 1.5: A=1 clipped to 1.2; A=-1 stays 1.5. ratio 0.5: A=1 stays 0.5; A=-1 clipped to 0.8.
    close(loss, [[-1.2, 1.5, -2.0], [-0.5, 0.8, -1.1]])
    close(clipped, [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])


def test_the_upper_clip_range_may_be_wider() -> None:
    new = torch.tensor([[1.5, 1.3, 0.5]]).log()
    loss, clipped = losses.ppo(new, torch.zeros(1, 3), torch.tensor([[1.0, 1.0, -1.0]]), 0.2, clip_ratio_high=0.4)
    close(loss, [[-1.4, -1.3, 0.8]])
    close(clipped, [[1.0, 0.0, 1.0]])


def test_clipped_tokens_have_no_policy_gradient() -> None:
    new = torch.tensor([[1.5, 1.5, 1.0]]).log().requires_grad_()
    loss, _ = losses.ppo(new, torch.zeros(1, 3), torch.tensor([[1.0, -1.0, 2.0]]), clip_ratio=0.2)
    close(gradient(loss, new), [[0.0, 1.5, -2.0]])  # d(-A * ratio) / d log pi = -A * ratio


def test_dual_clip_bounds_only_negative_advantages() -> None:
    new = torch.tensor([[4.0, 4.0, 2.0, 0.5]]).log().requires_grad_()
    advantages = torch.tensor([[-1.0, 1.0, -1.0, -2.0]])
    loss, _ = losses.ppo(new, torch.zeros(1, 4), advantages, clip_ratio=0.2)
    close(loss, [[4.0, -1.2, 2.0, 1.6]])
    loss, bounded = losses.bound_negative_advantages(loss, advantages, dual_clip=3.0)
    close(loss, [[3.0, -1.2, 2.0, 1.6]])
    close(bounded, [[1.0, 0.0, 0.0, 0.0]])
    close(gradient(loss, new), [[0.0, 0.0, 2.0, 0.0]])


def test_gspo_clips_whole_responses_by_the_geometric_mean_of_their_ratios() -> None:
    old = torch.zeros(2, 3)
    new = torch.tensor([[2.0, 0.5, 1.331], [1.05, 7.0, 7.0]]).log().requires_grad_()  # geometric means 1.1 and 1.05
    advantages = torch.tensor([[3.0], [-2.0]]) * MASK
    loss, clipped = losses.gspo(new, old, advantages, MASK, 0.2)
    close(loss * MASK, [[-3.3, -3.3, -3.3], [2.1, 0.0, 0.0]])
    assert not clipped.any()
    close(gradient(loss * MASK, new), [[-3.3, -3.3, -3.3], [2.1, 0.0, 0.0]])
    loss, clipped = losses.gspo(new, old, advantages, MASK, 0.2, clip_ratio_high=0.08)
    close(loss * MASK, [[-3.24, -3.24, -3.24], [2.1, 0.0, 0.0]])
    close(clipped, [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    close(gradient(loss * MASK, new), [[0.0, 0.0, 0.0], [2.1, 0.0, 0.0]])


def test_gspo_has_the_gradient_of_the_ratio_of_each_response() -> None:
    """That of -A · exp(mean log ratio), averaged over responses, by automatic differentiation."""
    new = (torch.randn(2, 3, generator=torch.Generator().manual_seed(0)) * 0.1).requires_grad_()
    advantages = torch.tensor([[1.5], [-0.5]])
    loss, _ = losses.gspo(new, torch.zeros(2, 3), advantages * MASK, MASK, 0.5)
    weights = losses.token_weights(MASK, paper_hyperparameters(loss="gspo"))
    ratios = ((new * MASK).sum(1, keepdim=True) / MASK.sum(1, keepdim=True)).exp()
    close(gradient(loss * weights, new), gradient(-advantages * ratios, new))


@pytest.mark.parametrize("mask", [torch.zeros(1, 3), torch.zeros(1, 0)], ids=["no token", "no column"])
def test_a_response_without_tokens_adds_nothing_to_gspo(mask: Tensor) -> None:
    weights = losses.token_weights(mask, paper_hyperparameters(loss="gspo"))
    loss, _ = losses.gspo(mask - 2.0, mask, mask, mask, 0.2)
    assert torch.isfinite(loss).all() and weights.sum() == 0


def test_all_tokens_weigh_the_same_but_in_gspo_all_responses() -> None:
    close(losses.token_weights(MASK, paper_hyperparameters(loss="cispo")), MASK)
    close(losses.token_weights(MASK, paper_hyperparameters()), MASK)
    close(losses.token_weights(MASK, paper_hyperparameters(loss="gspo")), [[1 / 3] * 3, [1.0, 0.0, 0.0]])


def test_cispo_weighs_log_probabilities_by_bounded_ratios_and_every_token_has_a_gradient() -> None:
    old = torch.full((1, 4), -2.0)
    new = (old + torch.tensor([[4.0, 1.5, 0.5, 0.1]]).log()).requires_grad_()
    advantages = torch.tensor([[1.0, -1.0, 2.0, 1.0]])
    loss, clipped = losses.cispo(new, old, advantages, 1.0, 2.0)
    close(loss, new.detach() * torch.tensor([[-3.0, 1.5, -1.0, -0.1]]))
    close(clipped, [[1.0, 0.0, 0.0, 0.0]])
    close(gradient(loss, new), [[-3.0, 1.5, -1.0, -0.1]])
    loss, clipped = losses.cispo(new, old, advantages, 0.8, 2.0)
    close(gradient(loss, new), [[-3.0, 1.5, -1.0, -0.2]])
    close(clipped, [[1.0, 0.0, 0.0, 1.0]])


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_ratios_of_hundreds_of_nats_give_finite_losses_and_gradients(loss: Any, dtype: torch.dtype) -> None:
    new = torch.tensor([[-1.0, -800.0], [-800.0, -1.0]], dtype=dtype, requires_grad=True)
    old = torch.tensor([[-800.0, -1.0], [-800.0, -800.0]], dtype=dtype)
    for sign in (1.0, -1.0):
        rows = make_batch(logprobs=old, advantages=torch.full_like(old, sign))
        tokens, _ = losses.policy_loss(new, rows, paper_hyperparameters(loss=loss))
        assert torch.isfinite(tokens).all() and torch.isfinite(gradient(tokens, new)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_k3_is_bounded_in_value_and_gradient(dtype: torch.dtype) -> None:
    logprobs = torch.tensor([-1.0, -89.0, -800.0, 0.0], dtype=dtype, requires_grad=True)
    reference = torch.tensor([-2.0, 0.0, 0.0, -800.0], dtype=dtype)
    kl = token_ppo.sampled_kl(logprobs, reference, "k3")
    expected = torch.tensor([0.3679, 10.0, 10.0, 10.0], dtype=dtype)  # exp(-1) - 1 + 1
    torch.testing.assert_close(kl, expected, rtol=0, atol=1e-2 if dtype == torch.bfloat16 else 1e-4)
    assert gradient(kl, logprobs)[1:].tolist() == [0.0, 0.0, 0.0]


def test_a_ratio_of_400_with_a_negative_advantage_costs_at_most_the_dual_clip() -> None:
    new, old = torch.tensor([[0.0]]), torch.tensor([[-6.0]])
    rows = make_batch(logprobs=old, advantages=torch.tensor([[-1.0]]))
    tokens, metrics = losses.policy_loss(new, rows, paper_hyperparameters(dual_clip=3.0))
    assert tokens.item() == 3.0 and metrics["dual_clip_fraction"].item() == 1.0
    assert losses.policy_loss(new, rows, paper_hyperparameters())[0].item() == pytest.approx(403.4288)


@pytest.mark.parametrize(
    ("settings", "clip_range"),
    [
        ({}, (0.2, 0.2)),
        ({"loss": "gspo"}, (3e-4, 4e-4)),
        ({"loss": "gspo", "clip_ratio_high": 1e-3}, (3e-4, 1e-3)),
        ({"loss": "gspo", "clip_ratio": 1e-3}, (1e-3, 1e-3)),
        ({"clip_ratio": 0.1}, (0.1, 0.1)),
        ({"clip_ratio": 0.1, "clip_ratio_high": 0.3}, (0.1, 0.3)),
    ],
)
def test_each_loss_has_a_default_clip_range(settings: dict[str, Any], clip_range: tuple[float, float]) -> None:
    assert paper_hyperparameters(**settings).clip_range == clip_range


LEARNER = torch.tensor([[0.5, 0.2, 0.9], [0.3, 0.5, 0.5]]).log()
SAMPLER = torch.tensor([[0.25, 0.4, 0.1], [0.1, 0.1, 0.1]]).log()
"""Ratios 2, 0.5 and 9, product 9; and 3. The other tokens of the second response are padding."""


def importance_sampling_weights(
    mode: ImportanceSamplingMode, clip_max: float | None, clip_min: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    h = paper_hyperparameters(
        importance_sampling_mode=mode, importance_sampling_clip_max=clip_max, importance_sampling_clip_min=clip_min
    )
    return losses.importance_sampling_weights(make_batch(mask=MASK, logprobs=LEARNER, sampler_logprobs=SAMPLER), h)


@pytest.mark.parametrize(
    ("mode", "clip_max", "clip_min", "weights"),
    [
        ("token_truncate", 2.5, None, [[2.0, 0.5, 2.5], [2.5, 0.0, 0.0]]),
        ("token_truncate", 20.0, None, [[2.0, 0.5, 9.0], [3.0, 0.0, 0.0]]),
        ("token_truncate", 2.5, 0.8, [[2.0, 0.8, 2.5], [2.5, 0.0, 0.0]]),
        ("token_truncate", None, None, [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]),
        ("token_mask", 2.5, None, [[2.0, 0.5, 0.0], [0.0, 0.0, 0.0]]),
        ("token_mask", 2.5, 0.8, [[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        ("sequence_truncate", 4.0, None, [[4.0, 4.0, 4.0], [3.0, 0.0, 0.0]]),
        ("sequence_mask", 4.0, None, [[0.0, 0.0, 0.0], [3.0, 0.0, 0.0]]),
    ],
)
def test_importance_sampling_weights_are_truncated_or_masked_per_token_or_response(
    mode: ImportanceSamplingMode, clip_max: float | None, clip_min: float | None, weights: list[list[float]]
) -> None:
    ours, _ = importance_sampling_weights(mode, clip_max, clip_min)
    close(ours * MASK, weights)


def test_shares_of_weights_out_of_bounds_are_reported() -> None:
    def shares(mode: ImportanceSamplingMode, *bounds: float) -> dict[str, list[list[float]]]:
        _, tokens = importance_sampling_weights(mode, *bounds)
        return {name: (column * MASK).tolist() for name, column in tokens.items()}

    assert shares("token_mask", 2.5, 0.8) == {
        "importance_sampling_frac_high": [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]],
        "importance_sampling_frac_low": [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]],
    }
    assert shares("sequence_truncate", 4.0) == {
        "importance_sampling_frac_high": [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]],
    }
