"""OpenAI's API: request models and errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)
from starlette.exceptions import HTTPException

from cory_env.chat import ChatError
from cory_env.message import SURROGATE_PROBLEM, TextError, escape_surrogates, has_surrogate
from cory_env.prompt_encoder import PromptError, QueryTooLongError
from cory_env.tasks.rows import RESERVED
from cory_env.tasks.task import FEEDBACK_PLACEHOLDER, TemplateError
from launch.console.errors import CommandError

QUERY_ERRORS = (CommandError, PromptError, ChatError, TemplateError, TextError)
"""Errors of queries that a chain cannot answer."""
PLACEHOLDERS = ("query", "reference", FEEDBACK_PLACEHOLDER)
"""Placeholders of prompt templates that are not columns."""
MAX_CHOICES = 64
"""Maximum number of responses per request."""


class RequestError(HTTPException):
    """An invalid request."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message)
        self.param = param
        self.code = code


def openai_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Returns the HTTP status and OpenAI's error object for an exception."""
    if isinstance(error, RequestValidationError):
        error = _validation_error(error.errors()[0])
    elif isinstance(error, QUERY_ERRORS):
        error = RequestError(
            str(error), code="context_length_exceeded" if isinstance(error, QueryTooLongError) else None
        )
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = error.detail if isinstance(error, HTTPException) else f"{type(error).__name__}: {error}"
    kind = "invalid_request_error" if status < 500 else "server_error"
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return status, {"error": {"message": escape_surrogates(message), "type": kind, "param": param, "code": code}}


def _validation_error(error: dict[str, Any]) -> RequestError:
    _, *path = error["loc"]
    if error["type"] == "json_invalid" or not path:
        return RequestError("The body must be a JSON object.", param="body")
    param = ".".join(map(str, path))
    if error["type"] in ("extra_forbidden", "literal_error") and len(path) == 1:
        message = f"{param}={error['input']!r} is not supported: sampling uses temperature only. Omit it."
        return RequestError(message, param=param, code="unsupported_parameter")
    if path[-1] == "content" and error["input"] is None:
        return RequestError(f"{param} is null. Send the text of the message.", param=param)
    return RequestError(f"{param}: {error['msg'].removeprefix('Value error, ')}.", param=param)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def reject_reserved(columns: dict[str, Any]) -> dict[str, Any]:
    """Returns the columns of a request."""
    if reserved := sorted(columns.keys() & {*RESERVED, *PLACEHOLDERS}):
        raise ValueError(f"{reserved[0]} is reserved and cannot be a column")
    return columns


class StreamOptions(BaseModel):
    include_usage: bool = False


class ApiRequest(BaseModel):
    """Common fields of requests. Other fields would change the response, so they are rejected rather than ignored."""

    model_config = ConfigDict(extra="forbid")

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: NonNegativeInt | None = None
    stop: Annotated[list[str], BeforeValidator(_as_list), AfterValidator(lambda stops: [*filter(None, stops)])] = []
    """Texts that end a response and are not part of it. Empty ones are dropped, as they would match immediately."""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    columns: Annotated[dict[str, Any], AfterValidator(reject_reserved)] = {}
    """Not OpenAI's: data columns of the query, for the feedback between the agents and for prompt templates."""

    # Clients send these too. They do not affect the response, or only the neutral value is allowed.
    user: Any = None
    metadata: Any = None
    store: Any = None
    top_p: Literal[1] = 1
    top_k: Literal[0, -1] = -1
    min_p: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    repetition_penalty: Literal[1] = 1

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        """Drops null fields: clients that send all fields mean unset."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @field_validator("*", mode="before")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        if has_surrogate(value):
            raise ValueError(SURROGATE_PROBLEM)
        return value


class ContentPart(BaseModel):
    type: Literal["text"] = "text"
    text: str


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[ContentPart], BeforeValidator(lambda value: [ContentPart(text=value)] if isinstance(value, str) else value)
    ]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ChatRequest(ApiRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's: arguments of the chat template, in addition to the run's."""
    logprobs: Literal[False] = False  # not in ApiRequest: for completions it is a number, and 0 requests logprobs


class CompletionRequest(ApiRequest):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1)]
