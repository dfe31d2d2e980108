"""Responses by vLLM's engines in this process, which take new ones at every step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from launch.models.generators import vllm_generator
from launch.models.trained import Trained
from launch.serving.request_queue import GenerationRequest
from policies.generation import vllm_lora


class VLLMBackend:
    """An engine per policy, or one for all adapters; each step of one brings a token of every response it writes."""

    def __init__(self, trained: Trained, policies: Sequence[str], at_once: int) -> None:
        """Starts the engines and gives them their weights.

        Args:
            trained: whose the policies are.
            policies: their names.
            at_once: responses that an engine writes at once; more wait.

        Raises:
            CommandError: the checkpoint or the base model is not as it was, or vLLM has no place for all weights.
            EngineStartError: vLLM could not start.
        """
        self._generator = vllm_generator(trained, policies, at_once)
        self._adapters = (
            {}
            if trained.settings.lora is None
            else {policy: vllm_lora.request(policy, number) for number, policy in enumerate(policies, start=1)}
        )
        self._requests: dict[str, dict[str, GenerationRequest]] = {engine: {} for engine in self._generator.engines}
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
        except ValueError as error:  # vLLM refuses this one alone
            request.finish(error)
        else:
            engine = policy if policy in self._requests else next(iter(self._requests))
            self._requests[engine][key] = request
