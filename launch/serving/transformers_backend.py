"""Responses by `transformers`: those that wait for one policy at one temperature are a batch, and go on together."""

from __future__ import annotations

from collections.abc import Sequence

from launch.models.generators import transformers_generator
from launch.models.trained import Trained
from launch.models.trained_chain import COLDEST
from launch.serving.request_queue import GenerationRequest
from policies.generation.generator import Sampling
from policies.generation.token_stream import StepStreamer


class TransformersBackend:
    """One batch after another."""

    def __init__(self, trained: Trained, policies: Sequence[str], at_once: int) -> None:
        """Loads the policies; at most `at_once` responses are a batch."""
        self._generator = transformers_generator(trained, policies)
        self._at_once = at_once
        self._waiting: list[GenerationRequest] = []

    def step(self, new: Sequence[GenerationRequest]) -> bool:
        """See `Backend.step`: writes the batch that the longest waiting request is in."""
        self._waiting = [request for request in [*self._waiting, *new] if not request.done]
        if not self._waiting:
            return False
        kind = _kind(self._waiting[0])
        batch = [request for request in self._waiting if _kind(request) == kind][: self._at_once]
        self._waiting = [request for request in self._waiting if request not in batch]
        policy, temperature, stop_token_ids = kind
        sampling = Sampling(
            max(temperature, COLDEST),
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
                raise _AllDone

        try:
            prompts = [request.prompt for request in batch]
            self._generator.generate(prompts, policy, sampling, StepStreamer(put))
        except _AllDone:
            pass
        except Exception as error:  # those that wait for another batch may go on
            for request in batch:
                request.finish(error)
        return bool(self._waiting)

    def close(self) -> None:
        """See `Backend.close`."""
        self._generator.close()


def _kind(request: GenerationRequest) -> tuple[str, float, tuple[int, ...]]:
    return request.policy_id, request.temperature, tuple(request.stop_token_ids)


class _AllDone(Exception):
    """Nobody waits for more of a batch."""
