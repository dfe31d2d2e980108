"""A model behind an OpenAI-compatible API, whose responses a probe samples without its weights.

The API key is read from the environment variable OPENAI_API_KEY; if it is unset, EMPTY is sent, for servers that need
none. It is never written anywhere.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import numpy as np

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.message import Message
from cory_env.rewards.prepared import import_extra
from cory_env.tasks import Query
from launch.console.credentials import find_secret
from launch.console.errors import CommandError
from launch.probing.responder import Continue
from launch.probing.text_episode import TextEpisode
from policies.settings.settings import Settings

KEY = "OPENAI_API_KEY"
MAX_RETRIES = 4
"""Of a request after the first try; the client waits longer before each, or as long as the server asks for."""
DEFAULT_CONCURRENCY, DEFAULT_TIMEOUT = 8, 300.0
T = TypeVar("T")


class Endpoint(NamedTuple):
    """An OpenAI-compatible API.

    Attributes:
        url: Its base URL, usually up to `/v1`.
        model: The model's name in the API.
        concurrency: Maximum number of concurrent requests.
        timeout: Seconds that one request may take.
    """

    url: str
    model: str
    concurrency: int = DEFAULT_CONCURRENCY
    timeout: float = DEFAULT_TIMEOUT

    def check(self) -> None:
        """Checks the URL, that the client is installed, and the key.

        Raises:
            CommandError: The URL is invalid or contains a password, openai is not installed, or the key is not ASCII.
        """
        if secret := find_secret(self.url):
            raise CommandError(f"{secret}, which results would show. Set {KEY} in the environment instead.")
        try:
            parts = urlsplit(self.url)
            is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
            if "@" in parts.netloc or parts.fragment:
                raise CommandError(
                    f"--endpoint has a user name or a part after #, which results would show. Set {KEY} in the "
                    "environment instead."
                )
        except ValueError:  # a port that is no number, or a broken IPv6 address
            is_valid = False
        if not is_valid or self.url != self.url.strip():
            raise CommandError(f"--endpoint {self.url} is not a URL such as http://localhost:8000/v1.")
        try:
            import_extra("openai", "judge")
        except ModuleNotFoundError as error:
            raise CommandError(f"--endpoint requires the package openai. {error}.") from error
        if not api_key().isascii():
            raise CommandError(f"The environment variable {KEY} has characters that no API key has. Correct it.")


class ApiResponse(NamedTuple):
    """A response of the API: its text, its number of tokens with thoughts, and whether it is complete."""

    text: str
    length: int
    ended: bool


class EndpointResponder:
    """Lets an API respond in episodes, with several requests at once; see `Responder`."""

    def __init__(self, endpoint: Endpoint, settings: Settings) -> None:
        """Sends nothing yet."""
        self._endpoint, self._settings = endpoint, settings
        self._openai = import_extra("openai", "judge")
        self._client = self._openai.AsyncOpenAI(
            base_url=endpoint.url, api_key=api_key(), timeout=endpoint.timeout, max_retries=MAX_RETRIES
        )
        self._semaphore = asyncio.Semaphore(endpoint.concurrency)
        self._limit_name = "max_tokens"
        # In a thread of its own, as a notebook runs a loop already.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def make_episode(self, chain: Chain, query: Query) -> TextEpisode:
        """See `Responder`."""
        return TextEpisode(chain, query)

    def replay_first(self, chain: Chain, episode: ChainEpisode) -> TextEpisode:
        """See `Responder`."""
        copy = TextEpisode(chain, episode.query)
        text = episode.completions[0] if episode.has_answer(0) else None
        copy.respond_text(text, len(episode.responses[0]), ended=episode.ended[0])
        return copy

    def respond(
        self,
        episodes: Sequence[ChainEpisode],
        samples: Sequence[int],
        policy_ids: Sequence[str],
        temperature: float,
        continue_episodes: Continue | None = None,
    ) -> None:
        """See `Responder`. All policies are the API's model.

        Raises:
            CommandError: A request failed, also when it was retried; or a reply lacks its number of tokens.
        """
        while active := [episode for episode in episodes if episode.agent is not None]:
            if waiting := [episode for episode in active if episode.is_waiting]:
                assert continue_episodes is not None
                continue_episodes(waiting)
            self._run(self._respond_all(episodes, samples, temperature))

    def close(self) -> None:
        """Closes the connections."""
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # after Ctrl-C, it still runs
            raise

    async def _respond_all(self, episodes: Sequence[ChainEpisode], samples: Sequence[int], temperature: float) -> None:
        """Lets all episodes continue until they end or wait for feedback."""
        try:
            async with asyncio.TaskGroup() as group:
                for episode, sample in zip(episodes, samples, strict=True):
                    assert isinstance(episode, TextEpisode)
                    group.create_task(self._respond_in(episode, sample, temperature))
        except ExceptionGroup as errors:  # the first error has cancelled the other requests
            error: Exception = errors
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            raise self._explain(error) from error

    async def _respond_in(self, episode: TextEpisode, sample: int, temperature: float) -> None:
        settings, limits = self._settings, episode.chain.response_limits
        while episode.agent is not None and not episode.is_waiting:
            messages, turns = episode.messages(settings.system_prompt), episode.next_turns
            seeds = [_sampling_seed(settings.seed, episode.query.id, turn, sample) for turn in turns]
            async with asyncio.TaskGroup() as group:  # drafts do not see each other
                tasks = [
                    group.create_task(self._request(messages, limits[turn], temperature, seed))
                    for turn, seed in zip(turns, seeds, strict=True)
                ]
            for reply in (task.result() for task in tasks):
                episode.respond_text(self._remove_thought(reply.text), reply.length, ended=reply.ended)

    async def _request(self, messages: Sequence[Message], limit: int, temperature: float, seed: int) -> ApiResponse:
        s, name = self._settings, self._limit_name
        options: dict[str, Any] = {"temperature": temperature, "seed": seed, name: limit}
        options |= {} if s.stop is None else {"stop": s.stop}
        if s.chat_template_kwargs:
            options["extra_body"] = {"chat_template_kwargs": s.chat_template_kwargs}
        async with self._semaphore:
            try:
                completion = await self._client.chat.completions.create(
                    model=self._endpoint.model, messages=messages, **options
                )
            except self._openai.BadRequestError as error:
                if name != "max_tokens" or "max_completion_tokens" not in str(error):
                    raise
                self._limit_name = "max_completion_tokens"  # the name that OpenAI's reasoning models insist on
                completion = None
        if completion is None:
            return await self._request(messages, limit, temperature, seed)
        if not isinstance(completion, self._openai.types.chat.ChatCompletion) or not completion.choices:
            raise self._unlike_api()
        if completion.usage is None or completion.usage.completion_tokens is None:
            raise CommandError(
                f"{self._endpoint.url} does not report `usage.completion_tokens`, so answers cannot be compared at "
                "equal tokens. Use a server that does, such as vLLM's."
            )
        choice = completion.choices[0]
        text = (choice.message.content or "").encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair
        return ApiResponse(text, completion.usage.completion_tokens, choice.finish_reason != "length")

    def _remove_thought(self, text: str) -> str | None:
        """Returns the text after a thought that the server left in it; None if the thought was cut off."""
        tags = self._settings.thinking
        if tags is None:
            return text
        _, end, answer = text.partition(tags.end)
        if end:
            return answer
        return None if text.lstrip().startswith(tags.start) else text

    def _unlike_api(self) -> CommandError:
        return CommandError(
            f"{self._endpoint.url} does not answer like OpenAI's API. Correct --endpoint, which usually ends in /v1."
        )

    def _explain(self, error: Exception) -> Exception:
        """Returns the error for the user; a bug unchanged."""
        url, model, concurrency, timeout = self._endpoint
        openai, tries = self._openai, MAX_RETRIES + 1
        if isinstance(error, openai.APITimeoutError):
            return CommandError(
                f"{url} did not answer within {timeout:g} s, {tries} times. Raise --timeout, or lower --concurrency, "
                f"now {concurrency}."
            )
        if isinstance(error, openai.APIConnectionError):
            cause = _one_line(str(error.__cause__ or error)).rstrip(".")
            return CommandError(f"{url} cannot be reached: {cause}. Correct --endpoint, or start the server.")
        if isinstance(error, openai.APIStatusError):
            status = error.status_code
            message = _one_line(_server_message(error.body))
            reason = f"HTTP {status}{f': {message}' if message else ''}".rstrip(".")
            if status in (401, 403):
                remedy = "Correct" if os.environ.get(KEY) else "Set"
                return CommandError(f"{url} rejects the API key ({reason}). {remedy} {KEY} in the environment.")
            if status == 404:
                return CommandError(
                    f"{url} has no model {model}, or is not the API ({reason}). Correct --model, or --endpoint, which "
                    "usually ends in /v1."
                )
            if status == 429:
                return CommandError(
                    f"{url} refuses so many requests, {tries} times ({reason}). Lower --concurrency, now "
                    f"{concurrency}, or wait."
                )
            if status >= 500:
                return CommandError(f"{url} failed {tries} times ({reason}). Look at the server, or try again.")
            return CommandError(f"{url} rejects a request ({reason}).")
        if isinstance(error, openai.APIError | ValueError) and not isinstance(error, UnicodeError):
            return self._unlike_api()  # not valid JSON
        return error


def api_key() -> str:
    """Returns the API key from the environment."""
    return os.environ.get(KEY, "").strip() or "EMPTY"


def _sampling_seed(seed: int, query: int, turn: int, sample: int) -> int:
    """Returns a seed of 31 bits, as not all servers take more."""
    return int(np.random.SeedSequence([seed, query, turn, sample]).generate_state(1)[0]) >> 1


def _server_message(body: object) -> str:
    """Returns the message in the body of an error, without its HTML."""
    if isinstance(body, Mapping):
        message = body.get("message", body.get("detail", ""))
        return message if isinstance(message, str) else str(message)
    return body if isinstance(body, str) and "<" not in body else ""


def _one_line(text: str) -> str:
    """Returns the text of a server's error in one line of moderate length, without the key."""
    key = api_key()
    line = " ".join(text.split())
    return (line if key == "EMPTY" else line.replace(key, "***"))[:300]
