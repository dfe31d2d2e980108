"""The shapes of answers in OpenAI's API: chat completions and completions, whole or in chunks."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from launch.serving.answers import Choice


class Form(ABC):
    """The shape of an answer."""

    prefix, whole_object, chunk_object = "", "", ""

    def __init__(self, model: str) -> None:
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model

    def head(self, stream: bool = False) -> dict[str, Any]:
        """What an answer, or a chunk of it, has beside its choices."""
        kind = self.chunk_object if stream else self.whole_object
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def whole(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """The choices of an answer that is not streamed."""
        return [
            {"index": each.index, **self.content(each), "logprobs": None, "finish_reason": each.finish_reason}
            for each in choices
        ]

    @abstractmethod
    def content(self, choice: Choice) -> dict[str, Any]:
        """What a choice says."""

    @abstractmethod
    def delta(self, choice: Choice, piece: str, *, first: bool) -> dict[str, Any]:
        """A choice in a chunk; the first one has its drafts."""

    @abstractmethod
    def last(self, choice: Choice) -> dict[str, Any]:
        """A choice in its last chunk."""


class ChatForm(Form):
    """Of `/v1/chat/completions`."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def content(self, choice: Choice) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": choice.text, **_drafts(choice)}}

    def delta(self, choice: Choice, piece: str, *, first: bool) -> dict[str, Any]:
        opening = {"role": "assistant", **_drafts(choice)} if first else {}
        return {"index": choice.index, "delta": {**opening, "content": piece}, "finish_reason": None}

    def last(self, choice: Choice) -> dict[str, Any]:
        return {"index": choice.index, "delta": {}, "finish_reason": choice.finish_reason}


class TextForm(Form):
    """Of `/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def content(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text, **_drafts(choice)}

    def delta(self, choice: Choice, piece: str, *, first: bool) -> dict[str, Any]:
        return {"index": choice.index, "text": piece, **(_drafts(choice) if first else {}), "finish_reason": None}

    def last(self, choice: Choice) -> dict[str, Any]:
        return {"index": choice.index, "text": "", "finish_reason": choice.finish_reason}


def _drafts(choice: Choice) -> dict[str, Any]:
    return {"drafts": choice.drafts} if choice.drafts else {}


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Returns what was read and written, in tokens."""
    read, written = sum(each.prompt_tokens for each in choices), sum(each.completion_tokens for each in choices)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
