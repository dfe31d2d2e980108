"""Runs in storage: trained in a local folder that is mirrored there, and copied from there to be looked at."""

import hashlib
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

from launch.console.errors import CommandError
from launch.run_folder import manifest
from launch.run_folder.checkpoints import Checkpoints
from launch.run_folder.directory import RunDirectory
from launch.run_folder.layout import CONFIG, LOCK
from launch.run_folder.storage import LOOKED_AT, Storage, StorageError, check_place, is_uri
from policies.models.cached_folder import locked, user_cache
from policies.settings.settings import Settings


def create_run(uri: str) -> RunDirectory:
    """Takes a local folder for a new run that is mirrored to `uri`.

    Raises:
        CommandError: something is there already, or only in the local folder; another process trains it here.
        StorageError: storage cannot be read or written.
    """
    storage = Storage(uri)
    run = _local(storage)
    names = storage.names()
    if names and not storage.holds_run(names):
        raise CommandError(f"{storage.uri} is not empty: empty it, or name another place with --out.")
    if storage.updates(names):
        raise CommandError(
            f"{storage.uri} holds a run: go on with it by `{run.resume_command()}`, or name another place with --out."
        )
    if _has_checkpoints(run):
        raise CommandError(
            f"{run.path} on {platform.node()} has a run whose checkpoints are not in {storage.uri}: go on with it by "
            f"`{run.resume_command()}` on that machine, or remove that folder."
        )
    storage.clear()  # a run that ended before anything of it was saved
    _empty(run.path)
    return run


def is_begun(uri: str) -> bool:
    """Tells whether something of a run is saved in storage, or on this machine and has yet to arrive there.

    Raises:
        CommandError: there is no such storage.
        StorageError: storage cannot be read.
    """
    storage = Storage(uri)
    names = storage.names()
    return (bool(storage.updates(names)) and storage.holds_run(names)) or _is_only_here(storage, names)


def open_run(uri: str) -> RunDirectory:
    """Takes the local folder of a run in storage, and fetches all but the checkpoint (`RunDirectory.bring`).

    Where this machine has all of the run, and maybe more, which never arrived in storage, that is copied there instead.

    Raises:
        CommandError: there is no run; another process trains it on this machine.
        StorageError: storage cannot be read or written.
    """
    storage = Storage(uri)
    names = storage.names()
    if not storage.holds_run(names) and not _is_only_here(storage, names):
        raise _no_run(storage)
    run = _local(storage)
    if _has_all(run, storage, names):
        run.mirror(run.settings().keep_checkpoints)
    else:
        _empty(run.path)
        storage.fetch(run.path)
    return run


def read_run(place: str | Path, files: Sequence[str] = LOOKED_AT) -> RunDirectory:
    """Returns a run to look at, not locked: its folder, or a copy in the user's cache of what storage has to see.

    Of the copy's checkpoints only those that are chosen (`Checkpoints.choose`) have files.

    Args:
        place: a folder or a URI. A URI's copy is brought up to date.
        files: what such a copy has, as patterns (`launch.run_folder.storage`).

    Raises:
        CommandError: there is no run, or the URI holds a password.
        StorageError: storage cannot be read.
    """
    if not is_uri(str(place)):
        return RunDirectory.open(Path(place))
    check_place(str(place))
    storage = Storage(str(place))
    if storage.folder is not None:
        return RunDirectory.open(storage.folder)
    run = RunDirectory(_cache(storage, "looked-at"))
    run.storage = storage
    run.path.mkdir(parents=True, exist_ok=True)

    def bring(checkpoint: Path, part: str) -> None:
        with locked(run.path / LOCK):
            storage.bring(checkpoint, part)

    run.checkpoints = Checkpoints(run.checkpoints.folder, run.shown, bring)
    with locked(run.path / LOCK):
        storage.refresh(run.path, files)
    if not run.exists():
        raise _no_run(storage)
    return run


def _no_run(storage: Storage) -> CommandError:
    return CommandError(f"{storage.uri} is not a run's folder: it has no run's {CONFIG}.")


def _has_checkpoints(run: RunDirectory) -> bool:
    return run.exists() and not run.checkpoints.empty()


def _is_only_here(storage: Storage, names: Sequence[str]) -> bool:
    """Tells whether the local folder has a run of which storage has no checkpoint, and nothing that is no run's."""
    if storage.updates(names) or (names and not storage.holds_run(names)):
        return False
    return _has_checkpoints(RunDirectory(_cache(storage, "runs")))


def _has_all(run: RunDirectory, storage: Storage, names: Sequence[str]) -> bool:
    """Tells whether the local folder has all that storage has, and maybe more, of the very same run."""
    if _is_only_here(storage, names):
        return True
    saved = [update for update in run.checkpoints.updates() if not manifest.fault(run.checkpoints.place(update))]
    here, there = max(saved, default=-1), max(storage.updates(names), default=-1)
    if not run.exists() or here < max(there, 0):
        return False
    # What was learned after that checkpoint is done anew when a run goes on, so of a run that is ahead only the lines
    # before it are the same: they hold times, which no other run shares. The line of update 0 has none, so its command
    # counts too. Of one that is not, storage may have no line that is not here. A copy may have been cut off.
    return all(
        file.read_bytes().startswith(
            b"".join(storage.read(file.name).splitlines(keepends=True)[: lines if here > there else None])
        )
        for file, lines in ((run.metrics.path, there + 1), (run.path / CONFIG, 1))
    )


def hand_over(run: RunDirectory, settings: Settings) -> None:
    """Ends the mirroring of a run: storage has everything, and the local folder goes.

    Raises:
        StorageError: storage cannot be written; the local folder stays.
    """
    try:
        run.mirror(settings.keep_checkpoints)
    except StorageError as error:
        raise StorageError(f"{error} {stranded(run)}") from error
    leave(run)


def leave(run: RunDirectory) -> None:
    """Removes the local folder of a run that storage has all of."""
    if run.storage is not None:
        shutil.rmtree(run.path.parent)


def stranded(run: RunDirectory) -> str:
    """Returns where everything is that storage lacks, and how it gets there."""
    return (
        f"Nothing is lost: the run is in {run.path} on {platform.node()}. When storage can be written again, "
        f"`{run.resume_command()}` on that machine copies it."
    )


def _local(storage: Storage) -> RunDirectory:
    """Takes the local folder of what is mirrored to `storage`."""
    run = RunDirectory(_cache(storage, "runs"))
    for folder in filter(None, (run.path, storage.folder)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"{folder}, where the run is to work, cannot be made: {error.strerror}.") from error
    run.storage = storage
    run.lock()
    return run


def _cache(storage: Storage, kind: str) -> Path:
    """Returns the local folder of what is in `storage`."""
    return user_cache() / kind / hashlib.sha256(storage.uri.encode()).hexdigest()[:12] / storage.name


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()
