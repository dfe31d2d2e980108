"""The responses to one request: the policies of a model answer a query in turn, or one continues a text."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.tasks import Query
from launch.serving.protocol import ChatRequest, ApiRequest, RequestError
from launch.serving.request_queue import GenerationRequest, RequestQueue
from policies.generation.generator import EVALUATION_STREAM, sampling_seed
from policies.generation.token_stream import Detokenizer


class ServedModel(NamedTuple):
    """What clients know as a model: a policy, or the chain."""

    name: str
    policies: tuple[str, ...]
    """In the order they answer."""
    chain: Chain


class SamplingParams(NamedTuple):
    """How a request wants its responses."""

    temperature: float
    max_tokens: int
    """Of the last response; drafts have the run's limit."""
    seed: int
    stops: Sequence[str]


@dataclass
class Choice:
    """A response while it is written."""

    index: int
    query: Query
    """Its number draws the samples."""
    prompt: Sequence[int] | None = None
    """Token ids to continue as they are; None: the query is put into the run's template."""
    drafts: list[dict[str, str]] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    """Of all prompts, those of the drafts too."""
    completion_tokens: int = 0


TextDelta = tuple[Choice, str]
"""A piece of a choice's text; the first one is empty, and the drafts are complete then."""


async def stream_choices(
    queue: RequestQueue, model: ServedModel, params: SamplingParams, choices: Sequence[Choice]
) -> AsyncGenerator[TextDelta, None]:
    """Lets a model write all choices at once, as `cory generate` does; yields their last responses in pieces.

    Closing the generator cancels what is not written.

    Raises:
        RequestError: a prompt is empty.
        PromptError: a prompt does not fit, or holds a token that the model has no embedding for.
        Exception: of the queue. The first one ends all.
    """
    pieces: asyncio.Queue[TextDelta | None] = asyncio.Queue()

    async def write() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(_generate_choice(queue, model, params, choice, pieces.put_nowait))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            pieces.put_nowait(None)

    task = asyncio.create_task(write())
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        await task
    finally:
        task.cancel()


async def _generate_choice(
    queue: RequestQueue, model: ServedModel, params: SamplingParams, choice: Choice, emit: Callable[[TextDelta], None]
) -> None:
    episode = ChainEpisode(model.chain, choice.query)
    for position, policy in enumerate(model.policies):
        is_last = position == len(model.policies) - 1
        chain = model.chain.at[position]
        request = GenerationRequest(
            policy,
            episode.prompt_ids() if choice.prompt is None else choice.prompt,
            params.temperature,
            params.max_tokens if is_last else chain.max_response_tokens,
            sampling_seed(params.seed, EVALUATION_STREAM, choice.query.id, position),
            chain.stop_token_ids,
        )
        if not request.prompt:
            raise RequestError("The prompt is empty.")
        choice.prompt_tokens += len(request.prompt)
        detokenizer, tokens = Detokenizer(chain.decode_whole, [*params.stops, *chain.stops]), list[int]()
        if is_last:
            emit((choice, ""))
        async with aclosing(queue.generate(request)) as steps:
            async for new in steps:
                tokens += new
                if is_last and (piece := detokenizer.add(new)):
                    emit((choice, piece))
                if detokenizer.stopped:
                    break
        choice.completion_tokens += len(tokens)
        if not is_last:
            episode.respond({"tokens": tokens, "length": len(tokens)})
            role = model.chain.roles[position]
            choice.drafts.append({"role": role, "policy": policy, "content": episode.completions[-1]})
    if piece := detokenizer.end():
        emit((choice, piece))
    choice.text = detokenizer.text
    ended = detokenizer.stopped or (tokens and tokens[-1] in request.stop_token_ids)
    choice.finish_reason = "stop" if ended else "length"


class ResponseFormatter:
    """The shapes of the responses to a request, whole or in chunks."""

    def __init__(self, request: ApiRequest) -> None:
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
