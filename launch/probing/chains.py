"""The chains of a probe: with the tokenizers of models on this machine, or without for an API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from cory_env.chain import Chain
from cory_env.chain_settings import ChainSettings
from cory_env.rewarding.worker import RewardError
from cory_env.tasks import Task
from cory_env.tasks.task import FEEDBACK_PLACEHOLDER, placeholders
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
    """

    settings: Settings
    task: Task
    tokenizers: Tokenizers
    plain: Chain
    with_feedback: Chain | None


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
    if settings.feedback is not None:
        plain_settings = _without_feedback(settings)
        plain = plain_settings.make_chain(preflight.load_task(plain_settings)[0], tokenizers, tokenizer_ids)
    check_gpus(settings)
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
    plain = chain = _text_chain(settings, task)
    if settings.feedback is not None:
        plain_settings = _without_feedback(settings)
        plain = _text_chain(plain_settings, _load_task(plain_settings))
    _check_rewards(chain, settings.reward_timeout)
    return ProbeChains(settings, task, {}, plain, None if task.feedback is None else chain)


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
