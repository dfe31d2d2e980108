"""One request's answers: a policy goes on from a text, or the policies of a chain answer a query in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.tasks import Query
from launch.serving.desk import Ask, Desk
from policies.generation.generator import EVALUATION_STREAM, sampling_seed

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a decoder gives for the first bytes of a character whose other bytes are in later tokens."""

WINDOW = 64
"""Tokens that are decoded anew with each next one; those before them stay as they are."""


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


class Writing:
    """A response's tokens, as text: in pieces that no later token changes, up to the first of the stop texts."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        """Starts at nothing.

        Args:
            decode: tokens → text, as `Chain.decode`.
            stops: texts before which it ends.
        """
        self.tokens: list[int] = []
        self.text = ""
        """What was told."""
        self.stopped = False
        """It came to a stop text."""
        self._decode = decode
        self._stops = stops
        self._settled, self._window = "", list[int]()

    def add(self, tokens: Sequence[int]) -> str:
        """Takes more tokens, and returns the next piece."""
        self.tokens += tokens
        self._window += tokens
        text = self._settled + self._decode(self._window)
        if len(self._window) >= WINDOW and not text.endswith(_INCOMPLETE):
            self._settled, self._window = text, []
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._tell(text[: min(found)])
        sure = text.rstrip(_INCOMPLETE)
        begun = (
            length
            for stop in self._stops
            for length in range(1, len(stop))
            if sure.endswith(stop[:length])  # it may become a stop text
        )
        return self._tell(sure[: len(sure) - max(begun, default=0)])

    def end(self) -> str:
        """Returns what was held back."""
        return "" if self.stopped else self._tell(self._settled + self._decode(self._window))

    def _tell(self, text: str) -> str:
        piece = text[len(self.text) :]
        self.text += piece
        return piece


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
            async with aclosing(_write(desk, ask, Writing(reads.decode, wanted.stops), choice)) as pieces:
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
    async with aclosing(_write(desk, ask, Writing(reads.decode, wanted.stops), choice)) as pieces:
        async for piece in pieces:
            yield piece


async def _write(desk: Desk, ask: Ask, writing: Writing, choice: Choice) -> AsyncGenerator[str, None]:
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
