"""Where a run begins that starts from another run's policies (`start_from`)."""

from pathlib import Path

from launch.console.core_yaml import as_word
from launch.console.errors import CommandError
from launch.run_folder.layout import POLICIES
from launch.run_folder.mirror import read_run
from policies.settings.settings import Settings

ALIKE = ("model", "weights", "lora_rank", "lora_alpha", "lora_targets", "critic_inputs")
"""Settings that say what a policy consists of."""


def starting_policies(settings: Settings) -> Path | None:
    """Returns the checkpoint whose policies a run starts from: the other run's best, or its latest; None: the model.

    Raises:
        CommandError: there is none, or its policies are made otherwise; the message says what differs.
        StorageError: storage cannot be read.
    """
    if settings.start_from is None:
        return None
    run = read_run(settings.start_from)
    theirs = run.settings()
    differing = [name for name in ALIKE if getattr(theirs, name) != getattr(settings, name)]
    differing += ["num_policies"] if theirs.modules != settings.modules else []
    differing += ["advantage"] if settings.critic and not theirs.critic else []
    if differing:
        shown = ", ".join(f"{name}={as_word(getattr(theirs, name))}" for name in differing if name != "num_policies")
        shown += f"{', ' * bool(shown)}{len(theirs.modules)} policies" if "num_policies" in differing else ""
        raise CommandError(
            f"start_from={settings.start_from}: that run has {shown}, so its policies do not fit this run's. Set these "
            "alike, or leave start_from out."
        )
    return run.checkpoints.choose(None, POLICIES)[1]
