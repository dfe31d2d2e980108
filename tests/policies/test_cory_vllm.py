"""The default path as a whole: vLLM rollouts from a runner process, weights synced after every update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from policies.generation.installed import vllm_installed
from policies.models.weights import checksum
from tests.policies.conftest import MakeCory

pytestmark = [
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param({"weights": "full", "num_runners": 1}, marks=pytest.mark.slow),
        {"weights": "full", "num_runners": 1, "weight_transfer": "gloo", "num_learners": 1},
        pytest.param(
            {"weights": "full", "num_runners": 1, "weight_transfer": "gloo", "num_learners": 2}, marks=pytest.mark.slow
        ),
        pytest.param({"weights": "lora", "num_runners": 1}, marks=pytest.mark.slow),
        {"weights": "lora", "num_runners": 0},
    ],
)
def test_a_run_with_vllm_passes_the_self_test_syncs_every_update_and_agrees_with_the_learner(
    make_cory: MakeCory, way: dict[str, Any]
) -> None:
    algorithm = make_cory(**way, backend="vllm", check_weight_sync=True, exchange_period=1, lr=1e-3)
    for probe in algorithm.sync_check.probes.values():
        assert probe.perturbed < 1e-3 < probe.moved
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
    found = {}
    for backend, runners in (("vllm", 1), ("transformers", 0)):
        algorithm = make_cory(backend=backend, num_runners=runners, eval_queries=128)
        found[backend] = algorithm.evaluator.held_out()["evaluation"]["llm_1"]
    assert found["vllm"]["task_reward"] == pytest.approx(found["transformers"]["task_reward"], abs=0.5)
    assert found["vllm"]["response_length"] == pytest.approx(found["transformers"]["response_length"], abs=0.5)


def test_an_engine_beside_the_learner_plays_what_one_in_a_runner_plays_and_leaves_torch_its_threads(
    make_cory: MakeCory,
) -> None:
    set_num_threads = torch.set_num_threads
    found = []
    for runners in (0, 1):
        algorithm = make_cory(backend="vllm", num_runners=runners, lr=1e-3, check_weight_sync=runners == 0)
        found.append([algorithm.train()["cory"] for _ in range(2)])
        algorithm.stop()
    assert torch.set_num_threads is set_num_threads
    for beside, apart in zip(*found, strict=True):
        assert beside["policy"] == apart["policy"]
