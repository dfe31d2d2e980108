"""End-to-end tests with vLLM: rollouts in runner processes, weight syncs after every update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from policies.generation.installed import vllm_installed
from policies.models.weights import checksum
from tests.policies.conftest import MakeCory
from tests.policies.test_roles import frozen_team

pytestmark = [
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"weights": "full", "num_runners": 1}, marks=pytest.mark.slow),
        pytest.param(
            {"weights": "full", "num_runners": 1, "weight_transfer": "gloo", "num_learners": 1}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"weights": "full", "num_runners": 1, "weight_transfer": "gloo", "num_learners": 2}, marks=pytest.mark.slow
        ),
        pytest.param({"weights": "lora", "num_runners": 1}, marks=pytest.mark.slow),
        {"weights": "lora", "num_runners": 0},
    ],
)
def test_a_run_with_vllm_passes_the_weight_sync_check_and_agrees_with_the_learner_after_every_update(
    make_cory: MakeCory, settings: dict[str, Any]
) -> None:
    algorithm = make_cory(**settings, backend="vllm", check_weight_sync=True, exchange_period=1, lr=1e-3)
    starts = algorithm.sync_check.state
    assert starts.keys() == {*algorithm.settings.policy_ids} and all(mean < 1e-3 for mean, _, _ in starts.values())
    reports = [algorithm.train()["cory"] for _ in range(3)]
    for report in reports:
        assert report["logprob_diff_max"] < 1e-3
        assert report["weight_version_lag"] == 0
    assert [report["roles"]["pioneer"] for report in reports] == ["llm_1", "llm_2", "llm_1"]
    for policy_id in algorithm.settings.policy_ids:
        weights = algorithm.weights(policy_id)
        loaded = algorithm.runners.call_one("load_weights", policy_id=policy_id, weights=weights, version=3)
        assert loaded.checksum == checksum(weights)


@pytest.mark.slow
def test_vllm_and_transformers_sample_from_the_same_policy(make_cory: MakeCory) -> None:
    metrics = {}
    for backend, runners in (("vllm", 1), ("transformers", 0)):
        algorithm = make_cory(backend=backend, num_runners=runners, eval_queries=128)
        metrics[backend] = algorithm.evaluator.evaluate()["evaluation"]["llm_1"]
    for name in ("task_reward", "response_length"):
        assert metrics["vllm"][name] == pytest.approx(metrics["transformers"][name], abs=0.5)


@pytest.mark.slow
def test_an_engine_in_the_driver_matches_one_in_a_runner_and_leaves_torchs_threads_unchanged(
    make_cory: MakeCory,
) -> None:
    set_num_threads = torch.set_num_threads
    reports = []
    for runners in (0, 1):
        algorithm = make_cory(backend="vllm", num_runners=runners, lr=1e-3, check_weight_sync=runners == 0)
        reports.append([algorithm.train()["cory"] for _ in range(2)])
        algorithm.stop()
    assert torch.set_num_threads is set_num_threads
    for in_driver, in_runner in zip(*reports, strict=True):
        assert in_driver["policy"] == in_runner["policy"]


@pytest.mark.slow
def test_a_frozen_model_has_an_engine_without_adapters(make_cory: MakeCory) -> None:
    settings = frozen_team(weights="lora", backend="vllm", check_weight_sync=True, lr=1e-3)
    algorithm = make_cory(**settings)
    engines = algorithm.env_runner_group.local_env_runner.generator.engines
    assert list(engines) == ["all adapters", "frozen_1"]
    reports = [algorithm.train()["cory"] for _ in range(2)]
    assert all(0 < report["role"]["critic"]["response_length"] <= 3 for report in reports)
    assert all(report["logprob_diff_mean"] < 1e-4 for report in reports)
