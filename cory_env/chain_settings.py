"""Settings of a chain, and the names of its agents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

DEFAULT_MAX_PROMPT_TOKENS = 128
DEFAULT_MAX_RESPONSE_TOKENS = 15  # the longest IMDB response in the paper

ObservedResponses = Literal["all", "last", "best"]
"""Which earlier responses an agent sees: all, the last one, or the one with the best task reward."""


StopWhen = Literal["solved"]
"""When a chain ends before all agents have responded."""


def role_names(num_agents: int) -> tuple[str, ...]:
    """Returns the roles of a chain in the order in which they respond: the environment's agents.

    Raises:
        ValueError: `num_agents` is less than 1.
    """
    if num_agents < 1:
        raise ValueError(f"num_agents is {num_agents}, but must be at least 1.")
    if num_agents == 2:
        return ("pioneer", "observer")
    return ("pioneer", *(f"observer_{k}" for k in range(1, num_agents)))


@dataclass(frozen=True)
class ChainSettings:
    """Settings of a chain, apart from its task and tokenizer.

    Attributes:
        num_agents: Number of agents; 1 is the single-agent baseline, 2 is CORY.
        knowledge_transfer: Whether an agent sees earlier responses. If False, each agent sees only the query.
        observed: Which earlier responses the third and later agents see: `all`, the `last`, or the `best` by task
            reward (the earliest if there is a tie).
        partner_reward: α in r_i + α · Σ_{j≠i} r_j: 1 cooperative as in the paper, 0 independent, −1 competitive.
        max_prompt_tokens: Maximum prompt length in tokens. Longer prompts lose the end of their reference.
        max_response_tokens: Maximum response length in tokens.
        vocab_size: Upper bound of token ids (exclusive). Default: the tokenizer's largest id + 1. Models may pad their
            vocabulary beyond that.
        num_embeddings: Upper bound of token ids in prompts (exclusive). Default: `vocab_size`. Tokenizers may have
            tokens without an embedding; prompts must not contain them.
        stop_token_ids: Tokens that end a response in addition to the tokenizer's end-of-sequence token.
        stop_when: `solved`: the chain ends as soon as the feedback on a response is None. None: all agents respond.
        stop: Stop string, which ends a response too. The response's tokens include the one that completes the stop
            string; its text ends before the stop string.
        chat: Whether each prompt is a user message in the tokenizer's chat template.
        system_prompt: With `chat`, a system message before the user message.
        chat_date: With `chat`, the date that the template shows as today's, as YYYY-MM-DD. None: the real date.
    """

    num_agents: int = 2
    knowledge_transfer: bool = True
    observed: ObservedResponses = "all"
    partner_reward: float = 1.0
    max_prompt_tokens: int = DEFAULT_MAX_PROMPT_TOKENS
    max_response_tokens: int = DEFAULT_MAX_RESPONSE_TOKENS
    vocab_size: int | None = None
    num_embeddings: int | None = None
    stop_token_ids: Sequence[int] = ()
    stop_when: StopWhen | None = None
    stop: str | None = None
    chat: bool = False
    system_prompt: str | None = None
    chat_date: str | None = None

    def __post_init__(self) -> None:
        if self.max_prompt_tokens < 1 or self.max_response_tokens < 1:
            raise ValueError(
                f"max_prompt_tokens is {self.max_prompt_tokens} and max_response_tokens {self.max_response_tokens}, "
                "but both must be at least 1."
            )
        if self.observed not in get_args(ObservedResponses):
            raise ValueError(
                f"observed is {self.observed!r}, but must be one of: {', '.join(get_args(ObservedResponses))}."
            )
        if not math.isfinite(self.partner_reward):
            raise ValueError(f"partner_reward is {self.partner_reward}, but must be a finite number; the paper's is 1.")
        if self.stop_when not in (None, *get_args(StopWhen)):
            raise ValueError(f"stop_when is {self.stop_when!r}, but must be `solved` or None.")
