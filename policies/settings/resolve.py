"""Values that depend on model, data and machine: filled in once, before a run starts, and stored with it.

Settings, and so a preset or file, may leave these open: `chat=auto`, `chat_date`, `lr`, `max_prompt_tokens`,
`num_passes` and `micro_batch_tokens=auto`. A run's `config.yaml` has the resolved values, so a resumed run keeps them.
"""

from __future__ import annotations

import math
import sys
from datetime import date
from typing import Any

from cory_env.chain import Chain
from cory_env.chain_settings import MAX_PROMPT_TOKENS
from cory_env.prompt_lengths import longest_prompts, max_shown_tokens
from cory_env.tasks import Task
from cory_env.text_envs.pool import EnvPool
from policies.settings.settings import OPEN_VALUES, Settings, Tokenizers

OPEN_SETTINGS = (*OPEN_VALUES, "num_passes", "num_updates")
"""Settings whose values may be filled in."""
FEEDBACK_TOKENS = 256
"""Tokens reserved for each feedback that a prompt shows, as its length is unknown before there are responses."""


def is_resolved(settings: Settings) -> bool:
    """Whether nothing is left open, apart from the date of a chat template."""
    open_values = [name for name, value in OPEN_VALUES.items() if getattr(settings, name) == value]
    if settings.env is not None and settings.roles is None:
        return False
    return settings.num_passes is None and open_values in ([], ["chat_date"])


def resolve(settings: Settings) -> Settings:
    """Fills in the values that are left open.

    Args:
        settings: of the run; resolved settings are returned unchanged, except for a missing date.
    """
    if is_resolved(settings) and (settings.chat_date is not None or not settings.chat):
        return settings
    if settings.env is not None and settings.roles is None:
        settings = with_env_roles(settings)
    tokenizers = settings.make_tokenizers()
    values: dict[str, Any] = {"lr": settings.learning_rate}
    if settings.chat == "auto":
        values["chat"] = settings.uses_chat(tokenizers)
        settings = settings.model_copy(update=values)
    if settings.num_passes is not None or settings.max_prompt_tokens is None:
        task = settings.make_task()
        if settings.num_passes is not None:
            values |= {"num_passes": None, "num_updates": updates_of_passes(settings, len(task.train))}
        if settings.max_prompt_tokens is None:
            values["max_prompt_tokens"] = choose_prompt_limit(settings, task, tokenizers)
    settings = with_chat_date(settings.model_copy(update=values), tokenizers)
    if settings.micro_batch_tokens == "auto":
        from policies.settings.hardware.fit import choose_micro_batch_tokens  # imports torch

        settings = settings.model_copy(update={"micro_batch_tokens": choose_micro_batch_tokens(settings)})
    return type(settings)(**settings.model_dump())  # conflicts between the new values


def with_env_roles(settings: Settings) -> Settings:
    """Makes the environment's agents the roles.

    Raises:
        RewardError: The environment cannot be made.
    """
    assert settings.env is not None
    with EnvPool(settings.env, timeout=settings.reward_timeout) as pool:
        roles = [{"name": agent} for agent in pool.agents()]
    return type(settings)(**settings.model_dump() | {"roles": roles, "num_agents": len(roles)})


def updates_of_passes(settings: Settings, num_queries: int) -> int:
    """Returns the number of updates of `num_passes` over this many training queries."""
    assert settings.num_passes is not None
    return math.ceil(settings.num_passes * num_queries / settings.queries_per_update)


def with_chat_date(settings: Settings, tokenizers: Tokenizers | None = None) -> Settings:
    """Sets `chat_date` to today, if a chat template asks for a date and none is set."""
    if not settings.chat or settings.chat_date is not None:
        return settings
    formats = settings.chat_formats(tokenizers or settings.make_tokenizers()).values()
    uses_date = any(chat_format.uses_date for chat_format in formats)
    return settings.model_copy(update={"chat_date": date.today().isoformat()}) if uses_date else settings


def choose_prompt_limit(settings: Settings, task: Task, tokenizers: Tokenizers) -> int:
    """Returns the length of the longest prompt with full-length earlier responses, at most `MAX_PROMPT_TOKENS`.

    It is also at most what the response leaves of the models' context. Longer prompts lose the end of their reference;
    a query that does not fit even without one is rejected when the run starts.
    """
    from policies.models.model_check import max_positions  # imports transformers

    contexts = [max_positions(path, settings.trust_remote_code) for path in settings.model_paths.values()]
    rooms = [context - settings.max_response_tokens for context in contexts if context is not None]
    longest_allowed = max(min([MAX_PROMPT_TOKENS, *rooms]), 1)
    if settings.env is not None:  # prompts grow from turn to turn
        return longest_allowed
    unlimited = settings.model_copy(update={"max_prompt_tokens": 1})
    needed = 1
    for policy_id, tokenizer in {id(t): (name, t) for name, t in tokenizers.items()}.values():
        values = unlimited.chain_settings(tokenizers, policy_id) | {"max_prompt_tokens": sys.maxsize}
        chain = Chain(task, tokenizer, **values)
        queries = [query for split in task.splits for query in task.queries(split)]
        longest = max(longest_prompts(chain, queries)[1], default=1)
        num_feedback = len(chain.positions) - 1 if task.feedback is not None else 0
        needed = max(needed, longest + max_shown_tokens(chain) + FEEDBACK_TOKENS * num_feedback)
    return min(needed, longest_allowed)
