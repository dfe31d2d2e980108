"""Responses by `transformers`: those that wait for one policy at one temperature are a batch, and go on together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from launch.models.generators import transformers_generator
from launch.models.trained import Trained
from launch.models.trained_chain import COLDEST
from launch.serving.desk import Ask
from policies.generation.generator import Sampling


class TransformersBackend:
    """One batch after another."""

    def __init__(self, trained: Trained, policies: Sequence[str], at_once: int) -> None:
        """Loads the policies; at most `at_once` responses are a batch."""
        self._generator = transformers_generator(trained, policies)
        self._at_once = at_once
        self._waiting: list[Ask] = []

    def work(self, new: Sequence[Ask]) -> bool:
        """See `Backend.work`: writes the batch that the longest waiting one is in."""
        self._waiting = [ask for ask in [*self._waiting, *new] if not ask.done]
        if not self._waiting:
            return False
        kind = _kind(self._waiting[0])
        batch = [ask for ask in self._waiting if _kind(ask) == kind][: self._at_once]
        self._waiting = [ask for ask in self._waiting if ask not in batch]
        policy, temperature, stop_token_ids = kind
        sampling = Sampling(
            max(temperature, COLDEST),
            max(ask.max_tokens for ask in batch),
            [ask.seed for ask in batch],
            stop_token_ids,
        )
        try:
            self._generator.generate([ask.prompt for ask in batch], policy, sampling, _Rows(batch))
        except _AllDone:
            pass
        except Exception as error:  # those that wait for another batch may go on
            for ask in batch:
                ask.end(error)
        return bool(self._waiting)

    def drop(self) -> None:
        """See `Backend.drop`."""
        self._waiting.clear()

    def close(self) -> None:
        """See `Backend.close`."""
        self._generator.close()


def _kind(ask: Ask) -> tuple[str, float, tuple[int, ...]]:
    return ask.policy, ask.temperature, tuple(ask.stop_token_ids)


class _AllDone(Exception):
    """Nobody waits for more of a batch."""


class _Rows(BaseStreamer):
    """Tells each ask of a batch of its tokens."""

    def __init__(self, batch: Sequence[Ask]) -> None:
        self._batch = batch
        self._length: int | None = None  # of the responses so far

    def put(self, value: Tensor) -> None:
        """Takes the prompts, `[B, P]`, at the first call, and then a token of each row, `[B]`."""
        if self._length is None:
            self._length = 0
            return
        self._length += 1
        for ask, token in zip(self._batch, value.flatten().tolist(), strict=True):
            if ask.done:
                continue
            ask.say([token])
            if token in ask.stop_token_ids or self._length >= ask.max_tokens:
                ask.end()
        if all(ask.done for ask in self._batch):
            raise _AllDone

    def end(self) -> None:
        """Tells those that there is no more."""
        for ask in self._batch:
            ask.end()
