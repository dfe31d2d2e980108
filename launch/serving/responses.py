"""Finished chains as OpenAI's responses."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.prompt_encoder import Prompt
from cory_env.tasks import Query
from launch.serving.protocol import ApiRequest, ChatRequest, RequestError
from policies.generation.generator import Response
from policies.rollout.chain_generation import ChainRequest


class Continuation(ChainEpisode):
    """A text that one policy continues, without the run's prompt template."""

    def __init__(self, chain: Chain, query: Query) -> None:
        """Tokenizes the text of the query, which becomes the prompt."""
        super().__init__(chain, query)
        encoder = chain.encoders[0]
        tokens: list[int] = encoder.tokenizer(query.text)["input_ids"]
        if len(tokens) > (limit := chain.max_prompt_tokens):
            message = f"The prompt has {len(tokens)} tokens, but this run allows at most {limit}. Shorten it."
            raise RequestError(message, param="prompt", code="context_length_exceeded")
        if max(tokens, default=0) >= encoder.num_embeddings:
            raise RequestError("The prompt contains a token without an embedding in the model.", param="prompt")
        self.prompts.append(Prompt(tokens))


def format_response(
    request: ApiRequest, finished: Sequence[tuple[ChainRequest, Sequence[Response]]], max_tokens: int
) -> dict[str, Any]:
    """Returns OpenAI's object of the response to a request."""
    is_chat = isinstance(request, ChatRequest)
    episodes = [chain.episode for chain, _ in finished]
    prompts = sum(len(prompt.tokens) for episode in episodes for prompt in episode.prompts)
    completions = sum(len(response.tokens) for _, responses in finished for response in responses)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [
            {"index": index, **_format_choice(chain, max_tokens, request.stop, is_chat=is_chat)}
            for index, (chain, _) in enumerate(finished)
        ],
        "usage": {"prompt_tokens": prompts, "completion_tokens": completions, "total_tokens": prompts + completions},
    }


def _format_choice(request: ChainRequest, max_tokens: int, stops: Sequence[str], *, is_chat: bool) -> dict[str, Any]:
    episode = request.episode
    last = len(episode.responses) - 1
    encoder, response = episode.chain.encoders[last], episode.responses[last]
    is_raw = isinstance(episode, Continuation)
    answer = response if is_raw else episode.shown_tokens(last)
    # A draft with nothing to correct is the answer, but was generated with the limit of a draft.
    num_excess = max(len(response) - max_tokens, 0)
    answer = answer[: max(len(answer) - num_excess, 0)]
    text = encoder.decode(answer) if answer else ""
    end = min((index for stop in stops if (index := text.find(stop)) >= 0), default=None)
    is_stopped = end is not None or (episode.ended[last] and not num_excess)
    content = text[:end]
    extra: dict[str, Any] = {} if is_raw else {**episode.thought_entry(last)}
    if last:
        extra["drafts"] = [
            {
                "role": episode.agents[position],
                "policy": request.policy_ids[position],
                "content": episode.completions[position],
                **episode.thought_entry(position),
                **episode.feedback_entry(position),
            }
            for position in range(last)
        ]
    finish_reason = "stop" if is_stopped else "length"
    if not is_chat:
        return {"text": content, **extra, "finish_reason": finish_reason}
    # As in vLLM, the content of a message that consists of a thought is null.
    message = {"role": "assistant", "content": content or (None if "reasoning" in extra else ""), **extra}
    return {"message": message, "finish_reason": finish_reason}


def format_events(response: dict[str, Any], *, include_usage: bool) -> Iterator[str]:
    """Yields a response as the events of a stream: a chunk per choice, and one with the usage if it is included."""
    head = {name: value for name, value in response.items() if name not in ("choices", "usage")}
    if head["object"] == "chat.completion":
        head["object"] = "chat.completion.chunk"
    for choice in response["choices"]:
        yield _event({**head, "choices": [{"delta" if name == "message" else name: choice[name] for name in choice}]})
    if include_usage:
        yield _event({**head, "choices": [], "usage": response["usage"]})
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
