"""`VLLMGenerator.run_requests`: follow-up requests run together with unfinished ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cory_env.tokenizer import load_tokenizer
from policies.generation.generator import Request, Response
from policies.generation.installed import vllm_installed
from policies.generation.vllm_generator import VLLMGenerator
from tests.policies.generation.conftest import close_all
from tests.policies.generation.test_vllm_generator import MODEL, make_generator, make_request

pytestmark = [
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def generator() -> Iterator[VLLMGenerator]:
    """Two engines."""
    generator = make_generator(["llm_1", "llm_2"])
    yield generator
    close_all([generator])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(MODEL)
    return [tokenizer(text)["input_ids"] for text in ("This movie is", "I really liked", "The worst thing about it")]


def generate_alone(generator: VLLMGenerator, request: Request) -> list[int]:
    return generator.generate([request.prompt], request.policy_id, request.sampling)[0].tokens


def test_follow_up_requests_do_not_wait_for_other_responses_and_do_not_depend_on_them(
    generator: VLLMGenerator, prompts: list[list[int]]
) -> None:
    requests = {0: make_request(0, prompts[0], 8), 1: make_request(1, prompts[1], 2)}
    responses: dict[int, Response] = {}

    def on_finished(finished: Sequence[tuple[int, Response]]) -> list[Request]:
        responses.update(finished)
        new = [make_request(key + 1, prompts[key] + response.tokens, 2) for key, response in finished if 1 <= key < 3]
        requests.update({request.key: request for request in new})
        return new

    generator.run_requests(list(requests.values()), on_finished)
    assert list(responses) == [1, 2, 3, 0]
    for key, request in requests.items():
        assert responses[key].tokens == generate_alone(generator, request)


def test_responses_left_over_after_an_error_do_not_appear_in_the_next_call(
    generator: VLLMGenerator, prompts: list[list[int]]
) -> None:
    def fail(finished: Sequence[tuple[int, Response]]) -> list[Request]:
        raise ValueError("the reward failed")

    with pytest.raises(ValueError, match="the reward failed"):
        generator.run_requests([make_request(0, prompts[0], 8), make_request(1, prompts[1], 2)], fail)
    assert not generator.engines["llm_1"].llm_engine.has_unfinished_requests()
    assert len(generate_alone(generator, make_request(0, prompts[2], 4))) == 4


def test_requests_that_queue_up_for_an_engine_are_added_in_one_batch(
    generator: VLLMGenerator, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[tuple[str, int]] = []
    for name, engine in generator.engines.items():

        def record(inputs: Any, *args: Any, name: str = name, enqueue: Any = engine.enqueue, **kwargs: Any) -> Any:
            batches.append((name, len(inputs)))
            return enqueue(inputs, *args, **kwargs)

        monkeypatch.setattr(engine, "enqueue", record)

    def on_finished(finished: Sequence[tuple[int, Response]]) -> list[Request]:
        return [make_request(key + 4, prompts[key], 2, "llm_2") for key, _ in finished if key < 4]

    generator.run_requests([make_request(key, prompt, key + 1) for key, prompt in enumerate(prompts)], on_finished)
    assert [batch for batch in batches if batch[1]] == [("llm_1", 3), ("llm_2", 3)]
