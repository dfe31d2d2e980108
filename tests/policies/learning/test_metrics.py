"""Metrics of responses, against numbers computed by hand."""

from dataclasses import replace

import pytest
import torch

from policies.learning.metrics import compute_metrics, compute_response_metrics, repetition
from policies.learning.rows import TrainRows, make_rows
from tests.policies.learning.batches import make_batch


def scored() -> TrainRows:
    """Two scored responses, of three tokens and of one token."""
    rows = make_rows([[1], [2]], [[5, 6, 7], [8]], [[-1.0, -1.0, -2.0], [-4.0]], [2.0, 6.0], [True, False])
    scores = {
        "logprobs": torch.tensor([[-1.0, -1.5, -2.0], [-4.1, 0.0, 0.0]]),
        "full_kl": torch.tensor([[0.1, 0.2, 0.3], [0.5, 0.0, 0.0]]),
        "entropy": torch.tensor([[1.0, 2.0, 3.0], [6.0, 0.0, 0.0]]),
    }
    return make_batch(**rows.columns(), **scores)


def test_each_response_has_its_metrics_and_the_kl_is_summed_over_its_tokens() -> None:
    metrics = {name: column.tolist() for name, column in compute_response_metrics(scored(), eval_kl_coef=0.5).items()}
    assert metrics["task_reward"] == [2.0, 6.0] and metrics["response_length"] == [3.0, 1.0]
    assert metrics["eos_rate"] == [1.0, 0.0] and metrics["repetition"] == [0.0, 0.0]
    assert metrics["kl"] == pytest.approx([0.6, 0.5])
    assert metrics["combined_reward"] == pytest.approx([2.0 - 0.3, 6.0 - 0.25])


def test_a_batch_s_metrics_are_means_over_responses_or_over_tokens() -> None:
    metrics = compute_metrics(scored(), eval_kl_coef=0.5)
    assert metrics["task_reward"] == 4.0 and metrics["task_reward_std"] == 2.0
    assert metrics["kl"] == pytest.approx(0.55)
    assert metrics["entropy"] == pytest.approx(12.0 / 4)
    assert metrics["logprob_diff_mean"] == pytest.approx(0.6 / 4) and metrics["logprob_diff_max"] == pytest.approx(0.5)


def test_explained_variance_requires_estimated_returns() -> None:
    assert "explained_variance" not in compute_metrics(scored(), eval_kl_coef=0.5)
    returns = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
    rows = replace(scored(), values=returns, returns=returns)
    assert compute_metrics(rows, eval_kl_coef=0.5)["explained_variance"] == 1.0


def test_the_share_of_thoughts_that_were_cut_off_requires_thoughts() -> None:
    assert "thought_cut_rate" not in compute_metrics(scored(), eval_kl_coef=0.5)
    thoughts = replace(scored(), thought_cut=torch.tensor([0.0, 1.0]))
    assert compute_metrics(thoughts, eval_kl_coef=0.5)["thought_cut_rate"] == 0.5


def test_repetition_counts_bigrams_that_occur_earlier_in_the_response() -> None:
    tokens = torch.tensor([[7, 8, 7, 8, 7, 0], [1, 2, 3, 4, 5, 6], [5, 5, 5, 9, 9, 9], [3, 0, 0, 0, 0, 0]])
    mask = torch.tensor([[1.0] * 5 + [0.0], [1.0] * 6, [1.0] * 3 + [0.0] * 3, [1.0] + [0.0] * 5])
    assert repetition(tokens, mask).tolist() == [2 / 4, 0.0, 1 / 2, 0.0]
    assert repetition(tokens[:, :1], mask[:, :1]).tolist() == [0.0] * 4
