"""An HTTP server that speaks OpenAI's API: models, chat completions, completions; streams as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any

import fastapi
import uvicorn
from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

from cory_env.chain import PromptError
from cory_env.chat import ChatError
from cory_env.message import Message
from cory_env.tasks import Query
from cory_env.tasks.task import TemplateError
from launch.serving.protocol import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    ApiRequest,
    RequestError,
    openai_error,
)
from launch.serving.request_queue import RequestQueue
from launch.serving.responses import Choice, TextDelta, ResponseFormatter, SamplingParams, ServedModel, stream_choices

MAX_BODY_BYTES = 2**20
"""Bytes of a request: nobody else is answered while it is cut into tokens."""
SHUTDOWN_SECONDS = 5
"""Time for the responses that are being written when the server ends."""

logger = logging.getLogger(__name__)


def make_app(
    queue: RequestQueue, models: Mapping[str, ServedModel], temperature: float, api_key: str | None
) -> FastAPI:
    """Returns the application that answers clients of some policies and of their chain.

    Args:
        queue: generates.
        models: by the names that clients know them by.
        temperature: where a request says none.
        api_key: what clients must bring; None or empty: nothing.
    """
    app = FastAPI(openapi_url=None)
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=MAX_BODY_BYTES)
    for kind in (HTTPException, RequestValidationError, PromptError, ChatError, TemplateError, Exception):
        app.add_exception_handler(kind, _error_response)
    created = int(time.time())
    limit = next(iter(models.values())).chain.max_response_tokens

    def check_key(key: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]) -> None:
        sent = "" if key is None else key.credentials
        if api_key and not hmac.compare_digest(sent.encode(errors="replace"), api_key.encode()):
            message = "The API key is missing or wrong. Send the server's as `Authorization: Bearer KEY`."
            raise RequestError(message, status=401, code="invalid_api_key")

    def find_model(name: str) -> ServedModel:
        if name not in models:
            message = f"There is no model `{name}`. This server has: {', '.join(models)}."
            raise RequestError(message, status=404, param="model", code="model_not_found")
        return models[name]

    def model_entry(name: str) -> dict[str, Any]:
        return {"id": find_model(name).name, "object": "model", "created": created, "owned_by": "cory"}

    async def reply(http: fastapi.Request, request: ApiRequest, model: ServedModel, choices: Sequence[Choice]) -> Response:
        params = SamplingParams(
            temperature=temperature if request.temperature is None else request.temperature,
            max_tokens=min(request.max_completion_tokens or request.max_tokens or limit, limit),
            seed=secrets.randbits(31) if request.seed is None else request.seed,
            stops=request.stop,
        )
        pieces = stream_choices(queue, model, params, choices)
        if request.stream:
            first = await anext(pieces)  # what fails before is no stream, but an error
            headers = {"Cache-Control": "no-cache"}
            return StreamingResponse(_events(request, choices, first, pieces), 200, headers, "text/event-stream")
        if not await _wait_for_completion(pieces, http):
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(ResponseFormatter(request).whole(choices))

    router = fastapi.APIRouter(prefix="/v1", dependencies=[Depends(check_key)])

    @app.get("/health")
    def health() -> Response:
        return Response(status_code=200 if queue.healthy else 503)

    @router.get("/models")
    def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [model_entry(name) for name in models]}

    @router.get("/models/{name}")
    def get_model(name: str) -> dict[str, Any]:
        return model_entry(name)

    @router.post("/chat/completions")
    async def chat(http: fastapi.Request, request: ChatRequest) -> Response:
        model = find_model(request.model)
        text, history = parse_conversation(request, model)
        choices = [Choice(index, Query(index, text, history=history)) for index in range(request.n)]
        return await reply(http, request, model, choices)

    @router.post("/completions")
    async def complete(http: fastapi.Request, request: CompletionRequest) -> Response:
        model = find_model(request.model)
        texts = [text for text in request.prompt for _ in range(request.n)]
        if len(texts) > MAX_CHOICES:
            raise RequestError(f"A request may have at most {MAX_CHOICES} responses.", param="prompt")
        choices = [Choice(index, Query(index, text)) for index, text in enumerate(texts)]
        if len(model.policies) == 1:  # the chain makes its prompts of queries
            for choice, text in zip(choices, texts, strict=True):
                choice.prompt = encode_prompt(model, text)
        return await reply(http, request, model, choices)

    app.include_router(router)
    return app


async def _wait_for_completion(pieces: AsyncGenerator[TextDelta, None], http: fastapi.Request) -> bool:
    """Lets the responses be written to their end; False if the client disconnects before, which cancels them."""

    async def write() -> None:
        async for _ in pieces:
            pass

    async def disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    writing, leaving = asyncio.create_task(write()), asyncio.create_task(disconnect())
    try:
        await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if finished := writing.done():
            writing.result()  # raises what went wrong
        return finished
    finally:
        writing.cancel()
        leaving.cancel()


async def _events(
    request: ApiRequest, choices: Sequence[Choice], first: TextDelta, rest: AsyncGenerator[TextDelta, None]
) -> AsyncGenerator[str, None]:
    """Yields a stream's events; what goes wrong now is one too."""
    reply = ResponseFormatter(request)
    yield _event(reply.chunk(*first))
    async with contextlib.aclosing(rest):
        try:
            async for choice, piece in rest:
                yield _event(reply.chunk(choice, piece))
        except Exception as error:
            logger.exception("A stream ended early.")
            yield _event(openai_error(error)[1])
            return
    for choice in choices:
        yield _event(reply.chunk(choice, None))
    if request.stream_options.include_usage:
        yield _event(reply.usage_chunk(choices))
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _error_response(_: fastapi.Request, error: Exception) -> JSONResponse:
    """Returns OpenAI's error object; of a failure uvicorn logs the traceback."""
    status, body = openai_error(error)
    return JSONResponse(body, status)


def parse_conversation(request: ChatRequest, model: ServedModel) -> tuple[str, tuple[Message, ...] | None]:
    """Returns what a conversation asks: the last message's text, and the messages before it.

    Raises:
        RequestError: the last message is not the user's, or the model takes no messages before it.
    """
    *before, last = request.messages
    if last.role != "user":
        raise RequestError("The last message must be the user's.", param="messages")
    if before and model.chain.at[0].chat is None:
        message = "These policies were trained without a chat template (chat=false): send one message, the user's."
        raise RequestError(message, param="messages")
    history = [
        Message(role="system" if message.role == "developer" else message.role, content=message.text)
        for message in before
    ]
    return last.text, tuple(history) or None


def encode_prompt(model: ServedModel, text: str) -> list[int]:
    """Returns the token ids of a prompt as it is, without the run's template.

    Raises:
        RequestError: it is too long, or has a token that the model has no embedding for.
    """
    chain = model.chain
    tokens: list[int] = chain.tokenizer(text)["input_ids"]
    if len(tokens) > chain.max_prompt_tokens:
        message = (
            f"The prompt has {len(tokens)} tokens, but this run takes at most {chain.max_prompt_tokens}. Shorten it."
        )
        raise RequestError(message, param="prompt", code="context_length_exceeded")
    if max(tokens, default=0) >= chain.num_embeddings:
        raise RequestError("The prompt holds a token that the model has no embedding for.", param="prompt")
    return tokens


def serve(app: FastAPI, sock: socket.socket) -> None:
    """Serves until Ctrl-C or SIGTERM; responses that are being written then have `SHUTDOWN_SECONDS`.

    Args:
        app: answers.
        sock: listens already.

    Raises:
        KeyboardInterrupt: always, as uvicorn repeats the signal when it has ended; SIGTERM must raise it too.
    """
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    uvicorn.Server(config).run([sock])
