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


class TokenStream(BaseStreamer):
    """Takes the tokens of one response from `transformers` as they come, and tells of its text in pieces."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], tell: Callable[[str], None], stops: Sequence[str] = ()
    ) -> None:
        """Starts before the prompt.

        Args:
            decode: tokens → text, as `Chain.decode_whole`.
            tell: takes each new piece.
            stops: texts before which it ends.
        """
        self._detokenizer = Detokenizer(decode, stops)
        self._tell = tell
        self._prompted = False

    def put(self, value: Tensor) -> None:
        """Takes the prompt, `[1, P]`, at the first call, and then new tokens, `[1]`."""
        if not self._prompted:
            self._prompted = True
        elif piece := self._detokenizer.add(value.flatten().tolist()):
            self._tell(piece)

    def end(self) -> None:
        """Tells what was held back."""
        if piece := self._detokenizer.end():
            self._tell(piece)
