"""Where a run starts: in a new folder, from another run's policies (`start_from`), from its latest checkpoint."""

from collections.abc import Callable
from pathlib import Path

from launch.console.errors import CommandError, cause, is_process_loss
from launch.run_folder import manifest
from launch.run_folder.layout import POLICIES
from launch.run_folder.run import Run
from launch.run_folder.sources import Sources
from launch.run_folder.status import read_run
from launch.run_folder.storage import is_uri
from policies.settings.settings import Settings
from policies.settings.start import find_start, reject_other_policies


def create_run(place: str | None, name: str, settings: Settings, sources: Sources, origin: str) -> Run:
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
    run = Run.create(place, name)
    try:
        run.write_settings(settings, origin)
        sources.write(run.path)
        run.upload()
    except (CommandError, OSError):
        run.abort()
        raise
    return run


def starting_policies(settings: Settings) -> Path | None:
    """Returns the whole checkpoint whose policies a run starts from: one of a run in storage is fetched.

    Returns:
        The checkpoint that `start_from` names, or of the run that it names the best, or else the latest; None: policies
        start from the model.

    Raises:
        CommandError: there is none, or it is damaged.
        SettingsError: its policies consist of something else; the message says what differs.
        StorageError: storage cannot be read.
    """
    if settings.start_from is None:
        return None
    if not is_uri(settings.start_from) and (Path(settings.start_from) / POLICIES).is_dir():
        checkpoint = find_start(settings)
        assert checkpoint is not None
        has_manifest = (checkpoint / manifest.NAME).exists()  # not so one that an algorithm's `save_to_path` wrote
        if has_manifest and (fault := manifest.verify(checkpoint, POLICIES)) is not None:
            raise CommandError(f"start_from={settings.start_from} {fault}. Name another checkpoint.")
        return checkpoint
    run = read_run(settings.start_from)
    reject_other_policies(settings, run.settings())
    return run.checkpoints.choose(None, POLICIES)[1].resolve()


def latest_valid_checkpoint(run: Run, tell: Callable[[str], None]) -> int | None:
    """Finds the update of a locked run's latest whole checkpoint, if there is one.

    Args:
        run: the run.
        tell: is told of each damaged checkpoint, which gets another name.

    Raises:
        FormatError: the latest checkpoint was written by another version.
    """
    for sentence in run.checkpoints.quarantine_damaged():
        tell(f"Warning: {sentence}")
    latest = run.checkpoints.latest()
    return None if latest is None else latest[0]


def is_retryable(error: Exception) -> bool:
    """Tells whether a run may get past this failure when it goes on from its checkpoint: processes or machines died.

    Not so an error of a reward itself, wrong settings, a gradient that is not finite or a full disk: they would only
    come again.
    """
    from cory_env.rewarding.worker import RewardKilled
    from policies.generation.generator import GenerationError
    from policies.rllib.learners import LearnerError

    root = cause(error)
    return isinstance(root, LearnerError | GenerationError | RewardKilled) or is_process_loss(root)
