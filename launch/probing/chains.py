"""The chains of a probe: with the tokenizers of models on this machine, or without for an API."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cory_env.chain import Chain
from cory_env.chain_settings import ChainSettings, Position, Role
from cory_env.rewarding.worker import RewardError
from cory_env.tasks import Task
from cory_env.tasks.task import FEEDBACK_PLACEHOLDER, placeholders
from cory_env.text_envs.task import EnvTask
from launch.cluster.gpus import check_gpus
from launch.console.errors import CommandError
from launch.training import preflight
from launch.training.validation import ValidationReport, check_columns, open_rewards
from policies.settings.settings import Settings, Tokenizers

if TYPE_CHECKING:
    from launch.models.trained import PolicySet


class ProbeChains(NamedTuple):
    """The chains of a probe, and what they are made of.

    Attributes:
        settings: The settings, with nothing left open.
        tokenizers: Of the policies; empty for an API.
        plain: The chain of two without feedback.
        with_feedback: The chain of two whose second agent sees the feedback; None: there is no feedback function.
        team: The chain of the roles, or an environment's agents; `plain` is then the first answering role alone, or the
            environment that ends after each agent's first turn. None: there is neither.
    """

    settings: Settings
    task: Task
    tokenizers: Tokenizers
    plain: Chain
    with_feedback: Chain | None
    team: Chain | None = None


def make_local_chains(settings: Settings, policies: PolicySet | None, policy_ids: Sequence[str]) -> ProbeChains:
    """Makes the chains of policies on this machine, and checks everything that they need.

    Args:
        policies: Of a run; None: the model of the settings.
        policy_ids: By position.
    """
    settings = preflight.fill_in_settings(settings)
    task, tokenizers = preflight.check_run_settings(settings)
    if policies is not None:
        preflight.check_rope_factors(settings, policies.settings.max_length)
    # `AVERAGE_POLICY` has no tokenizer of its own.
    tokenizer_ids = [policy_id if policy_id in tokenizers else settings.policy_ids[0] for policy_id in policy_ids]
    plain = chain = settings.make_chain(task, tokenizers, tokenizer_ids)
    check_gpus(settings)
    if isinstance(task, EnvTask):
        plain = copy.copy(chain)
        plain.task = replace(task, max_turns=1)
        return ProbeChains(settings, task, tokenizers, plain, None, chain)
    if settings.roles is not None:
        return ProbeChains(settings, task, tokenizers, make_bare_chain(chain), None, chain)
    if settings.feedback is not None:
        plain_settings = _without_feedback(settings)
        plain = plain_settings.make_chain(preflight.load_task(plain_settings)[0], tokenizers, tokenizer_ids)
    return ProbeChains(settings, task, tokenizers, plain, None if task.feedback is None else chain)


def make_text_chains(settings: Settings) -> ProbeChains:
    """Makes the chains of an API's model, and checks the reward.

    Raises:
        CommandError: A setting requires a tokenizer, or the task cannot be used.
    """
    if settings.max_query_tokens is not None:
        raise CommandError(
            f"max_query_tokens={settings.max_query_tokens} requires a tokenizer, which --endpoint does not have. Set "
            "it to null."
        )
    if settings.chat is False:
        raise CommandError("chat=false conflicts with --endpoint, which takes messages. Set chat=true.")
    task = _load_task(settings)
    if settings.frozen_models:
        raise CommandError("Roles with frozen models conflict with --endpoint, whose model has all roles.")
    plain = chain = _text_chain(settings, task)
    _check_rewards(chain, settings.reward_timeout)
    if settings.roles is not None:
        return ProbeChains(settings, task, {}, make_bare_chain(chain), None, chain)
    if settings.feedback is not None:
        plain_settings = _without_feedback(settings)
        plain = _text_chain(plain_settings, _load_task(plain_settings))
    return ProbeChains(settings, task, {}, plain, None if task.feedback is None else chain)


def make_bare_chain(team: Chain) -> Chain:
    """Returns the chain of the first role that answers, alone, on the prompt that it gets without earlier responses."""
    index = answering_position(team)
    role = team.positions[index].role
    chain = copy.copy(team)
    chain.positions = (Position(role.name, Role(role.name), 0, team.bare_template, ()),)
    chain.agents = (role.name,)
    chain.encoders = team.encoders[index : index + 1]
    chain.response_limits = team.response_limits[index : index + 1]
    chain.stops_when_solved = False
    return chain


def answering_position(chain: Chain) -> int:
    """Returns the first position whose response is an answer to the query."""
    return next(index for index, position in enumerate(chain.positions) if position.role.produces_response)


def _load_task(settings: Settings) -> Task:
    try:
        return settings.make_task()
    except ValueError as error:
        raise CommandError(" ".join(str(error).split())) from error


def _text_chain(settings: Settings, task: Task) -> Chain:
    values: dict[str, Any] = {
        field.name: getattr(settings, field.name)
        for field in fields(ChainSettings)
        if field.name in Settings.model_fields and field.name != "max_prompt_tokens"  # prompts are not truncated
    }
    return Chain(task, None, **values)


def _check_rewards(chain: Chain, timeout: float) -> None:
    report = ValidationReport(chain.task.name)
    try:
        with open_rewards(chain, timeout) as worker:
            required_columns = worker.start()
            check_columns(chain, required_columns, report)
    except (RewardError, ValueError) as error:
        raise CommandError(str(error)) from error
    if "completion_ids" in required_columns:
        raise CommandError("The reward or feedback requires completion_ids, which --endpoint does not return.")
    if report.problems:
        raise CommandError(" ".join(report.problems))


def _without_feedback(settings: Settings) -> Settings:
    """Returns the settings without feedback. A user's prompt that shows feedback is replaced by the task's own."""
    prompt = settings.observer_prompt
    if prompt is not None and FEEDBACK_PLACEHOLDER in placeholders(prompt):
        prompt = None
    return settings.model_copy(update={"feedback": None, "observer_prompt": prompt})
