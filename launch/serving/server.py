"""An HTTP server that speaks OpenAI's API: models, chat completions, completions; streams as server-sent events."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import signal
import socket
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from aiohttp import web

from cory_env.chain import PromptError, QueryTooLong
from cory_env.chat import ChatError
from cory_env.episode import ChainEpisode
from cory_env.message import Message
from cory_env.tasks import Query
from launch.console.interrupts import stop_signals
from launch.serving.answers import Choice, Served, Wanted, go_on, respond, together
from launch.serving.desk import Desk
from launch.serving.forms import ChatForm, Form, TextForm, usage
from launch.serving.requests import (
    MOST,
    ChatRequest,
    CompletionRequest,
    Request,
    RequestError,
    error_body,
    parse,
)

LONGEST = 2**20
"""Bytes of a request: nobody else is answered while it is cut into tokens."""
PATIENCE = 5.0
"""Seconds in which answers that are being written may be finished when the server ends."""
FAREWELL = 1.0
"""Seconds in which clients may then take what was written."""

Answers = list[tuple[Choice, AsyncGenerator[str, None]]]


class Server:
    """Answers clients of some policies and of their chain."""

    def __init__(self, desk: Desk, models: Mapping[str, Served], temperature: float, api_key: str | None) -> None:
        """Puts the routes together.

        Args:
            desk: where responses are written.
            models: by the names that clients know them by.
            temperature: where a request says none.
            api_key: what clients must bring; None: nothing.
        """
        self._desk = desk
        self._models = models
        self._temperature = temperature
        self._api_key = api_key
        self._started = int(time.time())
        self._answering = 0
        self.app = web.Application(middlewares=[self._errors], client_max_size=LONGEST)
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._list),
                web.get("/v1/models/{name}", self._model),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._complete),
            ]
        )
        self.app.on_shutdown.append(self._finish)

    @web.middleware
    async def _errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Checks the key, and turns whatever goes wrong into OpenAI's error object."""
        try:
            if self._api_key is not None and request.path != "/health":
                _, _, key = request.headers.get("Authorization", "").partition("Bearer ")
                if not hmac.compare_digest(key.encode(errors="replace"), self._api_key.encode()):
                    raise RequestError(
                        "The API key is missing or wrong. Send the server's as `Authorization: Bearer KEY`.",
                        status=401,
                        code="invalid_api_key",
                    )
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            said = f"{error.reason}: {request.method} {request.path}."
            return web.json_response(error_body(said, error.status), status=error.status)
        except Exception as error:
            told = _told(error)
            return web.json_response(told.body, status=told.status)

    async def _finish(self, _: web.Application) -> None:
        """Lets the answers that are being written be finished; those that take too long end with an error."""
        deadline = time.monotonic() + PATIENCE
        while self._answering and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._desk.refuse(RequestError("The server was ended before the answer was written.", status=503))

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._desk.works else 503)

    async def _list(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._about(name) for name in self._models]})

    async def _model(self, request: web.Request) -> web.Response:
        return web.json_response(self._about(self._served(request.match_info["name"]).name))

    def _about(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "cory"}

    def _served(self, name: str) -> Served:
        if name not in self._models:
            raise RequestError(
                f"There is no model `{name}`. This server has: {', '.join(self._models)}.",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self._models[name]

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        request = parse(ChatRequest, await http.read())
        served, wanted = self._served(request.model), self._wanted(request)
        answers: Answers = []
        for index in range(request.n or 1):
            choice = Choice(index, again=index > 0)
            query = _query(request, served, index)
            if not index:
                _check(served, query, "messages")
            answers.append((choice, respond(self._desk, served, query, wanted, choice)))
        return await self._answer(http, request, answers, ChatForm(served.name))

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        request = parse(CompletionRequest, await http.read())
        served, wanted, n = self._served(request.model), self._wanted(request), request.n or 1
        if not request.prompts:
            raise RequestError("`prompt` is an empty list. Give at least one text.", param="prompt")
        if len(request.prompts) * n > MOST:
            raise RequestError(f"A request may have 1 to {MOST} responses.", param="prompt")
        answers: Answers = []
        for place, prompt in enumerate(request.prompts):
            if len(served.players) > 1 and not isinstance(prompt, str):
                raise RequestError(f"`{served.name}` takes a query as text, not tokens.", param="prompt")
            if len(served.players) > 1:
                _check(served, Query(place, str(prompt)), "prompt")
            else:
                prompt = _tokens(served, prompt)
            for index in range(place * n, (place + 1) * n):
                choice = Choice(index, again=index > place * n)
                if isinstance(prompt, str):
                    pieces = respond(self._desk, served, Query(index, prompt), wanted, choice)
                else:
                    pieces = go_on(self._desk, served, index, prompt, wanted, choice)
                answers.append((choice, pieces))
        return await self._answer(http, request, answers, TextForm(served.name))

    def _wanted(self, request: Request) -> Wanted:
        limit = next(iter(self._models.values())).chain.max_response
        return Wanted(
            temperature=self._temperature if request.temperature is None else request.temperature,
            max_tokens=min(request.limit or limit, limit),
            seed=secrets.randbits(31) if request.seed is None else request.seed,
            stops=request.stops,
        )

    async def _answer(self, http: web.Request, request: Request, answers: Answers, form: Form) -> web.StreamResponse:
        """Writes the answers, all at the end or as they come."""
        self._answering += 1
        try:
            return await self._written(http, request, answers, form)
        finally:
            self._answering -= 1

    async def _written(self, http: web.Request, request: Request, answers: Answers, form: Form) -> web.StreamResponse:
        choices = [choice for choice, _ in answers]
        async with aclosing(together(answers)) as pieces:
            if not request.stream:
                async for _ in pieces:
                    pass
                return web.json_response({**form.head(), "choices": form.whole(choices), "usage": usage(choices)})
            first = await anext(pieces)  # what cannot be answered at all is told before a stream begins
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await stream.prepare(http)

            async def send(data: dict[str, Any]) -> None:
                await stream.write(f"data: {json.dumps(data)}\n\n".encode())

            async def send_piece(choice: Choice, piece: str, begun: set[int]) -> None:
                delta = form.delta(choice, piece, first=choice.index not in begun)
                begun.add(choice.index)
                await send({**form.head(stream=True), "choices": [delta]})

            begun: set[int] = set()
            try:
                await send_piece(*first, begun)
                async for choice, piece in pieces:
                    await send_piece(choice, piece, begun)
            except ConnectionError:
                return stream
            except Exception as error:
                await send(_told(error).body)
                return stream
            for choice in choices:
                await send({**form.head(stream=True), "choices": [form.last(choice)]})
            if request.stream_options is not None and request.stream_options.include_usage:
                await send({**form.head(stream=True), "choices": [], "usage": usage(choices)})
            await stream.write(b"data: [DONE]\n\n")
            return stream


def _query(request: ChatRequest, served: Served, number: int) -> Query:
    """Returns what a conversation asks.

    Raises:
        RequestError: there is no such query.
    """
    *before, last = request.messages
    if last.role != "user":
        raise RequestError("The last message must be the user's.", param="messages")
    if any(each.tool_calls or each.function_call for each in request.messages):
        raise RequestError("Messages with tool calls are not supported. Leave those calls out.", param="messages")
    if served.chain.at[0].chat is None:
        if before:
            raise RequestError(
                "These policies were trained without a chat template (chat=false), so they take one message, the "
                "user's: the query.",
                param="messages",
            )
        return Query(number, last.text)
    history = [Message(role="system" if each.role == "developer" else each.role, content=each.text) for each in before]
    return Query(number, last.text, history=tuple(history) or None)


def _check(served: Served, query: Query, param: str) -> None:
    """Refuses a query before anything is written.

    Raises:
        RequestError: it is empty, or a role's prompt would not fit even without what others wrote, or holds a token
            that the model does not know.
    """
    try:
        prompt = ChainEpisode(served.chain, query).prompt_ids()
        for reader in dict.fromkeys(served.chain.at[1:]):
            reader.build_prompt(query, [[]])
    except PromptError as error:
        code = "context_length_exceeded" if isinstance(error, QueryTooLong) else None
        raise RequestError(str(error), param=param, code=code) from error
    if not prompt:
        raise RequestError("The query is empty.", param=param)


def _tokens(served: Served, prompt: str | list[int]) -> list[int]:
    """Returns a prompt as it is, in tokens.

    Raises:
        RequestError: it is empty, too long, or of other tokens.
    """
    chain = served.chain
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


def _told(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ChatError):
        return RequestError(str(error), param="messages")
    traceback.print_exception(error)  # it is whoever serves that can put it right
    return RequestError(f"{type(error).__name__}: {error}", status=500)


def listen(host: str, port: int) -> socket.socket:
    """Takes a port, before anything is loaded.

    Raises:
        OSError: it is in use, or there is no such host.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    taken = socket.socket(family, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(address)
        taken.listen(128)
    except OSError:
        taken.close()
        raise
    return taken


def serve(server: Server, at: socket.socket, ready: Callable[[], None], ending: Callable[[], None]) -> None:
    """Serves until Ctrl-C, SIGTERM or SIGHUP; answers that are being written then may be finished.

    Another Ctrl-C or SIGTERM kills; a second SIGHUP does not, which comes with the first when a terminal closes.

    Args:
        server: what answers.
        at: where.
        ready: is called when it does.
        ending: is called when it has been told to end.
    """

    async def main() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        signals = stop_signals()
        for number in signals:
            loop.add_signal_handler(number, ended.set)
        runner = web.AppRunner(server.app, handler_cancellation=True, shutdown_timeout=FAREWELL)
        await runner.setup()
        try:
            await web.SockSite(runner, at).start()
            ready()
            await ended.wait()
            for number in signals:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
            ending()
        finally:
            await runner.cleanup()

    asyncio.run(main())
