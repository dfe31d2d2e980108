"""Streaming detokenization: a response as text while it is being generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The decoder's output for a character whose remaining bytes are in later tokens."""

DECODE_WINDOW = 64
"""Number of last tokens that are decoded again with every new token. The text of earlier tokens is final."""


class Detokenizer:
    """Decodes a response's tokens incrementally, up to its first stop text. Emitted text never changes later."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        """Initializes an empty response.

        Args:
            decode: tokens → text, such as `Chain.decode_untruncated`.
            stops: stop texts. The response ends before the first one.
        """
        self.tokens: list[int] = []
        self.text = ""
        """The text emitted so far."""
        self.stopped = False
        """Whether a stop text was reached."""
        self._decode = decode
        self._stops = stops
        self._final_text, self._window = "", list[int]()

    def add(self, tokens: Sequence[int]) -> str:
        """Adds tokens, and returns the new text."""
        self.tokens += tokens
        self._window += tokens
        text = self._final_text + self._decode(self._window)
        if len(self._window) >= DECODE_WINDOW and not text.endswith(_INCOMPLETE):
            self._final_text, self._window = text, []
        stop_indices = [index for stop in self._stops if (index := text.find(stop)) >= 0]
        if stop_indices:
            self.stopped = True
            return self._emit(text[: min(stop_indices)])
        complete = text.rstrip(_INCOMPLETE)
        partial_stops = (
            length
            for stop in self._stops
            for length in range(1, len(stop))
            if complete.endswith(stop[:length])  # it may become a stop text
        )
        return self._emit(complete[: len(complete) - max(partial_stops, default=0)])

    def end(self) -> str:
        """Returns the remaining text at the end of the response."""
        return "" if self.stopped else self._emit(self._final_text + self._decode(self._window))

    def _emit(self, text: str) -> str:
        piece = text[len(self.text) :]
        self.text += piece
        return piece


class StepStreamer(BaseStreamer):
    """A `transformers` streamer that calls a function with each step's tokens, one per row of the batch."""

    def __init__(self, on_step: Callable[[list[int]], None]) -> None:
        """Initializes the streamer; it skips the prompts."""
        self._on_step = on_step
        self._received_prompts = False

    def put(self, value: Tensor) -> None:
        """Receives the prompts, `[B, P]`, at the first call, and new tokens, `[B]`, at later calls."""
        if self._received_prompts:
            self._on_step(value.flatten().tolist())
        self._received_prompts = True

    def end(self) -> None:
        """Does nothing, because `generate` returns to its caller at the same time."""
