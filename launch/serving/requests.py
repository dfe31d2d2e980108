"""What clients may ask for, in the words of OpenAI's API, and how they are told what was wrong."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "response_format": ({"type": "text"},),
}
"""Parameters that would change the answer, and the values of them that do not."""
LOGPROBS = {"logprobs", "top_logprobs", "prompt_logprobs"}
"""Parameters that ask for log-probabilities: of `/v1/completions`, 0 asks for those of the answer's own tokens."""
IDLE = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
"""Parameters that change no answer."""
MOST = 64
"""Responses to one request."""


class RequestError(Exception):
    """A request that cannot be answered."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        """Takes what the client is told."""
        super().__init__(message)
        self.status = status
        self.body = error_body(message, status, param, code)


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Returns OpenAI's error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    """How to stream."""

    include_usage: bool = False


class Request(BaseModel):
    """What both kinds of request have."""

    model_config = ConfigDict(extra="allow")

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST)] | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def limit(self) -> int | None:
        """The longest response, in tokens."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> list[str]:
        """Texts before which a response ends."""
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if text]

    def check_extra(self) -> None:
        """Refuses what would have changed the answer, rather than leave it out without a word.

        Raises:
            RequestError: names the parameter.
        """
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IDLE or value in NEUTRAL.get(name, ()) or (name in LOGPROBS and value is False):
                continue
            if name in LOGPROBS:
                why = "this server gives no log-probabilities"
            elif name in NEUTRAL:
                why = "policies are sampled by temperature alone, as they were trained"
            else:
                why = "it is not known"
            raise RequestError(
                f"{name}={value!r} is not supported: {why}. Leave it out.", param=name, code="unsupported_parameter"
            )


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


class CompletionRequest(Request):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each a text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [each for each in self.prompt if not isinstance(each, int)]


FORMS = {"str", "int", "list[str]", "list[int]", "list[list[int]]", "list[Part]"}
"""By which pydantic tells the forms of one field apart."""
Kind = TypeVar("Kind", ChatRequest, CompletionRequest)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """Returns a request.

    Raises:
        RequestError: it is not one.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        closest = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
        where = ".".join(str(part) for part in closest["loc"] if part not in FORMS) or None
        raise RequestError(f"{where or 'the body'}: {closest['msg']}.", param=where) from error
    request.check_extra()
    return request
