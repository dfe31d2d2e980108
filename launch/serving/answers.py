"""One request's answers: a policy goes on from a text, or the policies of a chain answer a query in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.tasks import Query
from launch.serving.desk import Ask, Desk
from policies.generation.generator import EVALUATION_STREAM, sampling_seed
from policies.generation.token_stream import Detokenizer


class Served(NamedTuple):
    """What clients know as a model: a policy, or the chain."""

    name: str
    players: tuple[str, ...]
    """Policies in the order they answer."""
    chain: Chain


class Wanted(NamedTuple):
    """How a request wants to be answered."""

    temperature: float
    max_tokens: int
    """Of the last response; the earlier ones have the run's limit."""
    seed: int
    stops: Sequence[str]


class Draft(TypedDict):
    """An earlier response of the chain."""

    role: str
    policy: str
    content: str


@dataclass
class Choice:
    """An answer while it is written."""

    index: int
    again: bool = False
    """Its first prompt is that of the choice before it, and not counted again."""
    drafts: list[Draft] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    """Of all prompts, those of the drafts too."""
    completion_tokens: int = 0


async def respond(
    desk: Desk, served: Served, query: Query, wanted: Wanted, choice: Choice
) -> AsyncGenerator[str, None]:
    """Lets a model answer a query, as `cory generate` does; yields the last response in pieces, the first one empty.

    Args:
        desk: where responses are written.
        served: who answers.
        query: its number draws other samples.
        wanted: how.
        choice: is kept up to date; its drafts are there at the first piece.

    Raises:
        QueryTooLong: a prompt does not fit.
    """
    episode = ChainEpisode(served.chain, query)
    for position, policy in enumerate(served.players):
        last = position == len(served.players) - 1
        reads = served.chain.at[position]
        ask = Ask(
            policy,
            episode.prompt_ids(),
            wanted.temperature,
            wanted.max_tokens if last else reads.max_response,
            sampling_seed(wanted.seed, EVALUATION_STREAM, query.id, position),
            reads.stop_token_ids,
        )
        if position or not choice.again:
            choice.prompt_tokens += len(ask.prompt)
        if last:
            yield ""
            async with aclosing(_write(desk, ask, reads, wanted, choice)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        tokens: list[int] = []
        async with aclosing(desk.response(ask)) as told:
            async for more in told:
                tokens += more
        choice.completion_tokens += len(tokens)
        episode.respond({"tokens": tokens, "length": len(tokens)})
        choice.drafts.append(
            {"role": served.chain.roles[position], "policy": policy, "content": episode.completions[-1]}
        )


async def go_on(
    desk: Desk, served: Served, number: int, prompt: Sequence[int], wanted: Wanted, choice: Choice
) -> AsyncGenerator[str, None]:
    """Lets a policy go on from a prompt as it is, without the run's template; else as `respond`."""
    (policy,), reads = served.players, served.chain
    seed = sampling_seed(wanted.seed, EVALUATION_STREAM, number, 0)
    ask = Ask(policy, prompt, wanted.temperature, wanted.max_tokens, seed, reads.stop_token_ids)
    choice.prompt_tokens += 0 if choice.again else len(prompt)
    yield ""
    async with aclosing(_write(desk, ask, reads, wanted, choice)) as pieces:
        async for piece in pieces:
            yield piece


async def _write(desk: Desk, ask: Ask, reads: Chain, wanted: Wanted, choice: Choice) -> AsyncGenerator[str, None]:
    writing = Detokenizer(reads.decode_whole, [*wanted.stops, *reads.stops])
    async with aclosing(desk.response(ask)) as told:
        async for tokens in told:
            choice.completion_tokens += len(tokens)
            if piece := writing.add(tokens):
                choice.text += piece
                yield piece
            if writing.stopped:
                break
    if piece := writing.end():
        choice.text += piece
        yield piece
    ended = writing.stopped or (writing.tokens[-1:] and writing.tokens[-1] in ask.stop_token_ids)
    choice.finish_reason = "stop" if ended else "length"


async def together(
    answers: Sequence[tuple[Choice, AsyncGenerator[str, None]]],
) -> AsyncGenerator[tuple[Choice, str], None]:
    """Yields the pieces of all answers as they come.

    Raises:
        Exception: the first that an answer raised; the others end with it.
    """
    told: asyncio.Queue[tuple[Choice, str] | Exception | None] = asyncio.Queue()

    async def follow(choice: Choice, pieces: AsyncGenerator[str, None]) -> None:
        try:
            async for piece in pieces:
                told.put_nowait((choice, piece))
            told.put_nowait(None)
        except Exception as error:
            told.put_nowait(error)

    tasks = [asyncio.create_task(follow(choice, pieces)) for choice, pieces in answers]
    left = len(tasks)
    try:
        while left:
            item = await told.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
