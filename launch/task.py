"""Puts together what a run is made of, before anything is started: whatever is wrong with it is one sentence."""

from pathlib import Path
from typing import TYPE_CHECKING

from cory_env.tasks import Task
from launch.command import CommandError
from policies.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_task(settings: Settings) -> "tuple[Task, PreTrainedTokenizerBase]":
    """Reads the task's data and templates, and the model's tokenizer.

    Raises:
        CommandError: no such task or model, or a setting, file or template that cannot be used.
    """
    if settings.model.startswith((".", "/", "~")) and not Path(settings.model_path).is_dir():
        raise CommandError(f"There is no model in {settings.model}: no such folder. Correct the setting model.")
    try:
        return settings.make_task(), settings.make_tokenizer()
    except ValueError as error:
        raise CommandError(" ".join(str(error).split())) from error


def check(settings: Settings) -> None:
    """Proves that task, tokenizer, model and lengths go together.

    Raises:
        CommandError: they do not.
    """
    task, tokenizer = load_task(settings)
    try:
        settings.make_chain(task, tokenizer)
    except ValueError as error:
        raise CommandError(str(error)) from error
