"""What is sampled while a run trains is compared with the learner: an engine that stops following ends the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from policies.generation.generator import LoadedWeights
from policies.generation.transformers_generator import TransformersGenerator
from policies.learning.rows import Rows, make_rows
from policies.models.weights import Weights, checksum
from policies.rollout.runners import WeightSyncError
from policies.settings.settings import make_settings
from policies.sync_check import default_max_diff, perturb
from tests.policies.conftest import MakeCory


class Deaf(TransformersGenerator):
    """Says that it took new weights, and keeps the old ones."""

    def load(self, policy_id: str, weights: Weights, version: int) -> LoadedWeights:
        return LoadedWeights(version, checksum(weights))


def deafen(runner: Any) -> None:
    runner.generator.__class__ = Deaf


STALE = (
    r"engine of llm_1 does not sample by the weights that llm_1 learns: .* is 0\.\d+ nats a token, and "
    r"max_logprob_diff "
    r"is 0\.001\. If"
)


@pytest.mark.parametrize("check_weight_sync", [True, False])
def test_an_engine_that_ignores_new_weights_after_the_start_ends_the_run_in_the_next_update(
    make_cory: MakeCory, check_weight_sync: bool
) -> None:
    algorithm = make_cory(check_weight_sync=check_weight_sync, eval_every=100)
    algorithm.env_runner_group.foreach_env_runner(deafen)
    algorithm.train()  # by the initial weights, which it has
    with pytest.raises(WeightSyncError, match=STALE):
        algorithm.train()
    assert algorithm.updates == 1


def test_with_max_lag_it_ends_as_soon_as_it_should_have_new_weights(make_cory: MakeCory) -> None:
    algorithm = make_cory(check_weight_sync=True, max_lag=1, num_runners=1, eval_every=100)
    algorithm.env_runner_group.foreach_env_runner(deafen)
    with pytest.raises(WeightSyncError, match=STALE):
        algorithm.train()


@pytest.mark.slow
def test_with_max_lag_an_evaluation_finds_an_engine_that_stops_following_later(make_cory: MakeCory) -> None:
    algorithm = make_cory(max_lag=1, num_runners=1, eval_every=3)
    for _ in range(2):
        algorithm.train()
    algorithm.env_runner_group.foreach_env_runner(deafen)
    with pytest.raises(WeightSyncError, match=STALE):
        algorithm.train()


def test_other_weights_of_one_policy_are_found_and_its_name_told(make_cory: MakeCory) -> None:
    algorithm = make_cory()
    algorithm.train()
    stale = perturb(algorithm.weights("llm_2"), seed=0)
    algorithm.runners.call_one("load_weights", policy_id="llm_2", weights=stale, version=algorithm.updates)
    with pytest.raises(WeightSyncError, match="engine of llm_2 does not"):
        algorithm.train()


def rows_apart(diff: float, logprob: float = -1.0) -> Rows:
    """A row of which sampler and learner differ by so much in each token."""
    rows = make_rows([[1]], [[2, 3]], [[logprob + diff] * 2], [0.0], [False])
    return rows | {"logprobs": torch.full((1, 2), logprob)}


def test_vllm_on_a_gpu_may_differ_more_in_fp32_as_it_multiplies_in_tf32() -> None:
    on_cpu = make_settings({"gpus_per_runner": 0, "backend": "vllm"})
    on_gpu = make_settings({"gpus_per_runner": 0.5, "backend": "vllm"})
    other_backend = make_settings({"gpus_per_runner": 0.5, "backend": "transformers"})
    assert default_max_diff(torch.float32, on_cpu) == 0.001
    assert default_max_diff(torch.float32, on_gpu) == 0.005
    assert default_max_diff(torch.float32, other_backend) == 0.001
    assert default_max_diff(torch.bfloat16, on_gpu) == 0.05


def test_the_limit_follows_the_compute_type_unless_it_is_set(make_cory: MakeCory) -> None:
    strict = make_cory().sync_check
    strict.check_rows("llm_1", rows_apart(0.0009))
    strict.check_rows("llm_1", rows_apart(0.0, logprob=float("nan")))  # the learner's own; its update is refused
    for diff in (0.0011, float("nan")):
        with pytest.raises(WeightSyncError, match=r"max_logprob_diff is 0\.001"):
            strict.check_rows("llm_1", rows_apart(diff))
    with pytest.raises(WeightSyncError, match=r"max_logprob_diff is 0\.05"):
        make_cory(dtype="bf16").sync_check.check_rows("llm_1", rows_apart(0.06))
    make_cory(max_logprob_diff=0.2).sync_check.check_rows("llm_1", rows_apart(0.1))
