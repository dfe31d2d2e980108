"""An HTTP server with OpenAI's API: models, chat completions and completions."""

from __future__ import annotations

import asyncio
import copy
import hmac
import logging
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import fastapi
import uvicorn
from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

from cory_env.episode import ChainEpisode
from cory_env.message import Message
from cory_env.rewarding.worker import RewardError
from cory_env.tasks import Query
from launch.models.trained_chain import TrainedChain
from launch.serving.batches import BatchRunner
from launch.serving.protocol import (
    MAX_CHOICES,
    QUERY_ERRORS,
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    RequestError,
    openai_error,
)
from launch.serving.responses import Continuation, format_events, format_response

MAX_BODY_BYTES = 2**20
"""Maximum size of a request: tokenizing it blocks all other requests."""
SHUTDOWN_SECONDS = 5
"""Time for pending responses to finish at shutdown."""

logger = logging.getLogger(__name__)


def make_app(runner: BatchRunner, models: Mapping[str, TrainedChain], api_key: str | None) -> FastAPI:
    """Creates the web application. Clients must send the API key, if there is one."""
    app = FastAPI(openapi_url=None)
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=MAX_BODY_BYTES)
    for kind in (HTTPException, RequestValidationError, *QUERY_ERRORS, RewardError, Exception):
        app.add_exception_handler(kind, _error_response)
    created = int(time.time())

    def check_key(key: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]) -> None:
        client_key = "" if key is None else key.credentials
        if api_key and not hmac.compare_digest(
            client_key.encode(errors="replace"), api_key.encode(errors="surrogatepass")
        ):
            message = "The API key is missing or invalid. Send it as `Authorization: Bearer KEY`."
            raise RequestError(message, status=401, code="invalid_api_key")

    def find_model(name: str) -> TrainedChain:
        if name not in models:
            message = f"Unknown model `{name}`. This server has: {', '.join(models)}."
            raise RequestError(message, status=404, param="model", code="model_not_found")
        return models[name]

    async def respond(
        http: fastapi.Request, request: ApiRequest, model: TrainedChain, episodes: Sequence[ChainEpisode]
    ) -> Response:
        """Responds to a request with one choice per episode."""
        if not all(episode.prompt_ids() for episode in episodes):
            raise RequestError("The prompt is empty.")
        limit = model.chain.max_response_tokens
        max_tokens = min(request.max_completion_tokens or request.max_tokens or limit, limit)
        seed = secrets.randbits(31) if request.seed is None else request.seed
        chains = [
            model.request(episode, temperature=request.temperature, seed=seed, max_tokens=max_tokens)
            for episode in episodes
        ]
        futures = [asyncio.wrap_future(runner.submit(chain)) for chain in chains]
        finished = asyncio.gather(*futures)
        finished.add_done_callback(asyncio.Future.exception)  # nobody else asks for it if the client disconnects
        disconnection = asyncio.create_task(_wait_for_disconnect(http))
        try:
            await asyncio.wait((finished, disconnection), return_when=asyncio.FIRST_COMPLETED)
            if not finished.done():
                return Response(status_code=499)  # the client has disconnected
            result = format_response(request, finished.result(), max_tokens)
        finally:
            disconnection.cancel()
            for future in futures:
                future.cancel()
        if not request.stream:
            return JSONResponse(result)
        events = format_events(result, include_usage=request.stream_options.include_usage)
        return Response("".join(events), media_type="text/event-stream")

    router = fastapi.APIRouter(prefix="/v1", dependencies=[Depends(check_key)])

    @app.get("/health")
    def health() -> Response:
        return Response(status_code=200 if runner.healthy else 503)

    @router.get("/models/{name}")
    def get_model(name: str) -> dict[str, Any]:
        find_model(name)
        return {"id": name, "object": "model", "created": created, "owned_by": "cory"}

    @router.get("/models")
    def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [get_model(name) for name in models]}

    @router.post("/chat/completions")
    async def chat(http: fastapi.Request, request: ChatRequest) -> Response:
        model = find_model(request.model)
        if request.chat_template_kwargs:  # they take precedence over the run's
            model = copy.copy(model)
            model.chain = model.chain.with_chat_template_kwargs(request.chat_template_kwargs)
        text, history = parse_conversation(request)
        queries = [Query(index, text, request.columns, history) for index in range(request.n)]
        model.check(queries[:1])
        return await respond(http, request, model, [ChainEpisode(model.chain, query) for query in queries])

    @router.post("/completions")
    async def complete(http: fastapi.Request, request: CompletionRequest) -> Response:
        model = find_model(request.model)
        texts = [text for text in request.prompt for _ in range(request.n)]
        if len(texts) > MAX_CHOICES:
            raise RequestError(f"A request may have at most {MAX_CHOICES} responses.", param="prompt")
        if request.columns and len(request.prompt) > 1:
            raise RequestError("`columns` belong to one query. Send one prompt per request.", param="columns")
        queries = [Query(index, text, request.columns) for index, text in enumerate(texts)]
        if len(model.policy_ids) == 1:
            return await respond(http, request, model, [Continuation(model.chain, query) for query in queries])
        model.check(queries[:: request.n])  # a chain needs the query to build its prompts
        return await respond(http, request, model, [ChainEpisode(model.chain, query) for query in queries])

    app.include_router(router)
    return app


async def _wait_for_disconnect(http: fastapi.Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _error_response(_: fastapi.Request, error: Exception) -> JSONResponse:
    """Returns OpenAI's error object. For server errors, except of the feedback, uvicorn logs the traceback."""
    if isinstance(error, RewardError):
        logger.error("%s", error)
    status, body = openai_error(error)
    return JSONResponse(body, status)


def parse_conversation(request: ChatRequest) -> tuple[str, tuple[Message, ...] | None]:
    """Returns the text of the last message, and the messages before it."""
    *history, last = request.messages
    if last.role != "user":
        raise RequestError("The last message must have the role user.", param="messages")
    messages = [
        Message(role="system" if message.role == "developer" else message.role, content=message.text)
        for message in history
    ]
    return last.text, tuple(messages) or None


def serve(app: FastAPI, sock: socket.socket) -> None:
    """Serves until Ctrl-C or SIGTERM, then waits up to `SHUTDOWN_SECONDS` for pending responses."""
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
