"""An HTTP server that speaks OpenAI's API: models, chat completions, completions; streams as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import secrets
import signal
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

import fastapi
import uvicorn
from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

from cory_env.chain import PromptError, QueryTooLong
from cory_env.chat import ChatError
from cory_env.message import Message
from cory_env.tasks import Query
from launch.console.interrupts import stop_signals
from launch.models.trained_chain import check_prompts
from launch.serving.protocol import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    Reply,
    Request,
    RequestError,
    openai_error,
    validation_error,
)
from launch.serving.request_queue import RequestQueue
from launch.serving.responses import Choice, Piece, SamplingParams, ServedModel, pieces, respond_all

MAX_BODY = 2**20
"""Bytes of a request: nobody else is answered while it is cut into tokens."""
SHUTDOWN_SECONDS = 5.0
"""Time for the responses that are being written when the server ends."""
SENDING_SECONDS = 1.0
"""Time in which clients may then take what was written."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


def make_app(
    queue: RequestQueue, models: Mapping[str, ServedModel], temperature: float, api_key: str | None
) -> FastAPI:
    """Returns the application that answers clients of some policies and of their chain.

    Args:
        queue: generates.
        models: by the names that clients know them by.
        temperature: where a request says none.
        api_key: what clients must bring; None: nothing.
    """
    app = FastAPI(openapi_url=None)
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=MAX_BODY)
    for kind in (HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _error_response)
    created = int(time.time())
    limit = next(iter(models.values())).chain.max_response

    def check_key(key: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]) -> None:
        sent = "" if key is None else key.credentials
        if api_key is not None and not hmac.compare_digest(sent.encode(errors="replace"), api_key.encode()):
            raise RequestError(
                "The API key is missing or wrong. Send the server's as `Authorization: Bearer KEY`.",
                status=401,
                code="invalid_api_key",
            )

    def find_model(name: str) -> ServedModel:
        if name not in models:
            message = f"There is no model `{name}`. This server has: {', '.join(models)}."
            raise RequestError(message, status=404, param="model", code="model_not_found")
        return models[name]

    def model_entry(name: str) -> dict[str, Any]:
        return {"id": find_model(name).name, "object": "model", "created": created, "owned_by": "cory"}

    async def reply(http: fastapi.Request, request: Request, model: ServedModel, choices: Sequence[Choice]) -> Response:
        params = SamplingParams(
            temperature=temperature if request.temperature is None else request.temperature,
            max_tokens=min(request.max_completion_tokens or request.max_tokens or limit, limit),
            seed=secrets.randbits(31) if request.seed is None else request.seed,
            stops=request.stops,
        )
        write = partial(respond_all, queue, model, params, choices)
        if not request.stream:
            await _while_connected(http, write(lambda piece: None))
            return JSONResponse(Reply(request).whole(choices))
        stream = pieces(write)
        first = await _while_connected(http, anext(stream))  # what fails before is no stream, but an error
        headers = {"Cache-Control": "no-cache"}
        return StreamingResponse(_events(request, choices, first, stream), 200, headers, "text/event-stream")

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
        query = query_of(request, model)
        check_query(model, query, "messages")
        choices = [
            Choice(index, query=Query(index, query.text, history=query.history), shares_prompt=index > 0)
            for index in range(request.n or 1)
        ]
        return await reply(http, request, model, choices)

    @router.post("/completions")
    async def complete(http: fastapi.Request, request: CompletionRequest) -> Response:
        model, n = find_model(request.model), request.n or 1
        if not 1 <= len(request.prompts) * n <= MAX_CHOICES:
            raise RequestError(f"A request may have 1 to {MAX_CHOICES} responses.", param="prompt")
        choices: list[Choice] = []
        for prompt in request.prompts:
            text, tokens = ("", prompt) if not isinstance(prompt, str) else (prompt, None)
            if len(model.policies) == 1:
                tokens = encode_prompt(model, prompt)
            elif tokens is not None:
                raise RequestError(f"`{model.name}` takes a query as text, not tokens.", param="prompt")
            else:
                check_query(model, Query(0, text), "prompt")
            for sample in range(n):
                index = len(choices)
                choices.append(Choice(index, Query(index, text), prompt=tokens, shares_prompt=sample > 0))
        return await reply(http, request, model, choices)

    app.include_router(router)
    return app


async def _while_connected(http: fastapi.Request, work: Awaitable[T]) -> T:
    """Awaits what a client waits for; if it leaves first, the work is cancelled.

    Raises:
        RequestError: it left.
    """

    async def disconnected() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestError("The client left.", status=499)
        return await task
    finally:
        task.cancel()
        left.cancel()


async def _events(
    request: Request, choices: Sequence[Choice], first: Piece, rest: AsyncGenerator[Piece, None]
) -> AsyncGenerator[str, None]:
    """Yields a stream's events; what goes wrong now is one too."""
    reply = Reply(request)
    yield _event(reply.chunk(*first))
    async with contextlib.aclosing(rest):
        try:
            async for choice, piece in rest:
                yield _event(reply.chunk(choice, piece))
        except Exception as error:
            if not isinstance(error, HTTPException):
                logger.exception("A stream ended early.")
            yield _event(openai_error(error)[1])
            return
    for choice in choices:
        yield _event(reply.chunk(choice, None))
    if request.stream_options is not None and request.stream_options.include_usage:
        yield _event(reply.usage_chunk(choices))
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _error_response(_: fastapi.Request, error: Exception) -> JSONResponse:
    """Returns OpenAI's error object; of a failure uvicorn logs the traceback."""
    status, body = openai_error(
        validation_error(error.errors()) if isinstance(error, RequestValidationError) else error
    )
    return JSONResponse(body, status)


def query_of(request: ChatRequest, model: ServedModel) -> Query:
    """Returns what a conversation asks.

    Raises:
        RequestError: there is no such query.
    """
    *before, last = request.messages
    if last.role != "user":
        raise RequestError("The last message must be the user's.", param="messages")
    if any(message.tool_calls or message.function_call for message in request.messages):
        raise RequestError("Messages with tool calls are not supported. Leave those calls out.", param="messages")
    if model.chain.at[0].chat is None:
        if before:
            raise RequestError(
                "These policies were trained without a chat template (chat=false), so they take one message, the "
                "user's: the query.",
                param="messages",
            )
        return Query(0, last.text)
    history = [
        Message(role="system" if message.role == "developer" else message.role, content=message.text)
        for message in before
    ]
    return Query(0, last.text, history=tuple(history) or None)


def check_query(model: ServedModel, query: Query, param: str) -> None:
    """Refuses a query before anything is written.

    Raises:
        RequestError: it is empty, a role's prompt does not fit, or the model or its chat template cannot take it.
    """
    try:
        prompt = check_prompts(model.chain, query)
    except (PromptError, ChatError) as error:
        code = "context_length_exceeded" if isinstance(error, QueryTooLong) else None
        raise RequestError(str(error), param=param, code=code) from error
    if not prompt:
        raise RequestError("The query is empty.", param=param)


def encode_prompt(model: ServedModel, prompt: str | list[int]) -> list[int]:
    """Returns the token ids of a prompt as it is, without the run's template.

    Raises:
        RequestError: it is empty, too long, or has other tokens than the model.
    """
    chain = model.chain
    tokens: list[int] = chain.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    if not tokens:
        raise RequestError("The prompt is empty.", param="prompt")
    if not all(0 <= token < chain.num_embeddings for token in tokens):
        raise RequestError(f"Tokens are from 0 to {chain.num_embeddings - 1}.", param="prompt")
    if len(tokens) > chain.max_prompt:
        raise RequestError(
            f"The prompt has {len(tokens)} tokens, but this server takes at most {chain.max_prompt}. Shorten it, or "
            "start the server with a higher --max-prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
    return tokens


def listen(host: str, port: int) -> socket.socket:
    """Takes a port, before anything is loaded.

    Raises:
        OSError: it is in use, or there is no such host.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address, family=family)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `serve`, which takes SIGHUP too; uvicorn would raise them again at the end."""
        yield


def serve(
    app: FastAPI, queue: RequestQueue, sock: socket.socket, ready: Callable[[], None], ending: Callable[[], None]
) -> None:
    """Serves until Ctrl-C, SIGTERM or SIGHUP; responses that are being written then may be finished.

    Another Ctrl-C or SIGTERM kills; a second SIGHUP does not, which comes with the first when a terminal closes.

    Args:
        app: answers.
        queue: generates.
        sock: listens already.
        ready: is called when clients can come.
        ending: is called when the server was told to end.
    """

    async def main() -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=math.ceil(SHUTDOWN_SECONDS + SENDING_SECONDS),
        )
        server, loop, signals = _Server(config), asyncio.get_running_loop(), stop_signals()

        def end() -> None:
            for number in signals:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
            ending()
            server.should_exit = True
            error = RequestError("The server was ended before the answer was written.", status=503)
            loop.call_later(SHUTDOWN_SECONDS, queue.refuse, error)

        for number in signals:
            loop.add_signal_handler(number, end)
        ready()
        await server.serve([sock])

    asyncio.run(main())
