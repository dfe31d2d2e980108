"""Where a run begins: its folder, and the policies of another run (`start_from`)."""

from pathlib import Path

from launch.console.errors import CommandError
from launch.run_folder import manifest
from launch.run_folder.directory import RunDirectory
from launch.run_folder.layout import POLICIES
from launch.run_folder.mirror import create_run, discard, read_run
from launch.run_folder.sources import Sources
from launch.run_folder.storage import is_uri
from policies.settings.settings import Settings
from policies.settings.start import find_start, refuse_other_policies


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
        sealed = (checkpoint / manifest.NAME).exists()  # not so one that an algorithm's `save_to_path` wrote
        if sealed and (fault := manifest.fault(checkpoint, POLICIES)) is not None:
            raise CommandError(f"start_from={settings.start_from} {fault}. Name another checkpoint.")
        return checkpoint
    run = read_run(settings.start_from)
    refuse_other_policies(settings, run.settings())
    return run.checkpoints.choose(None, POLICIES)[1].resolve()


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
    except (CommandError, OSError):
        discard(run_directory)
        raise
    return run_directory
