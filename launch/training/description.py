"""What a run is and what decides its result, in words: the lines that `cory train` and `cory validate` print first."""

import textwrap
from collections.abc import Collection

from cory_env.tasks import Task
from launch.cluster.placement import count_noun
from policies.settings.settings import Settings
from policies.settings.yaml12 import to_cli

WIDTH = 118
"""Columns of the lists of settings."""
MIN_HELD_OUT = 20
"""With fewer queries per held-out split, intervals are too wide to choose by."""
ALWAYS = (
    *("model", "weights", "chat", "lr", "advantage", "kl_coef", "num_updates", "queries_per_update", "num_generations"),
    *("minibatch_size", "num_epochs", "max_prompt_tokens", "max_response_tokens", "temperature", "eval_every"),
)
CHAIN = ("num_agents", "num_policies", "exchange_period", "average_period", "credit", "feedback", "select_by")
"""Settings that decide only the result of a chain of several agents."""
ENVIRONMENT = ("num_policies", "exchange_period", "max_turns", "partner_reward", "chain_gamma")
"""Settings that decide the result of an environment's agents."""


def describe_run(settings: Settings, arrow: str) -> str:
    """Describes the training in a few sentences."""
    count = len(settings.policy_ids)
    learners = f"{settings.algorithm}: one agent learns"
    if settings.num_agents > 1:
        algorithm = "" if settings.critic else f" by {settings.algorithm}"
        weights = "adapters on one base" if settings.weights == "lora" else "weights"
        policies = "one LLM in all roles" if count == 1 else f"{count} LLMs with their own {weights}"
        agents = f" {arrow} ".join(settings.agents)
        learners = f"CORY{algorithm}: {settings.num_agents} agents ({agents}), {policies}, learn"
    exchange = ""
    if settings.exchange_period is not None and settings.num_agents > 1 and count > 1:
        exchange = f"; roles are exchanged every {settings.exchange_period}"
    if settings.average_period is not None:
        distance = "" if settings.average_tau == 1 else f" by {settings.average_tau:g} of the way"
        exchange += f"; LLMs are averaged{distance} every {settings.average_period}"
    subject = f"task {settings.task}" if settings.env is None else f"environment {settings.env}"
    times = "" if settings.num_generations == 1 else f", {settings.num_generations} times each"
    text = (
        f"{learners} {subject}, starting from {settings.model_names}.\n"
        f"{count_noun(settings.num_updates, 'update')} of {settings.queries_per_update} queries{times}{exchange}. "
        f"Generation: {settings.backend}."
    )
    if settings.num_agents > 1 and count > 1 and settings.roles is None:
        text += "\nTo compare: num_agents=1 trains a single agent, num_policies=1 one LLM in all roles."
    return text


def describe_settings(settings: Settings, set_names: Collection[str], task: Task) -> str:
    """Lists the settings that decide a run's result, those that the user or a preset set apart from defaults."""
    names = [*ALWAYS, *(CHAIN if settings.num_agents > 1 else ())]
    if settings.env is not None:
        names = [*ALWAYS, *ENVIRONMENT]
    elif settings.num_agents > 1 and settings.credit in ("sum", "chain"):
        names += ["partner_reward" if settings.credit == "sum" else "chain_gamma"]
    if settings.weights == "lora":
        names += ["lora_rank", "lora_alpha"]
    values = settings.public_dict()
    words = {name: f"{name}={to_cli(values[name])}" for name in settings.__class__.model_fields if name in names}
    splits = ", ".join(f"{len(task.queries(split))} {split}" for split in task.splits)
    lists = {
        "Set": [word for name, word in words.items() if name in set_names],
        "Defaults": [word for name, word in words.items() if name not in set_names],
        "Queries": [splits],
    }
    return "\n".join(
        textwrap.fill(
            " ".join(items),
            WIDTH,
            initial_indent=f"{f'{title}:':<10}",
            subsequent_indent=" " * 10,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for title, items in lists.items()
        if items
    )


def small_splits_warning(settings: Settings, task: Task) -> str | None:
    """Returns a warning if there are too few held-out queries for splits of `MIN_HELD_OUT`."""
    sizes = {split: len(task.queries(split)) for split in task.splits if split != "train"}
    if sum(sizes.values()) >= MIN_HELD_OUT * len(sizes):
        return None
    source = "data, or set eval_data" if settings.eval_data is None else "eval_data"
    return (
        f"Only {' and '.join(f'{count} {split}' for split, count in sizes.items())} queries, fewer than {MIN_HELD_OUT} "
        "each, so held-out figures, and with them the choice of the best checkpoint, say little. Add rows to "
        f"{source}."
    )
