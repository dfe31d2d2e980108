"""Loads what a task is made of, for a user: whatever is wrong with it is one sentence."""

from pathlib import Path
from typing import TYPE_CHECKING

from cory_env import tasks, tokenizer
from launch.command import CommandError
from policies.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_task(settings: Settings) -> tasks.Task:
    """Reads the task's data and templates.

    Raises:
        CommandError: no such task, or a setting, file or template that cannot be used.
    """
    try:
        return tasks.make_task(
            settings.task,
            data=settings.data,
            eval_data=settings.eval_data,
            reward=settings.reward,
            prompt=settings.prompt,
            observer_prompt=settings.observer_prompt,
        )
    except ValueError as error:
        raise CommandError(str(error)) from error


def load_tokenizer(settings: Settings) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer of the model.

    Raises:
        CommandError: there is none.
    """
    if settings.model.startswith((".", "/", "~")) and not Path(settings.model_path).is_dir():
        raise CommandError(f"There is no model in {settings.model}: no such folder. Correct the setting model.")
    try:
        return tokenizer.load_tokenizer(settings.model_path)
    except ValueError as error:
        raise CommandError(" ".join(str(error).split())) from error
