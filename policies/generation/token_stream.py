"""A response as text while it is being generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a decoder gives for the first bytes of a character whose other bytes are in later tokens."""

WINDOW = 64
"""Tokens that are decoded anew with each next one; those before them stay as they are."""


class Detokenizer:
    """A response's tokens, as text: in pieces that no later token changes, up to the first of the stop texts."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        """Starts at nothing.

        Args:
            decode: tokens → text, as `Chain.decode_whole`.
            stops: texts before which it ends.
        """
        self.tokens: list[int] = []
        self.text = ""
        """What was told."""
        self.stopped = False
        """It came to a stop text."""
        self._decode = decode
        self._stops = stops
        self._settled, self._window = "", list[int]()

    def add(self, tokens: Sequence[int]) -> str:
        """Takes more tokens, and returns the next piece."""
        self.tokens += tokens
        self._window += tokens
        text = self._settled + self._decode(self._window)
        if len(self._window) >= WINDOW and not text.endswith(_INCOMPLETE):
            self._settled, self._window = text, []
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._tell(text[: min(found)])
        sure = text.rstrip(_INCOMPLETE)
        begun = (
            length
            for stop in self._stops
            for length in range(1, len(stop))
            if sure.endswith(stop[:length])  # it may become a stop text
        )
        return self._tell(sure[: len(sure) - max(begun, default=0)])

    def end(self) -> str:
        """Returns what was held back."""
        return "" if self.stopped else self._tell(self._settled + self._decode(self._window))

    def _tell(self, text: str) -> str:
        piece = text[len(self.text) :]
        self.text += piece
        return piece


class StepStreamer(BaseStreamer):
    """Hands each step's tokens, one per row of the batch, to a function as `transformers` samples them."""

    def __init__(self, on_step: Callable[[list[int]], None]) -> None:
        """Starts before the prompts."""
        self._on_step = on_step
        self._prompted = False

    def put(self, value: Tensor) -> None:
        """Takes the prompts, `[B, P]`, at the first call, and then new tokens, `[B]`."""
        if self._prompted:
            self._on_step(value.flatten().tolist())
        self._prompted = True

    def end(self) -> None:
        """Does nothing: whoever called `generate` knows."""
