"""Both policies learn: their held-out combined reward rises well beyond noise, for more than one seed."""

from __future__ import annotations

import pytest

from tests.policies.conftest import MakeCory

UPDATES = 10


@pytest.mark.parametrize("seed", [0, 1])
def test_the_combined_reward_of_both_policies_rises(make_cory: MakeCory, seed: int) -> None:
    algorithm = make_cory(
        reward="tests.policies.sample_rewards:commas",
        seed=seed,
        queries=64,
        minibatch=32,
        micro_batch=32,
        lr=3e-4,
        kl_coef=0.1,
        max_response=8,
        eval_every=UPDATES,
        eval_queries=128,
    )
    before = algorithm.evaluate_policies()
    for _ in range(UPDATES):
        report = algorithm.train()["cory"]
    for module_id in algorithm.settings.modules:
        after = report["evaluation"][module_id]
        assert after["combined_reward"] > before[module_id]["combined_reward"] + 0.3
        assert 0.0 < after["kl"] < 10.0
