"""Responses to a request: the policies of a chain respond to a query in turn, or one policy continues a text."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cory_env.chain import Chain
from cory_env.decoding import ThoughtStream
from cory_env.episode import ChainEpisode
from cory_env.tasks import Query
from launch.serving.feedback import FeedbackThread
from launch.serving.protocol import ApiRequest, ChatRequest, RequestError
from launch.serving.request_queue import GenerationRequest, RequestQueue
from policies.generation.generator import EVALUATION_UPDATE, sampling_seed
from policies.generation.token_stream import Detokenizer


class ServedModel(NamedTuple):
    """A model of the API: a single policy or a chain of policies."""

    name: str
    policy_ids: tuple[str, ...]
    """Ids in the order of the chain."""
    chain: Chain
    feedback: FeedbackThread | None = None
    """Computes the feedback on the responses of the chain; None if it gets none."""


class SamplingParams(NamedTuple):
    """Sampling parameters of a request."""

    temperature: float
    max_tokens: int
    """Limit of the answer; drafts have the run's limit, or their role's."""
    seed: int
    stops: Sequence[str]


@dataclass
class Choice:
    """A response and its state during generation."""

    index: int
    query: Query
    """Its id is part of the sampling seed."""
    prompt: Sequence[int] | None = None
    """Token ids to continue without a template; None: the run's template is applied to the query."""
    drafts: list[dict[str, str | None]] = field(default_factory=list)
    text: str = ""
    reasoning: str | None = None
    """The thought before the text; None if there is none."""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    """Total over all prompts, including those of the drafts."""
    completion_tokens: int = 0


class TextDelta(NamedTuple):
    """New text of a choice. Its first delta is empty, and comes when its drafts are complete."""

    choice: Choice
    text: str = ""
    reasoning: str = ""
    """New text of the thought."""


class ResponseStream:
    """Decodes a response while it is generated, into the thought and the text after it."""

    def __init__(self, chain: Chain, stops: Sequence[str], *, inside: bool, raw: bool) -> None:
        """Starts at the end of a prompt.

        Args:
            chain: of the model.
            stops: texts that end the text after the thought.
            inside: whether the prompt begins the thought.
            raw: do not split off the thought.
        """
        self._chain = chain
        self._stops = stops
        self._inside = inside
        self._tags = None if raw else chain.tags
        self._splitter = None if self._tags is None else ThoughtStream(self._tags, inside)
        self._thought = Detokenizer(chain.decode_untruncated)
        self._answer = Detokenizer(chain.decode_untruncated, stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop text was reached."""
        return self._answer.stopped

    def add(self, choice: Choice, tokens: Sequence[int]) -> TextDelta:
        """Adds tokens, and returns the new text."""
        thought, answer = ([], tokens) if self._splitter is None else self._splitter.add(tokens)
        return TextDelta(
            choice, self._answer.add(answer) if answer else "", self._thought.add(thought) if thought else ""
        )

    def end(self, choice: Choice, tokens: Sequence[int]) -> TextDelta:
        """Stores the complete texts in the choice, and returns the remaining text.

        Args:
            choice: the choice.
            tokens: the whole response.
        """
        delta = TextDelta(choice, self._answer.end(), self._thought.end())
        answer = self._answer
        if self._tags is not None:  # where thought and answer meet is certain only now
            start = self._tags.answer_start(tokens, self._inside)
            choice.reasoning = self._chain.thought_text(tokens, self._inside)
            answer = Detokenizer(self._chain.decode_untruncated, self._stops)
            answer.add([] if start is None else tokens[start:])
            answer.end()
        choice.text = answer.text
        return delta


async def stream_choices(
    queue: RequestQueue, model: ServedModel, params: SamplingParams, choices: Sequence[Choice]
) -> AsyncGenerator[TextDelta, None]:
    """Generates all choices concurrently, with the same samples as `cory generate`, and yields the text as deltas.

    Deltas contain only the last response of the chain. If chains can stop, a response before the last role is known to
    be the answer only after its feedback, and comes as one delta. Closing the generator cancels unfinished choices.

    Args:
        queue: generates the tokens.
        model: a policy or a chain.
        params: sampling parameters.
        choices: to generate; they are updated in place.

    Raises:
        RequestError: a prompt is empty.
        PromptError: a prompt is too long, or contains a token without an embedding.
        RewardError: the feedback function failed.
        Exception: the first error of the queue, which cancels all choices.
    """
    deltas: asyncio.Queue[TextDelta | None] = asyncio.Queue()

    async def generate_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(_generate_choice(queue, model, params, choice, deltas.put_nowait))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            deltas.put_nowait(None)

    task = asyncio.create_task(generate_all())
    try:
        while (delta := await deltas.get()) is not None:
            yield delta
        await task
    finally:
        task.cancel()


async def _generate_choice(
    queue: RequestQueue, model: ServedModel, params: SamplingParams, choice: Choice, emit: Callable[[TextDelta], None]
) -> None:
    episode = ChainEpisode(model.chain, choice.query)

    def emit_text(delta: TextDelta) -> None:
        if delta.text or delta.reasoning:
            emit(delta)

    for position, policy_id in enumerate(model.policy_ids):
        is_last = position == len(model.policy_ids) - 1
        chain, limit = model.chain.by_position[position], model.chain.response_limits[position]
        request = GenerationRequest(
            policy_id,
            episode.prompt_ids() if choice.prompt is None else choice.prompt,
            params.temperature,
            min(params.max_tokens, limit) if is_last else limit,
            sampling_seed(params.seed, EVALUATION_UPDATE, choice.query.id, position),
            chain.stop_token_ids,
        )
        if not request.prompt:
            raise RequestError("The prompt is empty.")
        choice.prompt_tokens += len(request.prompt)
        stops, is_raw = [*params.stops, *chain.stops], choice.prompt is not None
        inside = not is_raw and episode.begins_thought
        stream, tokens = ResponseStream(chain, stops, inside=inside, raw=is_raw), list[int]()
        if is_last:
            choice.drafts = _drafts(model, episode)
            emit(TextDelta(choice))
        async with aclosing(queue.generate(request)) as steps:
            async for new in steps:
                tokens += new
                if is_last:
                    emit_text(stream.add(choice, new))
                if stream.stopped:
                    break
        choice.completion_tokens += len(tokens)
        if is_last:
            break
        episode.respond({"tokens": tokens, "length": len(tokens)})
        if model.feedback is not None:
            await model.feedback.compute(episode)
        if episode.role is None:  # nothing to correct: the response is the answer
            tokens = tokens[: params.max_tokens]
            choice.drafts = _drafts(model, episode)[:-1]
            emit(TextDelta(choice))
            emit_text(stream.add(choice, tokens))
            break
    emit_text(stream.end(choice, tokens))
    is_stopped = stream.stopped or (tokens and tokens[-1] in request.stop_token_ids)
    choice.finish_reason = "stop" if is_stopped else "length"


def _drafts(model: ServedModel, episode: ChainEpisode) -> list[dict[str, str | None]]:
    """Returns the responses so far, each with its thought and the feedback on it if there are any."""
    responses = zip(episode.roles, model.policy_ids, episode.completions, strict=False)
    return [
        {
            "role": role,
            "policy": policy_id,
            "content": text,
            **episode.thought_entry(position),
            **episode.feedback_entry(position),
        }
        for position, (role, policy_id, text) in enumerate(responses)
    ]


class ResponseFormatter:
    """Formats the responses to a request as OpenAI's objects, complete or in chunks."""

    def __init__(self, request: ApiRequest) -> None:
        """Generates the id of the response."""
        self._is_chat = isinstance(request, ChatRequest)
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": request.model,
        }

    def complete(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Returns the response of a request that is not streamed."""
        entries = [
            {
                **self._entry(choice, "message", choice.text, choice.reasoning, is_first=True),
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": entries, "usage": _usage(choices)}

    def chunk(self, delta: TextDelta) -> dict[str, Any]:
        """Returns a chunk with new text of a choice; without any, it is the choice's first, which has the drafts."""
        is_first = not delta.text and not delta.reasoning
        text = delta.text if is_first or delta.text else None
        entry = self._entry(delta.choice, "delta", text, delta.reasoning or None, is_first=is_first)
        return self._chunk({**entry, "finish_reason": None})

    def final_chunk(self, choice: Choice) -> dict[str, Any]:
        """Returns the last chunk of a choice, with the reason why it ended."""
        return self._chunk({**self._entry(choice, "delta", None, None), "finish_reason": choice.finish_reason})

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Returns the final chunk, which contains the token counts."""
        return {**self._chunk(), "usage": _usage(choices)}

    def _entry(
        self, choice: Choice, chat_field: str, text: str | None, reasoning: str | None, is_first: bool = False
    ) -> dict[str, Any]:
        extra: dict[str, Any] = {"drafts": choice.drafts} if is_first and choice.drafts else {}
        if reasoning is not None:
            extra["reasoning"] = reasoning
        if not self._is_chat:
            return {"index": choice.index, "text": text or "", **extra}
        # As in vLLM, the content of a message that consists of a thought is null.
        content = {} if text is None else {"content": text or (None if reasoning is not None else "")}
        role = {"role": "assistant"} if is_first else {}
        return {"index": choice.index, chat_field: {**role, **content, **extra}}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": list(choices)}


def _usage(choices: Sequence[Choice]) -> dict[str, int]:
    prompt_tokens = sum(choice.prompt_tokens for choice in choices)
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
