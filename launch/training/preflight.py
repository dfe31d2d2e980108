"""Puts together what a run is made of, before anything is started: whatever is wrong with it is one sentence."""

from pathlib import Path
from typing import TYPE_CHECKING

from cory_env.scoring.worker import RewardError, RewardWorker
from cory_env.tasks import Task
from cory_env.validate import Report, check_columns, check_lengths
from launch.console.errors import CommandError
from policies.settings.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_task(settings: Settings) -> "tuple[Task, PreTrainedTokenizerBase]":
    """Reads the task's data and templates, and the model's tokenizer.

    Raises:
        CommandError: no such task or model, or a setting, file or template that cannot be used.
    """
    folder = Path(settings.model_path)
    if settings.model.startswith((".", "/", "~")) and not folder.is_dir():
        raise CommandError(f"There is no model in {settings.model}: no such folder. Correct the setting model.")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise CommandError(f"There is no model in {settings.model}: it has no config.json. Correct the setting model.")
    try:
        return settings.make_task(), settings.make_tokenizer()
    except ValueError as error:
        raise CommandError(" ".join(str(error).split())) from error


def check(settings: Settings) -> Task:
    """Proves that task, tokenizer, model and lengths go together, for every query, and that backend and reward load.

    Returns:
        The task.

    Raises:
        CommandError: they do not.
    """
    task, tokenizer = load_task(settings)
    from policies.generation.vllm_generator import vllm_installed

    if settings.backend == "vllm" and not vllm_installed():
        raise CommandError(
            "backend=vllm needs the package vllm, which is not installed. Run `pip install 'cory-rllib[vllm]'`, or set "
            "backend=transformers."
        )
    try:
        chain = settings.make_chain(task, tokenizer)
    except ValueError as error:
        raise CommandError(str(error)) from error
    report = Report(task.name)
    check_lengths(chain, report)
    if report.problems:
        raise CommandError(" ".join(report.problems))
    try:
        with RewardWorker(task.reward, timeout=settings.reward_timeout) as worker:
            check_columns(task, worker.start(), report)
    except (RewardError, ValueError) as error:
        raise CommandError(str(error)) from error
    if report.problems:
        raise CommandError(" ".join(report.problems))
    return task
