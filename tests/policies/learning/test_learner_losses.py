"""One policy's learner with each policy loss, an entropy bonus and weights per role."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from policies.learning import losses
from policies.learning.policy_learner import PolicyLearner
from policies.learning.rows import Rows, TrainRows
from tests.policies.learning import plain_formulas
from tests.policies.learning.test_policy_learner import (
    gradients,
    make_learner,
    make_row_batch,
    minibatches,
    path,
    ready,
)

__all__ = ["path"]

LOSSES: list[dict[str, Any]] = [
    {"loss": "ppo", "dual_clip": 1.1},
    {"loss": "gspo", "clip_ratio": 0.1},
    {"loss": "cispo", "clip_ratio_high": 0.05},
]
SAMPLING: dict[str, Any] = {"importance_sampling_clip_max": 1.2, "importance_sampling_clip_min": 0.8}


def make_batch() -> Rows:
    groups, positions = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 1, 0, 1, 0])
    return replace(make_row_batch(), groups=groups, positions=positions)


def moved(learner: PolicyLearner) -> TrainRows:
    """Rows whose old log-probabilities are not the learner's, so that ratios are clipped."""
    rows = ready(learner, make_batch())
    noise = torch.randn(rows.mask.shape, generator=torch.Generator().manual_seed(0)) * 0.3 * rows.mask
    return replace(rows, logprobs=rows.logprobs + noise, sampler_logprobs=rows.logprobs + 2 * noise)


def mean_loss(learner: PolicyLearner, rows: TrainRows, role_weights: Tensor | float = 1.0) -> Tensor:
    """The mean loss from one padded forward pass over all rows, response by response."""
    h, mask = learner.hyperparameters, rows.mask
    logprobs, _, entropy = learner.model(rows, with_entropy=True)
    assert entropy is not None
    policy_loss, _ = losses.policy_loss(logprobs, rows, h)
    weights, _ = losses.importance_sampling_weights(rows, h)
    tokens = (policy_loss * weights - h.entropy_coef * entropy) * mask * role_weights
    if h.loss == "gspo":
        return (tokens.sum(1) / mask.sum(1)).mean()
    return tokens.sum() / mask.sum()


@pytest.mark.parametrize("weights", ["full", "lora"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["loss"])
def test_micro_batches_do_not_change_the_loss_and_its_gradient(path: str, weights: str, loss: dict[str, Any]) -> None:
    learner = make_learner(path, weights, micro_batch_size=2, advantage="rloo", entropy_coef=0.1, **loss, **SAMPLING)
    rows = moved(learner)
    expected_loss = mean_loss(learner, rows)
    expected_loss.backward()
    expected = gradients(learner)
    metrics = learner.update(rows, 0)
    ours = gradients(learner)
    max_grad = max(float(grad.abs().max()) for grad in expected.values())
    assert max(float((ours[name] - expected[name]).abs().max()) for name in expected) < 4e-6 * max_grad
    assert metrics["loss"] == pytest.approx(expected_loss.item(), abs=2e-6)
    assert metrics.keys() == {*learner.hyperparameters.loss_metrics, "loss", "grad_norm", "lr"}
    shares = [value for name, value in metrics.items() if "frac" in name]
    assert len(shares) == (4 if loss["loss"] == "ppo" else 3) and all(0 < share < 1 for share in shares)


def test_a_mini_batch_of_gspo_is_the_mean_over_its_responses(path: str) -> None:
    learner = make_learner(path, "full", advantage="rloo", loss="gspo", steps=2, lr=1e-12)
    rows = moved(learner)
    parts = [rows.select(torch.tensor(part)) for part in minibatches(learner, 0)]
    expected = np.mean([mean_loss(learner, part).item() for part in parts])
    assert learner.update(rows, 0)["loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["loss"])
def test_importance_sampling_weights_multiply_the_policy_loss_once(path: str, loss: dict[str, Any]) -> None:
    """Neither the ratio, its bounds, the entropy nor the KL in the loss depend on the sampler."""
    others = {"advantage": "grpo", "kl_estimator": "k3", "entropy_coef": 0.1, **loss}
    learner = make_learner(path, "full", importance_sampling_clip_max=4.0, **others)
    rows = moved(learner)
    same = replace(rows, sampler_logprobs=rows.logprobs)
    twice = replace(rows, sampler_logprobs=rows.logprobs - np.log(2.0) * rows.mask)
    plain, weighted = (
        {name: value.item() for name, value in learner.loss(case, kl_coef=0.5)[1].items()} for case in (same, twice)
    )
    assert weighted["policy_loss"] == pytest.approx(2 * plain["policy_loss"], rel=1e-5)
    rest = plain["loss"] - plain["policy_loss"]
    assert weighted["loss"] - weighted["policy_loss"] == pytest.approx(rest, rel=1e-4) and abs(rest) > 0.1


def test_the_entropy_bonus_is_the_gradient_of_the_mean_entropy(path: str) -> None:
    learner = make_learner(path, "full", advantage="rloo", entropy_coef=0.5)
    rows = replace(ready(learner, make_batch()), advantages=torch.zeros_like(make_batch().mask))
    tokens = torch.cat([rows.prompts, rows.responses], dim=1)
    mask = torch.cat([rows.prompt_mask, rows.mask.long()], dim=1)
    logits = learner.model.lm(tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    entropy = plain_formulas.entropy(logits[:, -rows.mask.shape[1] - 1 : -1])
    objective = (entropy * rows.mask).sum() / rows.mask.sum()
    (-0.5 * objective).backward()
    expected = gradients(learner)
    assert learner.update(rows, 0)["loss"] == pytest.approx(-0.5 * objective.item(), rel=1e-5)
    for name, grad in gradients(learner).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-7)
    raised, before = learner.score(rows).entropy, rows.entropy
    assert raised is not None and before is not None and raised.sum() > before.sum()  # after a step on nothing else
