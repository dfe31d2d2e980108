"""Tests of the weight-sync check during training: an engine with old weights ends the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from policies.generation.generator import LoadedWeights
from policies.generation.transformers_generator import TransformersGenerator
from policies.learning.rows import Rows, make_rows
from policies.models.weights import Weights, checksum
from policies.rollout.runners import WeightSyncError
from policies.sync_check import default_max_diff, perturb
from tests.paper import make_settings
from tests.policies.conftest import MakeCory


class StaleGenerator(TransformersGenerator):
    """Reports that it loaded new weights, but keeps the old ones."""

    def load(self, policy_id: str, weights: Weights, version: int) -> LoadedWeights:
        return LoadedWeights(version, checksum(weights))


def ignore_new_weights(runner: Any) -> None:
    runner.generator.__class__ = StaleGenerator


STALE = (
    r"engine of llm_1 does not use its current weights: .* is 0\.\d+ nats per token, above max_logprob_diff=0\.001\. If"
)


@pytest.mark.parametrize("check_weight_sync", [True, False])
def test_an_engine_that_ignores_new_weights_ends_the_run_in_the_next_update(
    make_cory: MakeCory, check_weight_sync: bool
) -> None:
    algorithm = make_cory(check_weight_sync=check_weight_sync, eval_every=100)
    algorithm.env_runner_group.foreach_env_runner(ignore_new_weights)
    algorithm.train()  # with the initial weights
    with pytest.raises(WeightSyncError, match=STALE):
        algorithm.train()
    assert algorithm.updates == 1


def test_with_max_lag_the_run_ends_as_soon_as_the_engine_should_have_new_weights(make_cory: MakeCory) -> None:
    algorithm = make_cory(check_weight_sync=True, max_lag=1, num_runners=1, eval_every=100)
    algorithm.env_runner_group.foreach_env_runner(ignore_new_weights)
    with pytest.raises(WeightSyncError, match=STALE):
        algorithm.train()


@pytest.mark.slow
def test_with_max_lag_an_evaluation_detects_an_engine_that_ignores_later_weights(make_cory: MakeCory) -> None:
    algorithm = make_cory(max_lag=1, num_runners=1, eval_every=3)
    for _ in range(2):
        algorithm.train()
    algorithm.env_runner_group.foreach_env_runner(ignore_new_weights)
    with pytest.raises(WeightSyncError, match=STALE):
        algorithm.train()


def test_the_error_names_the_policy_with_other_weights(make_cory: MakeCory) -> None:
    algorithm = make_cory()
    algorithm.train()
    stale = perturb(algorithm.weights("llm_2"), seed=0)
    algorithm.runners.call_one("load_weights", policy_id="llm_2", weights=stale, version=algorithm.updates)
    with pytest.raises(WeightSyncError, match="engine of llm_2 does not use"):
        algorithm.train()


def rows_with_diff(diff: float, logprob: float = -1.0) -> Rows:
    """Returns a row with this difference between sampler and learner at each token."""
    rows = make_rows([[1]], [[2, 3]], [[logprob + diff] * 2], [0.0], [False])
    return rows | {"logprobs": torch.full((1, 2), logprob)}


def test_the_fp32_limit_is_higher_with_vllm_on_a_gpu_because_of_tf32() -> None:
    on_cpu = make_settings({"gpus_per_runner": 0, "backend": "vllm"})
    on_gpu = make_settings({"gpus_per_runner": 0.5, "backend": "vllm"})
    other_backend = make_settings({"gpus_per_runner": 0.5, "backend": "transformers"})
    assert default_max_diff(torch.float32, on_cpu) == 0.001
    assert default_max_diff(torch.float32, on_gpu) == 0.005
    assert default_max_diff(torch.float32, other_backend) == 0.001
    assert default_max_diff(torch.bfloat16, on_gpu) == 0.05


def test_the_limit_depends_on_the_compute_type_unless_it_is_set(make_cory: MakeCory) -> None:
    fp32_check = make_cory().sync_check
    fp32_check.check_rows("llm_1", rows_with_diff(0.0009))
    fp32_check.check_rows(
        "llm_1", rows_with_diff(0.0, logprob=float("nan"))
    )  # a non-finite update is an error elsewhere
    for diff in (0.0011, float("nan")):
        with pytest.raises(WeightSyncError, match=r"max_logprob_diff=0\.001"):
            fp32_check.check_rows("llm_1", rows_with_diff(diff))
    with pytest.raises(WeightSyncError, match=r"max_logprob_diff=0\.05"):
        make_cory(dtype="bf16").sync_check.check_rows("llm_1", rows_with_diff(0.06))
    make_cory(max_logprob_diff=0.2).sync_check.check_rows("llm_1", rows_with_diff(0.1))
