"""Puts together what a run is made of, before anything is started: whatever is wrong with it is one sentence."""

import sys

from cory_env.pickled import display_name
from cory_env.rewarding.worker import RewardError, RewardWorker
from cory_env.tasks import Task
from cory_env.validate import Report, check_chat, check_columns, check_lengths
from launch.console.errors import CommandError
from policies.generation.installed import vllm_installed
from policies.settings.settings import Settings, Tokenizers


def load_task(settings: Settings, task: Task | None = None) -> tuple[Task, Tokenizers]:
    """Checks the models, and reads their tokenizers and the task's data and templates.

    Args:
        settings: of a run.
        task: what is known of the task already, instead of its data and templates.

    Raises:
        CommandError: no such task, or a setting, file or template that cannot be used.
        ModelError: no such model, or one that does not go with its tokenizer or the lengths.
    """
    from policies.models.model_check import check_folder  # brings transformers along

    for path in settings.model_paths.values():
        check_folder(path)
    try:
        tokenizers = settings.make_tokenizers()
        for policy_id in settings.policy_ids:
            settings.vocab_size(tokenizers, policy_id)
        return task or settings.make_task(), tokenizers
    except ValueError as error:
        raise CommandError(" ".join(str(error).split())) from error


def check(settings: Settings) -> tuple[Task, Tokenizers]:
    """Proves that task, tokenizer, model and lengths go together, for every query, and that backend and reward load.

    Returns:
        The task and the tokenizers.

    Raises:
        CommandError: they do not.
        ModelError: there is no such model, or it lacks a layer of `lora_target_modules`.
        SpecError, CreditError: a credit scheme of the user's own cannot be loaded, or used.
    """
    task, tokenizers = load_task(settings)
    if settings.backend == "vllm" and not vllm_installed():
        raise CommandError(
            "backend=vllm needs the package vllm, which is not installed. Run `pip install 'cory-rllib[vllm]'`, or "
            "leave backend out, or set backend=transformers."
        )
    if settings.lora is not None and settings.lora.targets:
        from policies.models.adapters import add_lora  # brings PEFT along
        from policies.models.language_model import meta_model

        for path in set(settings.model_paths.values()):
            add_lora(meta_model(path, settings.trust_remote_code), settings.lora)
    if (credit := settings.credit_assignment).own is not None:
        from policies.learning.credit import check_scheme  # brings torch along

        check_scheme(credit, settings.num_agents)
    try:
        first = {id(tokenizer): policy_id for policy_id, tokenizer in reversed(tokenizers.items())}
        chains = [settings.make_chain(task, tokenizers, [each] * settings.num_agents) for each in first.values()]
    except ValueError as error:
        raise CommandError(str(error)) from error
    report = Report(task.name)
    for chain in chains:  # roles are exchanged, so whoever reads may play any of them
        check_lengths(chain, report)
        chat_report = Report(task.name)
        check_chat(chain, chat_report)
        for warning in chat_report.warnings:
            print(f"Warning: {warning}", file=sys.stderr)
    if report.problems:
        raise CommandError(" ".join(report.problems))
    try:
        with RewardWorker(task.reward, timeout=settings.reward_timeout) as worker:
            needed = worker.start()
            check_columns(task, needed, report)
    except (RewardError, ValueError) as error:
        raise CommandError(str(error)) from error
    if report.problems:
        raise CommandError(" ".join(report.problems))
    if "completion_ids" in needed and len(chains) > 1:
        raise CommandError(
            f"The reward {display_name(task.reward)} asks for completion_ids, which are tokens, and the tokenizers of "
            f"{settings.model_names} differ. Let it read the completions' text, or list models with one tokenizer."
        )
    return task, tokenizers
