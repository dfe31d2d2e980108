"""An HTTP server with OpenAI's API: models, chat completions and completions, streamed as server-sent events."""

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
from cory_env.message import Message, TextError
from cory_env.rewarding.worker import RewardError
from cory_env.tasks import Query
from cory_env.tasks.task import TemplateError
from launch.serving.protocol import (
    MAX_CHOICES,
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    RequestError,
    openai_error,
)
from launch.serving.request_queue import RequestQueue
from launch.serving.responses import Choice, ResponseFormatter, SamplingParams, ServedModel, TextDelta, stream_choices

MAX_BODY_BYTES = 2**20
"""Maximum size of a request: tokenizing it blocks all other requests."""
SHUTDOWN_SECONDS = 5
"""Time for pending responses to finish at shutdown."""

logger = logging.getLogger(__name__)


def make_app(
    queue: RequestQueue,
    models: Mapping[str, ServedModel],
    temperature: float,
    api_key: str | None,
    unavailable: Mapping[str, str] | None = None,
) -> FastAPI:
    """Creates the web application.

    Args:
        queue: generates the tokens.
        models: model name to model.
        temperature: default of requests.
        api_key: key that clients must send; None or empty for no authentication.
        unavailable: model name to the reason why the model is not served.
    """
    app = FastAPI(openapi_url=None)
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=MAX_BODY_BYTES)
    client_errors = (HTTPException, RequestValidationError, PromptError, ChatError, TemplateError, TextError)
    for kind in (*client_errors, RewardError, Exception):
        app.add_exception_handler(kind, _error_response)
    created = int(time.time())

    def check_key(key: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]) -> None:
        client_key = "" if key is None else key.credentials
        if api_key and not hmac.compare_digest(
            client_key.encode(errors="replace"), api_key.encode(errors="surrogatepass")
        ):
            message = "The API key is missing or invalid. Send it as `Authorization: Bearer KEY`."
            raise RequestError(message, status=401, code="invalid_api_key")

    def find_model(name: str) -> ServedModel:
        if name not in models:
            reason = (unavailable or {}).get(name, f"Unknown model `{name}`.")
            message = f"{reason} This server has: {', '.join(models)}."
            raise RequestError(message, status=404, param="model", code="model_not_found")
        return models[name]

    def model_entry(name: str) -> dict[str, Any]:
        return {"id": find_model(name).name, "object": "model", "created": created, "owned_by": "cory"}

    async def respond(
        http: fastapi.Request, request: ApiRequest, model: ServedModel, choices: Sequence[Choice]
    ) -> Response:
        limit = model.chain.max_response_tokens
        params = SamplingParams(
            temperature=temperature if request.temperature is None else request.temperature,
            max_tokens=min(request.max_completion_tokens or request.max_tokens or limit, limit),
            seed=secrets.randbits(31) if request.seed is None else request.seed,
            stops=request.stop,
        )
        if model.feedback is not None:
            model.feedback.check_columns(request.columns)
        deltas = stream_choices(queue, model, params, choices)
        if request.stream:
            first = await anext(deltas)  # an error before the first delta gets an HTTP error status
            headers = {"Cache-Control": "no-cache"}
            return StreamingResponse(_events(request, choices, first, deltas), 200, headers, "text/event-stream")
        if not await _wait_for_completion(deltas, http):
            return Response(status_code=499)  # the client has disconnected
        return JSONResponse(ResponseFormatter(request).complete(choices))

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
        model = with_template_kwargs(find_model(request.model), request.chat_template_kwargs)
        text, history = parse_conversation(request, model)
        choices = [Choice(index, Query(index, text, request.columns, history)) for index in range(request.n)]
        return await respond(http, request, model, choices)

    @router.post("/completions")
    async def complete(http: fastapi.Request, request: CompletionRequest) -> Response:
        model = find_model(request.model)
        texts = [text for text in request.prompt for _ in range(request.n)]
        if len(texts) > MAX_CHOICES:
            raise RequestError(f"A request may have at most {MAX_CHOICES} responses.", param="prompt")
        if request.columns and len(request.prompt) > 1:
            raise RequestError("`columns` belong to one query. Send one prompt per request.", param="columns")
        choices = [Choice(index, Query(index, text, request.columns)) for index, text in enumerate(texts)]
        if len(model.policy_ids) == 1:  # a chain needs the query to build its prompts
            for choice, text in zip(choices, texts, strict=True):
                choice.prompt = encode_prompt(model, text)
        return await respond(http, request, model, choices)

    app.include_router(router)
    return app


async def _wait_for_completion(deltas: AsyncGenerator[TextDelta, None], http: fastapi.Request) -> bool:
    """Waits for the end of all responses; cancels them and returns False if the client disconnects."""

    async def consume() -> None:
        async for _ in deltas:
            pass

    async def wait_for_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    generation, disconnection = asyncio.create_task(consume()), asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait((generation, disconnection), return_when=asyncio.FIRST_COMPLETED)
        if is_complete := generation.done():
            generation.result()  # raises its exception
        return is_complete
    finally:
        generation.cancel()
        disconnection.cancel()


async def _events(
    request: ApiRequest, choices: Sequence[Choice], first: TextDelta, deltas: AsyncGenerator[TextDelta, None]
) -> AsyncGenerator[str, None]:
    """Yields the events of a stream. An error becomes an event, because the HTTP status has been sent."""
    formatter = ResponseFormatter(request)
    yield _event(formatter.chunk(first))
    async with contextlib.aclosing(deltas):
        try:
            async for delta in deltas:
                yield _event(formatter.chunk(delta))
        except Exception as error:
            logger.exception("A stream ended early.")
            yield _event(openai_error(error)[1])
            return
    for choice in choices:
        yield _event(formatter.final_chunk(choice))
    if request.stream_options.include_usage:
        yield _event(formatter.usage_chunk(choices))
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _error_response(_: fastapi.Request, error: Exception) -> JSONResponse:
    """Returns OpenAI's error object. For server errors, except of the feedback, uvicorn logs the traceback."""
    if isinstance(error, RewardError):
        logger.error("%s", error)
    status, body = openai_error(error)
    return JSONResponse(body, status)


def with_template_kwargs(model: ServedModel, arguments: Mapping[str, Any] | None) -> ServedModel:
    """Returns the model with a request's arguments of the chat template, which take precedence over the run's.

    Raises:
        RequestError: the model has no chat template, or it does not read an argument.
    """
    if not arguments:
        return model
    try:
        return model._replace(chain=model.chain.with_chat_template_kwargs(arguments))
    except ChatError as error:
        raise RequestError(str(error), param="chat_template_kwargs") from error


def parse_conversation(request: ChatRequest, model: ServedModel) -> tuple[str, tuple[Message, ...] | None]:
    """Returns the text of the last message, and the messages before it.

    Raises:
        RequestError: the last message is not the user's, or the model does not support earlier messages.
    """
    *history, last = request.messages
    if last.role != "user":
        raise RequestError("The last message must have the role user.", param="messages")
    if history and model.chain.by_position[0].chat is None:
        message = "These policies were trained without a chat template (chat=false). Send a single user message."
        raise RequestError(message, param="messages")
    messages = [
        Message(role="system" if message.role == "developer" else message.role, content=message.text)
        for message in history
    ]
    return last.text, tuple(messages) or None


def encode_prompt(model: ServedModel, text: str) -> list[int]:
    """Tokenizes a prompt without applying the run's template.

    Raises:
        RequestError: the prompt is too long, or contains a token without an embedding.
    """
    chain = model.chain
    tokens: list[int] = chain.tokenizer(text)["input_ids"]
    if len(tokens) > chain.max_prompt_tokens:
        message = (
            f"The prompt has {len(tokens)} tokens, but this run allows at most {chain.max_prompt_tokens}. Shorten it."
        )
        raise RequestError(message, param="prompt", code="context_length_exceeded")
    if max(tokens, default=0) >= chain.num_embeddings:
        raise RequestError("The prompt contains a token without an embedding in the model.", param="prompt")
    return tokens


def serve(app: FastAPI, sock: socket.socket) -> None:
    """Serves until Ctrl-C or SIGTERM, then waits up to `SHUTDOWN_SECONDS` for pending responses.

    Args:
        app: the application.
        sock: a listening socket.

    Raises:
        KeyboardInterrupt: always, because uvicorn re-raises the signal after shutdown. The caller's handler of SIGTERM
            must raise it too.
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
