"""Engines with tensor parallelism over two devices, which are processes on a CPU, match engines on one device."""

from __future__ import annotations

import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.nodes import named
from policies.generation.generator import GenerationError, Response, Sampling
from policies.generation.installed import vllm_installed
from policies.generation.vllm_generator import VLLMGenerator
from tests.policies.conftest import MakeCory
from tests.policies.generation.test_model_families import (
    PROMPTS,
    assert_synced,
    lora_of,
    measure_weight_sync,
    save_model,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
    pytest.mark.timeout(900),
]

WORKER = "VLLM::Worker"
"""Start of a worker process's command line."""


class Observation(NamedTuple):
    """Results of one engine."""

    sync_result: dict[str, float]
    """See `measure_weight_sync`."""
    responses: list[Response]
    """With the new weights."""
    num_workers: int
    """Number of worker processes; 0 if the model is in the engine's process."""
    errors: list[str]
    """Errors after killing the last worker: between two calls, and while new weights were loaded."""
    responses_after_restart: list[Response]


def run_engine(path: str, weights: str, tensor_parallel_size: int) -> Observation:
    """Must run in a process of its own, because vLLM decides once per process where its engines run."""
    settings: dict[str, Any] = {
        "max_prompt_tokens": 64,
        "max_response_tokens": 8,
        "max_sequences": 4,
        "lora": lora_of(weights),
    }
    generator = VLLMGenerator(
        {"llm_1": path},
        dtype="fp32",
        device=torch.device("cpu"),
        tensor_parallel_size=tensor_parallel_size,
        **settings,
    )
    sampling = Sampling(1.0, 8, range(len(PROMPTS)), [0])
    try:
        sync_result = measure_weight_sync(generator, path, weights)
        responses = generator.generate(PROMPTS, "llm_1", sampling)
        num_workers = len(named(WORKER))
        errors = []
        if num_workers:
            named(WORKER)[-1].kill()
            with pytest.raises(GenerationError) as caught:
                generator.generate(PROMPTS, "llm_1", sampling)
            errors.append(str(caught.value))
            last = named(WORKER)[-1]
            last.suspend()  # so that it is killed while it loads
            threading.Timer(2.0, last.kill).start()
            with pytest.raises(GenerationError) as caught:
                measure_weight_sync(generator, path, weights)
            errors.append(str(caught.value))
        return Observation(sync_result, responses, num_workers, errors, generator.generate(PROMPTS, "llm_1", sampling))
    finally:
        generator.close()


@pytest.mark.parametrize(("weights", "family"), [("full", "gpt2"), ("lora", "llama"), ("lora", "gpt2")])
def test_an_engine_on_two_devices_matches_one_device_loads_new_weights_and_restarts_after_a_worker_dies(
    tmp_path: Path, weights: str, family: str
) -> None:
    path = save_model(tmp_path, family, tied=True)
    observations = []
    for devices in (1, 2):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            observations.append(pool.submit(run_engine, path, weights, devices).result(timeout=280))
    one, two = observations
    assert (one.num_workers, two.num_workers) == (0, 2)
    assert_synced(two.sync_result)
    tokens = [response.tokens for response in two.responses]
    assert tokens == [response.tokens for response in one.responses]
    for expected, response in zip(one.responses, two.responses, strict=True):
        assert response.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert two.errors == ["The vLLM engine of llm_1 died; it was restarted."] * 2
    assert [response.tokens for response in two.responses_after_restart] == tokens


@pytest.mark.parametrize("settings", [{"weights": "full"}, {"weight_transfer": "gloo"}, {"weights": "lora"}])
def test_a_runner_with_an_engine_on_two_devices_trains(make_cory: MakeCory, settings: dict[str, Any]) -> None:
    common = {"backend": "vllm", "num_runners": 1, "num_agents": 1, "runner_threads": 2, "tensor_parallel_size": 2}
    algorithm = make_cory(**common, **settings, check_weight_sync=True, lr=1e-3)
    assert algorithm.sync_check.state["llm_1"][0] < 1e-3
    for report in [algorithm.train()["cory"] for _ in range(2)]:
        assert report["logprob_diff_max"] < 1e-3 and report["weight_version_lag"] == 0
