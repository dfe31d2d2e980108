"""What generates under the request queue: vLLM's engines step by step, or batches by `transformers`."""

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


def make_backend(generator: TransformersGenerator | VLLMGenerator, policies: Sequence[str], at_once: int) -> Backend:
    """Returns the backend of a generator that holds some policies; of `transformers`, `at_once` bounds a batch."""
    if isinstance(generator, TransformersGenerator):
        return TransformersBackend(generator, at_once)
    return VLLMBackend(generator, policies)


class TransformersBackend:
    """One batch after another: of requests to one policy at one temperature."""

    def __init__(self, generator: TransformersGenerator, at_once: int) -> None:
        """Takes what generates; at most `at_once` responses are a batch."""
        self._generator = generator
        self._at_once = at_once
        self._waiting: list[GenerationRequest] = []

    def step(self, new: Sequence[GenerationRequest]) -> bool:
        """See `Backend.step`: writes the batch that the longest waiting request is in."""
        self._waiting = [request for request in [*self._waiting, *new] if not request.done]
        if not self._waiting:
            return False
        kind = policy, temperature, stop_token_ids = _batch_key(self._waiting[0])
        batch = [request for request in self._waiting if _batch_key(request) == kind][: self._at_once]
        self._waiting = [request for request in self._waiting if request not in batch]
        sampling = Sampling(
            max(temperature, MIN_TEMPERATURE),
            max(request.max_tokens for request in batch),
            [request.seed for request in batch],
            stop_token_ids,
        )
        length = 0

        def put(tokens: list[int]) -> None:
            nonlocal length
            length += 1
            for request, token in zip(batch, tokens, strict=True):
                if not request.done:
                    request.put([token])
                    if token in stop_token_ids or length >= request.max_tokens:
                        request.finish()
            if all(request.done for request in batch):
                raise _BatchFinished

        try:
            self._generator.generate([request.prompt for request in batch], policy, sampling, StepStreamer(put))
        except _BatchFinished:
            pass
        except Exception as error:  # those that wait for another batch may go on
            for request in batch:
                request.finish(error)
        return bool(self._waiting)

    def close(self) -> None:
        """See `Backend.close`."""
        self._generator.close()


def _batch_key(request: GenerationRequest) -> tuple[str, float, tuple[int, ...]]:
    return request.policy_id, request.temperature, tuple(request.stop_token_ids)


class _BatchFinished(Exception):
    """Nobody waits for more of a batch."""


class VLLMBackend:
    """An engine per policy, or one for all adapters; each step of one brings a token of every response it writes."""

    def __init__(self, generator: VLLMGenerator, policies: Sequence[str]) -> None:
        """Takes what generates, and the policies it holds."""
        from policies.generation import vllm_lora

        self._generator = generator
        self._adapters = (
            {}
            if generator.lora is None
            else {policy: vllm_lora.request(policy, number) for number, policy in enumerate(policies, start=1)}
        )
        self._requests: dict[str, dict[str, GenerationRequest]] = {engine: {} for engine in generator.engines}
        self._ids = count()

    def step(self, new: Sequence[GenerationRequest]) -> bool:
        """See `Backend.step`: one step of each engine that has something to do."""
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
                if engine not in self._generator.engines:  # it died, and no other could be started
                    raise
                self._generator.engines[engine].llm_engine.abort_request(ids)
        return any(self._requests.values())

    def close(self) -> None:
        """See `Backend.close`."""
        self._generator.close()

    def _step(self, requests: dict[str, GenerationRequest]) -> None:
        if not requests:
            return
        with self._generator.watched(next(iter(requests.values())).policy_id) as llm:
            if cancelled := [key for key, request in requests.items() if request.done]:
                llm.llm_engine.abort_request(cancelled)
                for key in cancelled:
                    del requests[key]
            outputs = llm.llm_engine.step() if requests else []
        for output in outputs:
            if (request := requests.get(output.request_id)) is None:
                continue
            if tokens := list(output.outputs[0].token_ids):
                request.put(tokens)
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
        policy, key = request.policy_id, str(next(self._ids))
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt))
        try:
            with self._generator.watched(policy) as llm:
                llm.llm_engine.add_request(key, prompt, params, lora_request=self._adapters.get(policy))
        except ValueError as error:  # vLLM refuses this request alone
            request.finish(error)
            return
        self._requests[policy if policy in self._requests else next(iter(self._requests))][key] = request
