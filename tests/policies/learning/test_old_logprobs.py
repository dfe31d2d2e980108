"""Updates in which the policy does not score its responses before it trains on them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from policies.learning.metrics import compare_logprobs, compute_metrics
from policies.learning.policy_learner import PolicyLearner
from policies.learning.rows import Scores, TrainRows
from tests.forked import run_ranks
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

RLOO: dict[str, Any] = {"advantage": "rloo", "kl_coef": 0.0, "kl_estimator": "k1"}
SAMPLER: dict[str, Any] = {**RLOO, "old_logprobs": "sampler", "importance_sampling_clip_max": None}


def unscored(learner: PolicyLearner, seed: int = 0) -> TrainRows:
    """Rows that the policy did not score; the sampler's log-probabilities are near its own. Advantages are random."""
    rows = ready(learner, make_row_batch())
    noise, advantages = torch.randn(2, *rows.mask.shape, generator=torch.Generator().manual_seed(seed)) * rows.mask
    sampled = rows.logprobs + 0.3 * noise
    scores = Scores(sampled, reference_logprobs=rows.reference_logprobs)
    return replace(rows, sampler_logprobs=sampled, advantages=advantages, **vars(scores))


def own_logprobs(learner: PolicyLearner, rows: TrainRows) -> Tensor:
    """By one padded forward pass of the language model alone."""
    tokens = torch.cat([rows.prompts, rows.responses], dim=1)
    mask = torch.cat([rows.prompt_mask, rows.mask.long()], dim=1)
    logits = learner.model.lm(tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    return plain_formulas.token_logprobs(logits[:, -rows.mask.shape[1] - 1 : -1], rows.responses)


def assert_same_gradient(learner: PolicyLearner, rows: TrainRows, loss: Tensor) -> dict[str, float]:
    loss.backward()
    expected = gradients(learner)
    metrics = learner.update(rows, 0)
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for name, grad in gradients(learner).items():
        assert float((grad - expected[name]).abs().max()) < 1e-5 * largest
    assert metrics["loss"] == pytest.approx(loss.item(), abs=2e-6)
    return metrics


@pytest.mark.parametrize("weights", ["full", "lora"])
def test_a_single_step_has_the_policy_gradient_of_its_own_pass(path: str, weights: str) -> None:
    learner = make_learner(path, weights, micro_batch_size=2, importance_sampling_clip_max=1.2, **RLOO)
    assert learner.hyperparameters.single_pass and not learner.hyperparameters.scores_policy
    rows = unscored(learner)
    logprobs = own_logprobs(learner, rows)
    corrections = (logprobs.detach() - rows.sampler_logprobs).exp().clamp(max=1.2)
    ratio = (logprobs - logprobs.detach()).exp()
    loss = -(ratio * rows.advantages * corrections * rows.mask).sum() / rows.mask.sum()
    metrics = assert_same_gradient(learner, rows, loss)
    assert metrics["clip_fraction"] == 0 and metrics["importance_sampling_frac_high"] > 0


@pytest.mark.parametrize("weights", ["full", "lora"])
def test_the_ratio_is_to_the_sampler(path: str, weights: str) -> None:
    learner = make_learner(path, weights, micro_batch_size=2, **SAMPLER)
    rows = unscored(learner)
    ratio = (own_logprobs(learner, rows) - rows.sampler_logprobs).exp()
    surrogate = torch.minimum(ratio * rows.advantages, ratio.clamp(0.8, 1.2) * rows.advantages)
    metrics = assert_same_gradient(learner, rows, -(surrogate * rows.mask).sum() / rows.mask.sum())
    assert 0 < metrics["clip_fraction"] < 1


def test_the_kl_in_the_loss_needs_no_scores_of_the_policy(path: str) -> None:
    grpo = {**RLOO, "advantage": "grpo", "kl_coef": 0.5, "kl_estimator": "k3"}
    learner = make_learner(path, "full", **grpo)
    assert learner.hyperparameters.single_pass
    rows = unscored(learner)
    assert rows.reference_logprobs is not None
    logprobs = own_logprobs(learner, rows)
    log_ratio = rows.reference_logprobs - logprobs
    k3 = torch.expm1(log_ratio) - log_ratio
    ratio = (logprobs - logprobs.detach()).exp()
    loss = ((0.5 * k3 - ratio * rows.advantages) * rows.mask).sum() / rows.mask.sum()
    loss.backward()
    expected = gradients(learner)
    learner.update(rows, 0, kl_coef=0.5)
    for name, grad in gradients(learner).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-3, atol=1e-6)


def test_the_sampler_is_compared_with_the_weights_before_the_first_step(path: str) -> None:
    learner = make_learner(path, "full", steps=3, num_epochs=2, lr=0.01, **SAMPLER)
    rows = unscored(learner)
    first = rows.select(torch.tensor(minibatches(learner, 0)[0]))
    expected = compare_logprobs(first, learner.score(first).logprobs)
    metrics = learner.update(rows, 0)
    assert {name: metrics[name] for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-4
    )
    assert metrics["logprob_diff_mean"] > 0.1 and metrics["logprob_diff_tokens"] == float(first.mask.sum())


def test_without_rows_nothing_is_compared(path: str) -> None:
    learner = make_learner(path, "full", **SAMPLER)
    rows = unscored(learner)
    metrics = learner.update(rows.select(torch.tensor([], dtype=torch.int64)), 0, num_scored=len(rows))
    assert metrics["logprob_diff_tokens"] == 0 and math.isnan(metrics["logprob_diff_mean"])


def test_the_reference_alone_scores_as_beside_the_policy(path: str) -> None:
    for weights in ("full", "lora"):
        learner = make_learner(path, weights, micro_batch_size=2, **SAMPLER)
        rows = make_row_batch()
        both, alone = learner.score(rows), learner.score_reference(rows)
        assert both.reference_logprobs is not None and alone.reference_logprobs is not None
        torch.testing.assert_close(alone.reference_logprobs, both.reference_logprobs, rtol=0, atol=1e-6)
        assert torch.equal(alone.logprobs, rows.sampler_logprobs) and alone.entropy is None and alone.full_kl is None


def test_metrics_of_unscored_rows_are_estimates_from_their_tokens(path: str) -> None:
    """With tokens drawn from the policy itself, they have the expected values of those over the vocabulary."""
    learner = make_learner(path, "full", **SAMPLER)
    row = make_row_batch(1)
    many = row.select(torch.zeros(4000, dtype=torch.int64))
    with torch.no_grad():
        logits = learner.model.lm(row.prompts[:, -int(row.prompt_mask.sum()) :]).logits[0, -1]
    drawn = torch.multinomial(logits.softmax(0), 4000, replacement=True, generator=torch.Generator().manual_seed(0))
    only_first = torch.zeros_like(many.mask)
    only_first[:, 0] = 1.0
    many = replace(many, responses=many.responses.index_fill(1, torch.tensor([0]), 0), mask=only_first)
    many.responses[:, 0] = drawn
    scored = learner.score(many)
    plain = many.with_scores(scored)
    sampled = replace(many, sampler_logprobs=scored.logprobs)
    estimated = sampled.with_scores(learner.score_reference(sampled))
    exact, ours = compute_metrics(plain, 0.5), compute_metrics(estimated, 0.5)
    assert "kl_k3" not in exact and "logprob_diff_mean" not in ours and math.isnan(ours["kl"])
    assert ours["kl_k3"] == pytest.approx(exact["kl"], rel=0.1) and exact["kl"] > 0.01
    assert ours["entropy"] == pytest.approx(exact["entropy"], rel=0.05)
    assert ours["combined_reward"] == pytest.approx(ours["task_reward"] - 0.5 * ours["kl_k3"], abs=1e-5)


def rank(number: int, ranks: int, path: str, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=ranks)
    learner = make_learner(path, "full", group=dist.group.WORLD, steps=2, **SAMPLER)
    rows = unscored(make_learner(path, "full", steps=2, **SAMPLER))
    torch.save((learner.score_reference(rows), learner.update(rows, 0)), f"{out}/{number}")
    dist.destroy_process_group()


def test_ranks_compare_and_score_the_same_as_a_single_process(path: str, tmp_path: Path) -> None:
    run_ranks(rank, 3, 3, path, str(tmp_path / "store"), str(tmp_path))
    single = make_learner(path, "full", steps=2, **SAMPLER)
    rows = unscored(single)
    scores, metrics = single.score_reference(rows), single.update(rows, 0)
    for number in range(3):
        rank_scores, rank_metrics = torch.load(tmp_path / str(number), weights_only=False)
        assert rank_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-5)
        torch.testing.assert_close(rank_scores.reference_logprobs, scores.reference_logprobs, rtol=0, atol=2e-5)
