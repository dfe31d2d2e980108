"""Tests of the weight-sync check during training: an engine with old weights ends the run, rounding does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from policies.generation.generator import LoadedWeights
from policies.generation.transformers_generator import TransformersGenerator
from policies.learning.rows import ScoredRows, Scores, make_rows
from policies.models.weights import Weights, checksum
from policies.rollout.runners import WeightSyncError
from policies.sync_check import LogprobDiff, check_diff, max_mean_diff, min_limit, perturb
from tests.paper import make_settings
from tests.policies.conftest import MakeCory
from tests.policies.test_losses import OLD_LOGPROBS

BF16 = make_settings({"dtype": "bf16"})
SMOLLM2 = LogprobDiff(mean=0.06, std=0.07, tokens=370)
"""SmolLM2-135M in bf16, with vLLM on a CPU."""


class StaleGenerator(TransformersGenerator):
    """Reports that it loaded new weights, but keeps the old ones."""

    def load(self, policy_id: str, weights: Weights, version: int) -> LoadedWeights:
        return LoadedWeights(version, checksum(weights))


def ignore_new_weights(runner: Any) -> None:
    runner.generator.__class__ = StaleGenerator


STALE = r"Sampler and learner of llm_1 differ: .* is 0\.\d+ ± \S+ nats per token \(\d+ tokens\) > 0\.001\d* \("


@pytest.mark.parametrize(
    "settings", [{"check_weight_sync": True}, {}, OLD_LOGPROBS["sampler"]], ids=["checked", "unchecked", "sampler"]
)
def test_an_engine_that_ignores_new_weights_ends_the_run_in_the_next_update(
    make_cory: MakeCory, settings: dict[str, Any]
) -> None:
    algorithm = make_cory(**settings, eval_every=100)
    algorithm.env_runner_group.foreach_env_runner(ignore_new_weights)
    algorithm.train()  # with the initial weights
    with pytest.raises(WeightSyncError, match=STALE):
        algorithm.train()
    assert algorithm.updates == 1


@pytest.mark.slow
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


@pytest.mark.parametrize("weights", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_the_error_names_the_policy_with_other_weights_in_bf16(make_cory: MakeCory, weights: str) -> None:
    algorithm = make_cory(dtype="bf16", weights=weights, check_weight_sync=True)
    other = perturb(algorithm.weights("llm_2"), seed=0)
    algorithm.train()
    algorithm.runners.call_one("load_weights", policy_id="llm_2", weights=other, version=algorithm.updates)
    with pytest.raises(WeightSyncError, match="learner of llm_2 differ"):
        algorithm.train()


def rows_with_diff(diff: float, logprob: float = -1.0) -> ScoredRows:
    """Returns two tokens with this difference between sampler and learner."""
    rows = make_rows([[1]], [[2, 3]], [[logprob + diff] * 2], [0.0], [False])
    return rows.with_scores(Scores(torch.full((1, 2), logprob), torch.zeros(1, 2)))


def test_the_lowest_limit_of_fp32_is_higher_with_vllm_on_a_gpu_because_of_tf32() -> None:
    on_cpu = make_settings({"gpus_per_runner": 0, "backend": "vllm"})
    on_gpu = make_settings({"gpus_per_runner": 0.5, "backend": "vllm"})
    other_backend = make_settings({"gpus_per_runner": 0.5, "backend": "transformers"})
    assert min_limit(torch.float32, on_cpu) == 0.001
    assert min_limit(torch.float32, on_gpu) == 0.005
    assert min_limit(torch.float32, other_backend) == 0.001
    assert min_limit(torch.bfloat16, on_gpu) == 0.05


def test_the_limit_is_relative_to_the_difference_at_start() -> None:
    assert max_mean_diff(10**9, LogprobDiff(0.1, 0.0, 100), 0.05) == pytest.approx(0.3)
    start = LogprobDiff(0.04, 0.02, 100)  # standard error 0.002
    assert max_mean_diff(10**9, start, 0.05) == pytest.approx(3 * (0.04 + 3 * 0.002), rel=1e-3)
    assert max_mean_diff(100, start, 0.05) == pytest.approx(3 * (0.04 + 3 * 0.002 * 2**0.5))  # of both means
    assert max_mean_diff(1, start, 0.05) == pytest.approx(3 * (0.04 + 3 * 0.02 * 1.01**0.5))
    assert max_mean_diff(100, LogprobDiff(1e-6, 1e-6, 100), 0.001) == 0.001
    assert max_mean_diff(100, LogprobDiff(0.2, 0.1, 100), 0.001) == 0.01  # rounding in fp32 does not explain this
    assert max_mean_diff(100, None, 0.05) == 0.5


def test_the_rounding_of_smollm2_passes_and_other_weights_do_not() -> None:
    for mean, tokens in ((0.042, 500), (0.0502, 36), (0.053, 500), (0.055, 36), (0.068, 14), (0.2, 1)):
        check_diff("llm_1", LogprobDiff(mean, mean, tokens), SMOLLM2, torch.bfloat16, BF16)
    for mean, tokens in ((0.3, 96), (0.5, 14), (1.7, 204), (float("nan"), 96), (float("inf"), 96)):
        with pytest.raises(WeightSyncError):
            check_diff("llm_1", LogprobDiff(mean, mean, tokens), SMOLLM2, torch.bfloat16, BF16)


def message(diff: LogprobDiff, start: LogprobDiff | None, dtype: torch.dtype, **settings: Any) -> str:
    with pytest.raises(WeightSyncError) as raised:
        check_diff("llm_2", diff, start, dtype, make_settings(settings))
    return str(raised.value)


def test_the_message_has_value_limit_start_and_advice() -> None:
    assert message(LogprobDiff(0.31234, 0.2, 400), SMOLLM2, torch.bfloat16) == (
        "Sampler and learner of llm_2 differ: mean |sampler - learner| log-probability is 0.3123 ± 0.01 nats per token "
        "(400 tokens) > 0.2254 (at start it was 0.06 ± 0.004 nats per token (370 tokens); the limit is 3 times that, "
        "from 0.05 to 0.5). Either both round differently, or the generation engine does not use the current weights. "
        "Run with dtype=fp32 to find out: if that run fails too, use another backend and report this. If it is "
        "rounding, raise max_logprob_diff."
    )
    fp32 = message(LogprobDiff(0.02, 0.02, 400), None, torch.float32)
    assert "0.02 ± 0.001 nats per token (400 tokens) > 0.01 (it was not measured at start; the limit is " in fp32
    assert "dtype=fp32" not in fp32


def test_max_logprob_diff_is_an_absolute_limit(make_cory: MakeCory) -> None:
    check = make_cory(max_logprob_diff=0.2).sync_check
    check.check_rows("llm_1", rows_with_diff(0.19))
    with pytest.raises(WeightSyncError, match=r"0\.21 .* > 0\.2 \(at start it was 0\.19"):
        check.check_rows("llm_1", rows_with_diff(0.21))


def test_without_the_check_at_start_the_first_comparison_is_the_start(make_cory: MakeCory) -> None:
    check = make_cory(dtype="bf16").sync_check
    check.check_rows("llm_1", rows_with_diff(0.0, logprob=float("nan")))  # a non-finite update is an error elsewhere
    with pytest.raises(WeightSyncError, match=r"0\.51 .* > 0\.5 \(it was not measured"):
        check.check_rows("llm_1", rows_with_diff(0.51))
    check.check_rows("llm_1", rows_with_diff(0.1))
    check.check_rows("llm_1", rows_with_diff(0.29))
    with pytest.raises(WeightSyncError, match=r"at start it was 0\.1 "):
        check.check_rows("llm_1", rows_with_diff(0.31))
    check.check_rows("llm_2", rows_with_diff(0.4))  # which has not been compared yet


def test_a_resumed_run_has_the_same_limits(make_cory: MakeCory, tmp_path: Path) -> None:
    algorithm = make_cory(check_weight_sync=True)
    state = algorithm.sync_check.state
    assert state["llm_1"][2] > 30 and state.keys() == {"llm_1", "llm_2"}
    algorithm.save_to_path(tmp_path)
    resumed = make_cory()
    assert not resumed.sync_check.state
    resumed.restore_from_path(tmp_path)
    assert resumed.sync_check.state == state
    resumed.sync_check.load({"llm_1": (0.01, 0.01, 50)})  # larger than what this device measures
    resumed.restore_from_path(tmp_path)
    assert resumed.sync_check.state == state | {"llm_1": (0.01, 0.01, 50)}


def test_merged_differences_equal_those_of_all_tokens() -> None:
    values = torch.rand(50, generator=torch.Generator().manual_seed(0))

    def measure(part: torch.Tensor) -> LogprobDiff:
        rows = make_rows([[1]], [[2] * len(part)], [part.tolist()], [0.0], [False])
        return LogprobDiff.measure(rows, torch.zeros(1, len(part)))

    assert measure(values[:20]).merge(measure(values[20:])) == pytest.approx(measure(values))
