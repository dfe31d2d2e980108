"""Responses by vLLM's engines in this process, which take new ones at every step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch

from launch.console.errors import CommandError
from launch.models.trained import Trained
from launch.serving.desk import Ask
from policies.generation import vllm_lora
from policies.generation.vllm_generator import VLLMGenerator
from policies.models.adapters import adapted
from policies.models.language_model import load_language_model
from policies.models.model_names import model_path


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
        settings = trained.settings
        models = {policy: model_path(trained.base(policy)) for policy in policies}
        found = {policy: trained.weights(policy) for policy in policies}
        for policy, path in models.items():
            model = load_language_model(path, settings.trust_remote_code, device="meta")
            model = model if settings.lora is None else adapted(model.requires_grad_(False), settings.lora)
            own = {name: each for name, each in model.named_parameters() if each.requires_grad}
            trained.check_base(policy, found[policy], own)
        self._generator = VLLMGenerator(
            models,
            dtype=settings.dtype,
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            max_prompt=settings.max_prompt,
            max_response=settings.max_response,
            max_sequences=at_once,
            trust_remote_code=settings.trust_remote_code,
            lora=settings.lora,
        )
        for policy, weights in found.items():
            if stale := self._generator.load(policy, weights, trained.update).stale:
                raise CommandError(
                    f"vLLM has no place for some weights of {policy}, such as {stale[0]}. Use --backend transformers."
                )
        self._adapters = (
            {}
            if settings.lora is None
            else {policy: vllm_lora.request(policy, number) for number, policy in enumerate(policies, start=1)}
        )
        self._asked: dict[str, dict[str, Ask]] = {engine: {} for engine in self._generator.engines}
        self._names = count()

    def work(self, new: Sequence[Ask]) -> bool:
        """See `Backend.work`: one step of each engine that has something to do."""
        for ask in new:
            self._add(ask)
        for name, asked in self._asked.items():
            engine = self._generator.engines[name].llm_engine
            if gone := [key for key, ask in asked.items() if ask.done]:
                engine.abort_request(gone)
                for key in gone:
                    del asked[key]
            if not asked:
                continue
            for output in engine.step():
                if (found := asked.get(output.request_id)) is None:
                    continue
                if tokens := list(output.outputs[0].token_ids):
                    found.say(tokens)
                if output.finished:
                    del asked[output.request_id]
                    found.end()
        return any(self._asked.values())

    def drop(self) -> None:
        """See `Backend.drop`."""
        for name, asked in self._asked.items():
            self._generator.engines[name].llm_engine.abort_request(list(asked))
            asked.clear()

    def close(self) -> None:
        """See `Backend.close`."""
        self._generator.close()

    def _add(self, ask: Ask) -> None:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine = ask.policy if ask.policy in self._asked else next(iter(self._asked))
        params = SamplingParams(
            temperature=ask.temperature,
            max_tokens=ask.max_tokens,
            seed=ask.seed,
            stop_token_ids=list(ask.stop_token_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        key = str(next(self._names))
        try:
            self._generator.engines[engine].llm_engine.add_request(
                key,
                TokensPrompt(prompt_token_ids=list(ask.prompt)),
                params,
                lora_request=self._adapters.get(ask.policy),
            )
        except ValueError as error:  # what vLLM refuses is this one's alone
            ask.end(error)
        else:
            self._asked[engine][key] = ask
