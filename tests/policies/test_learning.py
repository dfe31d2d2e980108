"""Both policies learn, with full weights and with adapters: held-out combined rewards rise significantly."""

from __future__ import annotations

import pytest

from tests.policies.conftest import BUNDLED, MakeCory

UPDATES = 6


@pytest.mark.parametrize(
    ("weights", "lr", "seed"), [("full", 5e-4, 0), pytest.param("lora", 3e-3, 1, marks=pytest.mark.slow)]
)
def test_the_combined_reward_of_both_policies_rises(make_cory: MakeCory, weights: str, lr: float, seed: int) -> None:
    algorithm = make_cory(
        **BUNDLED,
        weights=weights,
        reward="tests.policies.sample_rewards:commas",
        seed=seed,
        queries_per_update=32,
        minibatch_size=16,
        micro_batch_size=32,
        lr=lr,
        kl_coef=0.1,
        max_response_tokens=8,
        eval_every=UPDATES,
        eval_queries=48,
    )
    before = algorithm.evaluator.evaluate()["evaluation"]
    for _ in range(UPDATES):
        report = algorithm.train()["cory"]
    for policy_id in algorithm.settings.policy_ids:
        after = report["evaluation"][policy_id]
        assert after["combined_reward"] > before[policy_id]["combined_reward"] + 0.3
        assert 0.0 < after["kl"] < 10.0
