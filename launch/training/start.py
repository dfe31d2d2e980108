"""Where a run begins: its folder, and the policies of another run (`start_from`)."""

from pathlib import Path

from launch.console.errors import CommandError
from launch.run_folder.directory import RunDirectory
from launch.run_folder.layout import POLICIES
from launch.run_folder.mirror import create_run, discard, read_run
from launch.run_folder.sources import Sources
from launch.run_folder.storage import is_uri
from policies.settings.core_yaml import as_word
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


def create(place: str | None, name: str, settings: Settings, sources: Sources, origin: str) -> RunDirectory:
    """Makes a new run's folder, and locks it; storage that cannot be written is found out now.

    Args:
        place: a folder or a URI; None: a fresh folder under `runs/`.
        name: of such a folder.
        settings: of the run.
        sources: what it is made from.
        origin: what made it; `config.yaml` begins with that.

    Raises:
        CommandError: something is there already, or the folder cannot be made.
        StorageError: storage cannot be written.
    """
    if place is not None and is_uri(place):
        run_directory = create_run(place)
    else:
        run_directory = RunDirectory.create(Path(place) if place else None, name)
    try:
        run_directory.write_settings(settings, origin)
        sources.write(run_directory.path)
        run_directory.mirror(settings.keep_checkpoints)
    except CommandError:
        discard(run_directory)
        raise
    return run_directory
