"""OpenAI's API: what clients may ask for, the shapes of what they get, and errors."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from launch.serving.responses import Choice

MAX_CHOICES = 64
"""Responses to one request."""


class RequestError(HTTPException):
    """A request that cannot be answered."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        """Takes what the client is told."""
        super().__init__(status, message)
        self.param = param
        self.code = code


def openai_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Returns an error's HTTP status, and OpenAI's error object."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = error.detail if isinstance(error, HTTPException) else f"{type(error).__name__}: {error}"
    kind = "invalid_request_error" if status < 500 else "server_error"
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    """How to stream."""

    include_usage: bool = False


class Request(BaseModel):
    """What both kinds of request have. Other fields would change the response, so they are refused, not ignored."""

    model_config = ConfigDict(extra="forbid")

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Clients send these too. They change no response ...
    user: Any = None
    metadata: Any = None
    store: Any = None
    parallel_tool_calls: Any = None
    # ... and these only with another value than the one that is allowed.
    top_p: Literal[1] | None = None
    top_k: Literal[0, -1] | None = None
    min_p: Literal[0] | None = None
    best_of: Literal[1] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    repetition_penalty: Literal[1] | None = None
    logit_bias: dict[str, Literal[0]] | None = None
    echo: Literal[False] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        """Leaves out what is null, as clients that send all they have mean it."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @property
    def stops(self) -> list[str]:
        """Texts before which a response ends."""
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if text]


class Part(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: Literal[False] | None = None  # of completions it is a number, and 0 asks for some


class CompletionRequest(Request):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        is_tokens = bool(self.prompt) and isinstance(self.prompt[0], int)
        return [self.prompt] if is_tokens else self.prompt  # type: ignore[return-value, list-item]


def validation_error(errors: Sequence[Any]) -> RequestError:
    """Returns what a client is told of a request that the models refuse; `errors` are pydantic's."""
    closest = max(errors, key=lambda error: len(error["loc"]))  # of the types in a union, the one that fits best
    kind, (_, *path) = closest["type"], closest["loc"]
    if kind == "json_invalid" or not path:
        return RequestError("The body must be a JSON object, sent as `Content-Type: application/json`.")
    if kind in ("extra_forbidden", "literal_error", "too_long") and len(path) == 1:
        return RequestError(
            f"{path[0]}={closest['input']!r} is not supported: policies are sampled by temperature alone, as they were "
            "trained, without log-probabilities or tools. Leave it out.",
            param=path[0],
            code="unsupported_parameter",
        )
    param = ".".join(str(part) for part in path if part not in _UNION_MEMBERS)
    return RequestError(f"{param}: {closest['msg']}.", param=param)


_UNION_MEMBERS = {"str", "int", "list[str]", "list[int]", "list[list[int]]", "list[Part]"}
"""What pydantic puts into the path of an error for the types of a union."""


class Reply:
    """The shapes of the responses to a request, whole or in chunks."""

    def __init__(self, request: Request) -> None:
        """Draws an id."""
        self._is_chat = isinstance(request, ChatRequest)
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": request.model,
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Returns what is not streamed."""
        entries = [
            {**self._entry(choice, "message", choice.text, opens=True), "finish_reason": choice.finish_reason}
            for choice in choices
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": entries, "usage": _usage(choices)}

    def chunk(self, choice: Choice, piece: str | None) -> dict[str, Any]:
        """Returns a piece of a choice; the empty one opens it and brings the drafts, None ends it."""
        entry = self._entry(choice, "delta", piece, opens=piece == "")
        return self._chunk({**entry, "finish_reason": choice.finish_reason if piece is None else None})

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Returns the chunk after all choices."""
        return {**self._chunk(), "usage": _usage(choices)}

    def _entry(self, choice: Choice, chat_field: str, text: str | None, opens: bool) -> dict[str, Any]:
        drafts = {"drafts": choice.drafts} if opens and choice.drafts else {}
        if not self._is_chat:
            return {"index": choice.index, "text": text or "", **drafts}
        content = {} if text is None else {"content": text}
        return {"index": choice.index, chat_field: {**({"role": "assistant"} if opens else {}), **content, **drafts}}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": list(choices)}


def _usage(choices: Sequence[Choice]) -> dict[str, int]:
    read, written = sum(choice.prompt_tokens for choice in choices), sum(choice.completion_tokens for choice in choices)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
