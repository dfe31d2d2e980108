"""Training with each policy loss: of chains, of roles, and of adapters."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.policies.conftest import MakeCory
from tests.policies.test_roles import TEAM, weights_of

SAMPLING = {"importance_sampling_mode": "sequence_mask", "importance_sampling_clip_min": 0.5}
GROUPS: dict[str, Any] = {"advantage": "rloo", "num_generations": 2, "queries_per_update": 4}
CASES: list[tuple[dict[str, Any], set[str]]] = [
    ({**GROUPS, "loss": "gspo", "weights": "lora", "minibatch_size": 4, **SAMPLING}, {"importance_sampling_frac_low"}),
    ({**TEAM, "loss": "cispo", "entropy_coef": 0.01}, set()),
    ({"loss": "ppo", "dual_clip": 3.0}, {"dual_clip_fraction", "value_loss"}),
]


OLD_LOGPROBS: dict[str, dict[str, Any]] = {
    "sampler": {**GROUPS, "minibatch_size": 4, "kl_estimator": "k1", "old_logprobs": "sampler"},
    "single step": {**GROUPS, "minibatch_size": None, "num_epochs": 1, "advantage": "grpo", "kl_estimator": "k3"},
}
"""Settings by which policies do not score their responses before training."""


@pytest.mark.parametrize("name", OLD_LOGPROBS)
def test_policies_that_do_not_score_their_responses_report_estimates_and_are_compared_with_the_sampler(
    make_cory: MakeCory, name: str
) -> None:
    algorithm = make_cory(**OLD_LOGPROBS[name], eval_every=2)
    assert not algorithm.settings.hyperparameters.scores_policy
    reports = [algorithm.train()["cory"] for _ in range(2)]
    for report in reports:
        assert 0 <= report["logprob_diff_mean"] < 1e-4
        for metrics in report["policy"].values():
            assert math.isnan(metrics["kl"]) and math.isfinite(metrics["combined_reward"])
            assert metrics["importance_sampling_ratio"] == pytest.approx(1.0, abs=1e-4)
            assert metrics["entropy"] > 0 and "logprob_diff_std" not in metrics
        assert all(math.isnan(metrics["kl"]) and "kl_k3" in metrics for metrics in report["role"].values())
    assert reports[0]["policy"]["llm_1"]["kl_k3"] == pytest.approx(0.0, abs=1e-5)
    assert reports[1]["policy"]["llm_1"]["kl_k3"] > 0 and reports[1]["evaluation"]["llm_1"]["kl"] > 0


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        pytest.param(*CASES[0], id="gspo, adapters"),
        pytest.param(*CASES[1], id="cispo, roles", marks=pytest.mark.slow),
        pytest.param(*CASES[2], id="ppo, dual clip", marks=pytest.mark.slow),
    ],
)
def test_every_llm_trains_with_every_loss_and_reports_its_terms(
    make_cory: MakeCory, settings: dict[str, Any], names: set[str]
) -> None:
    algorithm = make_cory(**{"lr": 1e-3, **settings})
    before = weights_of(algorithm)
    report = algorithm.train()["cory"]
    after = weights_of(algorithm)
    for policy_id, metrics in report["policy"].items():
        assert {"policy_loss", "clip_fraction", "grad_norm", "importance_sampling_frac_high", *names} <= metrics.keys()
        assert all(math.isfinite(metrics[name]) for name in (*names, "policy_loss", "grad_norm"))
        assert any((after[name] != array).any() for name, array in before.items() if name.startswith(policy_id))
        if settings["loss"] == "gspo":
            assert metrics["clip_fraction"] > 0.0  # a range of 3e-4 is narrow
