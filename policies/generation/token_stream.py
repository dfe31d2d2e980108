"""A response as text while it is being generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a decoder gives for the first bytes of a character whose other bytes are in later tokens."""


class TokenStream(BaseStreamer):
    """Takes the tokens of one response from `transformers` as they come, and tells of its text in pieces.

    The pieces together are the response's text: a tail that later tokens could change is held back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], tell: Callable[[str], None]) -> None:
        """Starts before the prompt.

        Args:
            decode: tokens → text, as `Chain.decode`.
            tell: takes each new piece.
        """
        self._decode = decode
        self._tell = tell
        self._tokens: list[int] | None = None
        self._told = 0

    def put(self, value: Tensor) -> None:
        """Takes the prompt, `[1, P]`, at the first call, and then new tokens, `[1]`."""
        if self._tokens is None:
            self._tokens = []
            return
        self._tokens += value.flatten().tolist()
        text = self._decode(self._tokens)
        self._tell_up_to(text.rstrip(_INCOMPLETE))

    def end(self) -> None:
        """Tells what was held back."""
        self._tell_up_to(self._decode(self._tokens or []))

    def _tell_up_to(self, text: str) -> None:
        if len(text) > self._told:
            self._tell(text[self._told :])
            self._told = len(text)
