"""vLLM engines in their own processes that are killed or hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import psutil
import pytest

from policies.generation.generator import GenerationError, Request, Response
from policies.generation.installed import vllm_installed
from policies.models.lora import Lora
from tests.policies.generation.test_vllm_generator import adapter_weights, make_generator, make_request, sampling

pytestmark = pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")


def provoke_engine_errors() -> tuple[list[str], list[bool]]:
    """Kills and stops engines. Must run in its own process, because vLLM decides once per process where engines run.

    Returns:
        The error messages, and whether responses are as expected.
    """
    prompts = [[5, 6, 7], [8, 9]]
    generator = make_generator(["llm_1", "llm_2"], lora=Lora(4, 8.0), in_process=False)

    def send(number: signal.Signals) -> None:
        engines = [p for p in psutil.Process().children(recursive=True) if "EngineCore" in "".join(p.cmdline())]
        assert len(engines) == 1
        os.kill(engines[0].pid, number)

    def error_of(call: Callable[[], Any]) -> str:
        try:
            call()
        except GenerationError as error:
            return str(error)
        return "no error"

    def generate(policy_id: str) -> list[list[int]]:
        return [response.tokens for response in generator.generate(prompts, policy_id, sampling(prompts))]

    try:
        for seed, policy_id in enumerate(generator.policy_ids):
            generator.load(policy_id, adapter_weights(seed), 5)
        expected = [generate(policy_id) for policy_id in generator.policy_ids]
        send(signal.SIGKILL)
        messages = [error_of(lambda: generate("llm_1"))]

        def kill(finished: Sequence[tuple[int, Response]]) -> list[Request]:
            send(signal.SIGKILL)
            return [make_request(2, prompts[0], 8)]

        first = [make_request(0, prompts[0], 8), make_request(1, prompts[1], 1)]
        messages.append(error_of(lambda: generator.run_requests(first, kill)))
        after_kill = [generate(policy_id) for policy_id in generator.policy_ids]
        send(signal.SIGSTOP)
        generator.timeout, max_model_len = 10.0, generator._arguments["max_model_len"]
        generator._arguments["max_model_len"] = 10**6  # so that a restart fails, as if memory were not free yet
        messages.append(error_of(lambda: generator.load("llm_1", adapter_weights(9), 6)))
        messages.append(error_of(lambda: generate("llm_2")))
        generator.timeout, generator._arguments["max_model_len"] = 600.0, max_model_len
        after_hang = [generate(policy_id) for policy_id in generator.policy_ids]
        return messages, [expected[0] != expected[1], after_kill == expected, after_hang == expected]
    finally:
        generator.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_process_that_dies_or_hangs_is_restarted_with_the_last_weights_of_every_adapter() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        (killed, killed_during_requests, hanging, dead), as_expected = pool.submit(provoke_engine_errors).result(
            timeout=580
        )
    assert "The vLLM engine of llm_1 died; it was restarted." in killed == killed_during_requests
    assert "The vLLM engine of llm_1 did not respond within 10 s, and restarting it failed. vLLM could" in hanging
    assert "The vLLM engine of llm_2 died, and restarting it failed. vLLM could" in dead
    assert all(as_expected)
