"""The responses to one request: the policies of a model answer a query in turn, or one continues a text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.tasks import Query
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
    shares_prompt: bool = False
    """Its first prompt is that of the choice before it, and not counted again."""
    drafts: list[dict[str, str]] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    """Of all prompts, those of the drafts too."""
    completion_tokens: int = 0


Piece = tuple[Choice, str]
"""A piece of a choice's text; the first one is empty, and the drafts are complete then."""
Emit = Callable[[Piece], None]


async def respond(queue: RequestQueue, model: ServedModel, params: SamplingParams, choice: Choice, emit: Emit) -> None:
    """Lets a model answer, as `cory generate` does, and keeps the choice up to date.

    Args:
        queue: generates.
        model: answers.
        params: how.
        choice: what is asked, and what comes.
        emit: takes the last response in pieces.

    Raises:
        QueryTooLong: a prompt does not fit.
        Exception: of the queue.
    """
    episode = ChainEpisode(model.chain, choice.query)
    for position, policy in enumerate(model.policies):
        is_last = position == len(model.policies) - 1
        chain = model.chain.at[position]
        request = GenerationRequest(
            policy,
            episode.prompt_ids() if choice.prompt is None else choice.prompt,
            params.temperature,
            params.max_tokens if is_last else chain.max_response,
            sampling_seed(params.seed, EVALUATION_STREAM, choice.query.id, position),
            chain.stop_token_ids,
        )
        if position or not choice.shares_prompt:
            choice.prompt_tokens += len(request.prompt)
        if is_last:
            await _write_last(
                queue, request, Detokenizer(chain.decode_whole, [*params.stops, *chain.stops]), choice, emit
            )
            return
        tokens: list[int] = []
        async with aclosing(queue.generate(request)) as steps:
            async for new in steps:
                tokens += new
        choice.completion_tokens += len(tokens)
        episode.respond({"tokens": tokens, "length": len(tokens)})
        role = model.chain.roles[position]
        choice.drafts.append({"role": role, "policy": policy, "content": episode.completions[-1]})


async def _write_last(
    queue: RequestQueue, request: GenerationRequest, detokenizer: Detokenizer, choice: Choice, emit: Emit
) -> None:
    emit((choice, ""))
    async with aclosing(queue.generate(request)) as steps:
        async for tokens in steps:
            choice.completion_tokens += len(tokens)
            if piece := detokenizer.add(tokens):
                emit((choice, piece))
            if detokenizer.stopped:
                break
    if piece := detokenizer.end():
        emit((choice, piece))
    choice.text = detokenizer.text
    ended = detokenizer.stopped or (detokenizer.tokens and detokenizer.tokens[-1] in request.stop_token_ids)
    choice.finish_reason = "stop" if ended else "length"


async def respond_all(
    queue: RequestQueue, model: ServedModel, params: SamplingParams, choices: Sequence[Choice], emit: Emit
) -> None:
    """Writes all choices at once, as `respond`.

    Raises:
        Exception: the first that one of them raised; it ends the others.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(respond(queue, model, params, choice, emit))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def pieces(
    write: Callable[[Emit], Coroutine[None, None, None]],
) -> AsyncGenerator[Piece, None]:
    """Yields what a coroutine emits, and then raises what it raised. Closing the generator cancels it."""
    emitted: asyncio.Queue[Piece | None] = asyncio.Queue()
    task = asyncio.create_task(write(emitted.put_nowait))
    task.add_done_callback(lambda _: emitted.put_nowait(None))
    try:
        while (piece := await emitted.get()) is not None:
            yield piece
        await task
    finally:
        task.cancel()
