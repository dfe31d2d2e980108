"""A small task with its queries and chains, for tests."""

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from cory_env.chain import Chain
from cory_env.episode import Action
from cory_env.tasks import Query, Task
from cory_env.tokenizer import load_tokenizer
from launch.training.validation import ValidationReport
from launch.training.validation import validate as validate_chain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUERIES = [Query(0, "This movie was"), Query(1, "I did not"), Query(2, "The acting is, as ever,")]
LENGTH = "tests.cory_env.sample_rewards:length"


@cache
def tokenizer() -> "PreTrainedTokenizerBase":
    return load_tokenizer()


def reviews(reward: str = LENGTH) -> Task:
    """A task with the paper's prompts and three queries."""
    return Task(
        name="reviews",
        train=QUERIES,
        test=[Query(0, "My aunt")],
        reward=reward,
        observer_template='I can make this sentence "{query}{reference}" more positive: {query}',
        reference_separator='" and this sentence "{query}',
    )


PAPER_CHAIN: dict[str, Any] = {
    **{"partner_reward": 1.0, "max_prompt_tokens": 128, "max_response_tokens": 15, "chat": False}
}
"""Settings of chains with the paper's reward, without a chat template."""


def chain(num_agents: int = 2, **settings: Any) -> Chain:
    return Chain(reviews(), tokenizer(), num_agents=num_agents, **{**PAPER_CHAIN, **settings})


def validate(
    task: Task, tokenizer: "PreTrainedTokenizerBase", *, reward_timeout: float = 60.0, **settings: Any
) -> ValidationReport:
    """Validates a task with a chain of these settings; prompts are not limited with `max_prompt_tokens=None`."""
    if settings.get("max_prompt_tokens", 0) is None:
        settings["max_prompt_tokens"] = sys.maxsize
    return validate_chain(Chain(task, tokenizer, **settings), reward_timeout)


def tokens_of(text: str) -> list[int]:
    ids: list[int] = tokenizer()(text, add_special_tokens=False)["input_ids"]
    return ids


def response(text: str) -> Action:
    tokens = tokens_of(text)
    return {"tokens": tokens, "length": len(tokens)}
