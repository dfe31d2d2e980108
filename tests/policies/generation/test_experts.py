"""Mixture-of-experts models with vLLM: transformers' weight format differs from the checkpoints', which vLLM loads.

These tests are in their own file, because vLLM cannot start such an engine in a process with another kind of engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from policies.generation.installed import vllm_installed
from policies.generation.vllm_generator import VLLMGenerator
from policies.learning.policy_learner import PolicyLearner
from policies.models.weights import Weights
from policies.sync_check import perturb
from tests.paper import paper_hyperparameters
from tests.policies.conftest import make_model, weights_of
from tests.policies.generation.conftest import close_all
from tests.policies.generation.test_model_families import assert_synced, measure_weight_sync, save_model
from tests.policies.generation.test_weight_transfer import make_source, sample_logprobs, send

pytestmark = [
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def engines() -> Iterator[list[VLLMGenerator]]:
    """The engines of this process. They share its distributed state, so they are closed together."""
    engines: list[VLLMGenerator] = []
    yield engines
    close_all(engines)


def start(engines: list[VLLMGenerator], path: str, **settings: Any) -> VLLMGenerator:
    shape: dict[str, Any] = {"max_prompt_tokens": 64, "max_response_tokens": 8, "max_sequences": 4}
    engines.append(VLLMGenerator({"llm_1": path}, dtype="fp32", device=torch.device("cpu"), **shape, **settings))
    return engines[-1]


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "glm4_moe"])  # the last has a buffer in its checkpoint
def test_every_load_of_expert_weights_reaches_the_engine(
    engines: list[VLLMGenerator], tmp_path: Path, family: str
) -> None:
    path = save_model(tmp_path, family, False)
    engine = start(engines, path)
    assert_synced(measure_weight_sync(engine, path, "full"))
    assert_synced(measure_weight_sync(engine, path, "full"))


def test_experts_are_transferred_in_the_checkpoints_format(engines: list[VLLMGenerator], tmp_path: Path) -> None:
    path = save_model(tmp_path, "mixtral", False)
    engine = start(engines, path, weight_transfer="gloo")
    policy = PolicyLearner(make_model(path), paper_hyperparameters(steps=1))
    old: Weights = weights_of(policy.model)
    new = perturb(old, seed=1)
    engine.load("llm_1", new, 0)
    expected = sample_logprobs(engine)
    engine.load("llm_1", old, 1)
    assert sample_logprobs(engine) != expected
    loaded = send(engine, make_source(policy, new))
    assert loaded is not None and not loaded.stale
    assert sample_logprobs(engine) == expected


def test_weights_that_vllm_wrongly_reports_as_loaded_are_stale(engines: list[VLLMGenerator], tmp_path: Path) -> None:
    path = save_model(tmp_path, "gpt_oss", False)
    engine = start(engines, path)
    stale = engine.load("llm_1", weights_of(make_model(path)), 1).stale
    assert len(stale) == 10 and all("sinks" in name or "experts" in name for name in stale)
    assert sample_logprobs(engine)  # the engine still works, with the old weights
