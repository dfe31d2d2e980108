"""Generation backends of the request queue: vLLM engines step by step, or `transformers` batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from launch.models.generators import MIN_TEMPERATURE
from launch.serving.request_queue import Backend, GenerationRequest
from policies.generation.generator import Sampling
from policies.generation.token_stream import StepStreamer
from policies.generation.transformers_generator import TransformersGenerator

if TYPE_CHECKING:
    from policies.generation.vllm_generator import VLLMGenerator


def make_backend(
    generator: TransformersGenerator | VLLMGenerator, policy_ids: Sequence[str], max_batch_size: int
) -> Backend:
    """Creates the backend of a generator.

    Args:
        generator: has loaded the policies.
        policy_ids: of the loaded policies.
        max_batch_size: of `transformers`.
    """
    if isinstance(generator, TransformersGenerator):
        return TransformersBackend(generator, max_batch_size)
    return VLLMBackend(generator, policy_ids)


class TransformersBackend:
    """Generates batch by batch; the requests of a batch share policy, temperature and stop tokens."""

    def __init__(self, generator: TransformersGenerator, max_batch_size: int) -> None:
        """Creates the backend; a batch has at most `max_batch_size` responses."""
        self._generator = generator
        self._max_batch_size = max_batch_size
        self._waiting: list[GenerationRequest] = []

    def step(self, new: Sequence[GenerationRequest]) -> bool:
        """See `Backend.step`. Generates the batch of the request that has waited longest."""
        self._waiting = [request for request in [*self._waiting, *new] if not request.done]
        if not self._waiting:
            return False
        key = policy_id, temperature, stop_token_ids = _batch_key(self._waiting[0])
        batch = [request for request in self._waiting if _batch_key(request) == key][: self._max_batch_size]
        self._waiting = [request for request in self._waiting if request not in batch]
        sampling = Sampling(
            max(temperature, MIN_TEMPERATURE),
            max(request.max_tokens for request in batch),
            [request.seed for request in batch],
            stop_token_ids,
        )
        length = 0

        def on_tokens(tokens: list[int]) -> None:
            nonlocal length
            length += 1
            for request, token in zip(batch, tokens, strict=True):
                if not request.done:
                    request.emit([token])
                    if token in stop_token_ids or length >= request.max_tokens:
                        request.finish()
            if all(request.done for request in batch):
                raise _BatchFinished

        try:
            prompts = [request.prompt for request in batch]
            self._generator.generate(prompts, policy_id, sampling, StepStreamer(on_tokens))
        except _BatchFinished:
            pass
        except Exception as error:  # requests of other batches continue
            for request in batch:
                request.finish(error)
        return bool(self._waiting)

    def close(self) -> None:
        """See `Backend.close`."""
        self._generator.close()


def _batch_key(request: GenerationRequest) -> tuple[str, float, tuple[int, ...]]:
    return request.policy_id, request.temperature, tuple(request.stop_token_ids)


class _BatchFinished(Exception):
    """All requests of a batch are done."""


class VLLMBackend:
    """Runs one engine per policy, or one for all adapters. An engine step adds a token to each of its responses."""

    def __init__(self, generator: VLLMGenerator, policy_ids: Sequence[str]) -> None:
        """Creates the backend of a generator that has loaded these policies."""
        from policies.generation import vllm_lora

        self._generator = generator
        self._adapters = (
            {}
            if generator.lora is None
            else {
                policy_id: vllm_lora.lora_request(policy_id, index)
                for index, policy_id in enumerate(policy_ids, start=1)
            }
        )
        self._requests: dict[str, dict[str, GenerationRequest]] = {engine: {} for engine in generator.engines}
        self._ids = count()

    def step(self, new: Sequence[GenerationRequest]) -> bool:
        """See `Backend.step`. Runs one step of each engine that has requests."""
        for request in new:
            self._add(request)
        for engine, requests in self._requests.items():
            try:
                self._step(requests)
            except Exception as error:
                for request in requests.values():
                    request.finish(error)
                ids = list(requests)
                requests.clear()
                if engine not in self._generator.engines:  # it died and could not be restarted
                    raise
                self._generator.engines[engine].llm_engine.abort_request(ids)
        return any(self._requests.values())

    def close(self) -> None:
        """See `Backend.close`."""
        self._generator.close()

    def _step(self, requests: dict[str, GenerationRequest]) -> None:
        if not requests:
            return
        with self._generator.watched(next(iter(requests.values())).policy_id) as vllm_engine:
            if cancelled := [key for key, request in requests.items() if request.done]:
                vllm_engine.llm_engine.abort_request(cancelled)
                for key in cancelled:
                    del requests[key]
            outputs = vllm_engine.llm_engine.step() if requests else []
        for output in outputs:
            if (request := requests.get(output.request_id)) is None:
                continue
            if tokens := list(output.outputs[0].token_ids):
                request.emit(tokens)
            if output.finished:
                del requests[output.request_id]
                request.finish()

    def _add(self, request: GenerationRequest) -> None:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            seed=request.seed,
            stop_token_ids=list(request.stop_token_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        policy_id, key = request.policy_id, str(next(self._ids))
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt))
        try:
            with self._generator.watched(policy_id) as vllm_engine:
                vllm_engine.llm_engine.add_request(key, prompt, params, lora_request=self._adapters.get(policy_id))
        except ValueError as error:  # vLLM rejects only this request
            request.finish(error)
            return
        engine = policy_id if policy_id in self._requests else next(iter(self._requests))
        self._requests[engine][key] = request
