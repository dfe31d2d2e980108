"""The bare loop that the learner's speed is compared with does the same work as the learner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import learner
from benchmarks.bare_ppo import BarePPO

QUERIES = 8


@pytest.mark.parametrize("micro_batch_size", [QUERIES, 3])
def test_one_update_of_the_bare_loop_ends_at_the_learners_weights(tmp_path: Path, micro_batch_size: int) -> None:
    settings = learner.settings(tmp_path, "test", "fp32", quick=True).model_copy(
        update={
            "minibatch_size": QUERIES,
            "micro_batch_size": micro_batch_size,
            "num_epochs": 2,
            "lr": 1e-3,
            "grad_clip": 0.5,
        }
    )
    ours, (played, samples) = learner.build(settings), learner.play(settings)
    bare = {policy_id: BarePPO(settings) for policy_id in settings.policy_ids}
    start = {name: p.detach().clone() for name, p in bare["llm_1"].lm.named_parameters()}

    learner.learn(ours, played, settings, 0)
    for policy_id, policy in bare.items():
        policy.update(samples[policy_id], reported=False)

    for policy_id, policy in bare.items():
        trained = dict(ours[policy_id].model.lm.named_parameters())
        for name, parameter in policy.lm.named_parameters():
            torch.testing.assert_close(parameter, trained[name], atol=1e-4, rtol=0)
    moved = max(float((p - start[name]).detach().abs().max()) for name, p in bare["llm_1"].lm.named_parameters())
    assert moved > 1e-3
