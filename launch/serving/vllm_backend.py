"""Responses by vLLM's engines in this process, which take new ones at every step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from launch.models.generators import vllm_generator
from launch.models.trained import Trained
from launch.serving.desk import Ask
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
        self._asked: dict[str, dict[str, Ask]] = {engine: {} for engine in self._generator.engines}
        self._names = count()

    def work(self, new: Sequence[Ask]) -> bool:
        """See `Backend.work`: one step of each engine that has something to do."""
        for ask in new:
            self._add(ask)
        for asked in self._asked.values():
            if not asked:
                continue
            with self._generator.watched(next(iter(asked.values())).policy) as llm:
                if gone := [key for key, ask in asked.items() if ask.done]:
                    llm.llm_engine.abort_request(gone)
                    for key in gone:
                        del asked[key]
                outputs = llm.llm_engine.step() if asked else []
            for output in outputs:
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
            if name in self._generator.engines:  # else it died, and no other could be started yet
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
            with self._generator.watched(ask.policy) as llm:
                llm.llm_engine.add_request(
                    key,
                    TokensPrompt(prompt_token_ids=list(ask.prompt)),
                    params,
                    lora_request=self._adapters.get(ask.policy),
                )
        except ValueError as error:  # what vLLM refuses is this one's alone
            ask.end(error)
        else:
            self._asked[engine][key] = ask
