"""Checks of a run's settings, task, models, reward and feedback before anything is started."""

import sys
from collections.abc import Sequence

from cory_env.chain import Chain
from cory_env.pickled import display_name
from cory_env.rewarding.worker import RewardError
from cory_env.tasks import Task
from cory_env.text_envs.episode import EnvEpisode
from cory_env.text_envs.pool import EnvPool
from launch.console.errors import CommandError
from launch.training.description import small_splits_warning
from launch.training.validation import ValidationReport, check_chat, check_columns, check_lengths, open_rewards
from policies.compat.imports import UNUSED_BY_TRANSFORMERS, gc_paused, packages_hidden
from policies.generation.installed import vllm_installed
from policies.settings.resolve import resolve
from policies.settings.settings import Settings, Tokenizers


def fill_in_settings(settings: Settings, ram: float | None = None, gpu: float | None = None) -> Settings:
    """Fills in the values that the settings leave open (`policies.settings.resolve`).

    Args:
        ram, gpu: Bytes of another machine and of each of its GPUs, if the run is not for this one; it then does not
            need the models' weights.
    """
    _check_models(settings, weights=ram is None)
    from policies.models.model_check import ModelError

    try:
        resolved = resolve(settings)
    except ModelError:
        raise
    except (ValueError, RewardError) as error:
        raise CommandError(" ".join(str(error).split())) from error
    if ram is None or settings.micro_batch_tokens != "auto":
        return resolved
    from policies.settings.hardware.fit import choose_micro_batch_tokens  # imports torch

    return resolved.model_copy(update={"micro_batch_tokens": choose_micro_batch_tokens(resolved, ram, gpu)})


def _check_models(settings: Settings, weights: bool = True) -> None:
    with gc_paused(), packages_hidden(*UNUSED_BY_TRANSFORMERS):
        from policies.models.model_check import check_model_folder  # imports transformers

    for path in settings.model_paths.values():
        check_model_folder(path, weights=weights)


def load_task(settings: Settings, task: Task | None = None) -> tuple[Task, Tokenizers]:
    """Checks the models, and loads their tokenizers and the task.

    Args:
        task: An already loaded task, to avoid reading its data and templates.
    """
    _check_models(settings)
    try:
        tokenizers = settings.make_tokenizers()
        for policy_id in tokenizers:
            settings.vocab_size(tokenizers, policy_id)
        return task or settings.make_task(), tokenizers
    except ValueError as error:
        raise CommandError(" ".join(str(error).split())) from error


def make_chains(settings: Settings, task: Task, tokenizers: Tokenizers) -> dict[str, Chain]:
    """Returns a chain for each tokenizer, by the first policy that has it; with role exchange it may have any role."""
    first_policies: dict[int, str] = {}
    for policy_id, tokenizer in tokenizers.items():
        first_policies.setdefault(id(tokenizer), policy_id)
    try:
        return {
            policy_id: settings.make_chain(task, tokenizers, [policy_id] * settings.num_agents)
            for policy_id in first_policies.values()
        }
    except ValueError as error:
        raise CommandError(str(error)) from error


def data_warnings(settings: Settings, task: Task) -> list[str]:
    """Returns warnings about updates that ask training queries repeatedly, and about too few held-out queries."""
    warnings = []
    count, size = len(task.train), settings.queries_per_update
    if 0 < count < size:
        repeats = f"{size // count}" if size % count == 0 else f"{size // count} or {size // count + 1}"
        queries, target = ("query", "it") if count == 1 else ("queries", "each")
        warnings.append(
            f"Only {count} training {queries} for queries_per_update={size}, so an update asks {target} {repeats} "
            f"times. Add training queries, or lower queries_per_update to {count}; num_generations sets the responses "
            "per query."
        )
    if small_splits := small_splits_warning(settings, task):
        warnings.append(small_splits)
    return warnings


def check_rope_factors(settings: Settings, trained_length: int) -> None:
    """Checks that the models of a run rotate rows as in training (`fix_rope_factors`).

    Args:
        trained_length: Maximum number of tokens of a prompt and its response in training.
    """
    from policies.models.families import fix_rope_factors
    from policies.models.model_check import load_config

    for path in settings.model_paths.values():
        lengths = (trained_length, settings.max_length)
        trained, chosen = (
            fix_rope_factors(load_config(path, settings.trust_remote_code), length) for length in lengths
        )
        if trained != chosen:
            raise CommandError(
                f"max_prompt_tokens + max_response_tokens is {settings.max_length}, for which `{path}` uses longrope's "
                f"{'long' if chosen else 'short'} factors. It was trained with the others, for {trained_length} "
                f"tokens. {'Lower' if chosen else 'Raise'} max_response_tokens."
            )


def check_env(chains: Sequence[Chain], settings: Settings) -> None:
    """Resets the environment with the first seed of every split, and checks that the first prompts can be built."""
    assert settings.env is not None
    with EnvPool(settings.env, agents=settings.agents, timeout=settings.reward_timeout) as pool:
        for chain in chains:
            for split in chain.task.splits:
                episode = EnvEpisode(chain, chain.task.queries(split)[0])
                pool.submit(0, episode)
                try:
                    pool.collect("all")
                except RewardError as error:
                    raise CommandError(str(error)) from error
                if episode.agent is None:
                    raise CommandError(
                        f"The environment {settings.env} ends at its reset with seed {episode.seed}, before an agent "
                        "has acted. Correct it."
                    )


def check_run_settings(settings: Settings) -> tuple[Task, Tokenizers]:
    """Checks that task, tokenizer, model and lengths match for every query, and that backend and reward load."""
    settings = fill_in_settings(settings)
    task, tokenizers = load_task(settings)
    if settings.backend == "vllm" and not vllm_installed():
        raise CommandError(
            "backend=vllm requires the package vllm, which is not installed. Run `pip install 'cory-rllib[vllm]'`, or "
            "set backend=transformers."
        )
    if settings.lora is not None and settings.lora.targets:
        from policies.models.adapters import add_lora  # imports PEFT
        from policies.models.language_model import meta_model

        for path in {settings.model_paths[policy_id] for policy_id in settings.policy_ids}:
            add_lora(meta_model(path, settings.trust_remote_code), settings.lora)
    if (credit := settings.credit_assignment).custom_function is not None:
        from policies.learning.credit import check_custom_credit  # imports torch

        has_reward = [position.role.has_reward for position in settings.positions]
        check_custom_credit(credit, has_reward, settings.stop_in_training)
    chains = [*make_chains(settings, task, tokenizers).values()]
    report = ValidationReport(task.name)
    for chain in chains:
        check_chat(chain, report)
    for warning in report.warnings:
        print(f"Warning: {warning}", file=sys.stderr)
    if settings.env is not None:
        check_env(chains, settings)
        return task, tokenizers
    try:
        worker = open_rewards(chains[0], settings.reward_timeout)
    except ValueError as error:
        raise CommandError(str(error)) from error
    with worker:
        worker.prepare()  # in the background, while the lengths are checked
        for chain in chains:
            check_lengths(chain, report)
        if report.problems:
            raise CommandError(" ".join(report.problems))
        try:
            required_columns = worker.start()
            check_columns(chains[0], required_columns, report)
        except (RewardError, ValueError) as error:
            raise CommandError(str(error)) from error
    if report.problems:
        raise CommandError(" ".join(report.problems))
    if "completion_ids" in required_columns and len(chains) > 1:
        feedback = "" if task.feedback is None else f" or the feedback {display_name(task.feedback)}"
        raise CommandError(
            f"The reward {display_name(task.reward)}{feedback} requires completion_ids, but the models "
            f"{settings.model_names} have different tokenizers. Use the text of completions instead, or models with "
            "the same tokenizer."
        )
    return task, tokenizers
