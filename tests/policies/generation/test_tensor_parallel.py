"""An engine over two devices, for real: on a CPU they are processes. It answers as one over one device does."""

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
"""How the command of a process with a part of the model starts."""


class Observation(NamedTuple):
    """What an engine over some devices did."""

    followed: dict[str, float]
    """New weights, beside the learner (`follow`)."""
    responses: list[Response]
    """Under the new weights."""
    workers: int
    """Processes with a part of the model; 0: it is in the engine's own."""
    killed: list[str]
    """What was said when the last of them was killed: between two calls, and while new weights were loaded."""
    again: list[Response]
    """Of the engine in its place."""


def run_engine(path: str, way: str, parts: int) -> Observation:
    """Runs in a process of its own: vLLM decides once per process where its engines run."""
    settings: dict[str, Any] = {
        "max_prompt_tokens": 64,
        "max_response_tokens": 8,
        "max_sequences": 4,
        "lora": lora_of(way),
    }
    generator = VLLMGenerator(
        {"llm_1": path},
        dtype="fp32",
        device=torch.device("cpu"),
        tensor_parallel_size=parts,
        **settings,
    )
    sampling = Sampling(1.0, 8, range(len(PROMPTS)), [0])
    try:
        followed = measure_weight_sync(generator, path, way)
        responses = generator.generate(PROMPTS, "llm_1", sampling)
        count = len(named(WORKER))
        killed = []
        if count:
            named(WORKER)[-1].kill()
            with pytest.raises(GenerationError) as caught:
                generator.generate(PROMPTS, "llm_1", sampling)
            killed.append(str(caught.value))
            last = named(WORKER)[-1]
            last.suspend()  # so that it is in the middle of loading when it is killed
            threading.Timer(2.0, last.kill).start()
            with pytest.raises(GenerationError) as caught:
                measure_weight_sync(generator, path, way)
            killed.append(str(caught.value))
        return Observation(followed, responses, count, killed, generator.generate(PROMPTS, "llm_1", sampling))
    finally:
        generator.close()


@pytest.mark.parametrize(("way", "family"), [("full", "gpt2"), ("lora", "llama"), ("lora", "gpt2")])
def test_an_engine_on_two_devices_matches_one_device_loads_new_weights_and_restarts_after_a_worker_dies(
    tmp_path: Path, way: str, family: str
) -> None:
    path = save_model(tmp_path, family, tied=True)
    seen = []
    for parts in (1, 2):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            seen.append(pool.submit(run_engine, path, way, parts).result(timeout=280))
    whole, split = seen
    assert (whole.workers, split.workers) == (0, 2)
    assert_synced(split.followed)
    assert [response.tokens for response in split.responses] == [response.tokens for response in whole.responses]
    for one, two in zip(whole.responses, split.responses, strict=True):
        assert two.logprobs == pytest.approx(one.logprobs, abs=1e-4)
    assert split.killed == ["The vLLM engine of llm_1 died; it was restarted."] * 2
    assert [response.tokens for response in split.again] == [response.tokens for response in split.responses]


@pytest.mark.parametrize("way", [{"weights": "full"}, {"weight_transfer": "gloo"}, {"weights": "lora"}])
def test_a_runner_with_an_engine_on_two_devices_trains(make_cory: MakeCory, way: dict[str, Any]) -> None:
    settings = {"backend": "vllm", "num_runners": 1, "num_agents": 1, "runner_threads": 2, "tensor_parallel_size": 2}
    algorithm = make_cory(**settings, **way, check_weight_sync=True, lr=1e-3)
    assert algorithm.sync_check.probes["llm_1"].perturbed < 1e-3 < algorithm.sync_check.probes["llm_1"].moved
    for report in [algorithm.train()["cory"] for _ in range(2)]:
        assert report["logprob_diff_max"] < 1e-3 and report["weight_version_lag"] == 0
