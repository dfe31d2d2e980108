"""Runs in storage: trained in a local folder that is mirrored there, and copied from there to be looked at."""

import contextlib
import hashlib
import platform
import secrets
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from launch.console.errors import CommandError
from launch.console.interrupts import held
from launch.run_folder import manifest
from launch.run_folder.checkpoints import Checkpoints
from launch.run_folder.directory import RunDirectory
from launch.run_folder.layout import CONFIG, LOCK, RUN_ID
from launch.run_folder.lease import Lease, Lost
from launch.run_folder.storage import LOOKED_AT, Storage, StorageError, check_place, is_uri
from policies.models.cached_folder import locked, user_cache
from policies.settings.settings import Settings


def create_run(uri: str) -> RunDirectory:
    """Takes a local folder for a new run that is mirrored to `uri`.

    Raises:
        CommandError: something is there already, or only in the local folder; another process trains it.
        StorageError: storage cannot be read or written.
    """
    _refuse_begun(uri)  # before anything is touched
    run, lease, storage = _local(uri)
    _refuse_begun(uri)  # now that nobody else can begin one
    storage.clear()  # a run that ended before anything of it was saved
    _empty(run.path)
    (run.path / RUN_ID).write_text(secrets.token_hex(8))
    lease.note()
    return run


def is_begun(uri: str) -> bool:
    """Tells whether something of a run is saved in storage, or on this machine and has yet to arrive there.

    Raises:
        CommandError: there is no such storage, or something else in it.
        StorageError: storage cannot be read.
    """
    storage = Storage(uri)
    names = storage.names()
    if names and not storage.holds_run(names):
        raise CommandError(f"{storage.uri} is not empty and holds no run: empty it, or name another place.")
    return bool(storage.updates(names)) or not RunDirectory(_cache(storage, "runs")).checkpoints.empty()


def open_run(uri: str) -> RunDirectory:
    """Takes the local folder of a run in storage, and fetches all but the checkpoint (`RunDirectory.bring`).

    Where this machine has all of the run, and maybe more, which never arrived in storage, that is copied there instead.

    Raises:
        CommandError: there is no run with a checkpoint; another process trains it.
        StorageError: storage cannot be read or written.
    """
    if not is_begun(uri):
        raise CommandError(f"{uri} has no run with a checkpoint to go on from. Correct the place, or start a new run.")
    run, lease, storage = _local(uri)
    if _has_all(run, lease, storage):
        run.mirror(run.settings().keep_checkpoints)
    else:
        _empty(run.path)
        storage.fetch(run.path)
    lease.note()
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
        raise CommandError(f"{storage.uri} is not a run's folder: it has no run's {CONFIG}.")
    return run


def _refuse_begun(uri: str) -> None:
    if is_begun(uri):
        storage = Storage(uri)
        raise CommandError(
            f"{storage.uri} has a run, there or in {_cache(storage, 'runs')} on {platform.node()}: go on with it by "
            f"`cory train --resume {shlex.quote(storage.uri)}`, or name another place with --out."
        )


def _has_all(run: RunDirectory, lease: Lease, storage: Storage) -> bool:
    """Tells whether the local folder has all of the run that storage has: the very same one, and at least as far."""
    checkpoints = run.checkpoints
    whole = (each for each in reversed(checkpoints.updates()) if not manifest.fault(checkpoints.place(each)))
    here, there = next(whole, -1), max(storage.updates(storage.names()), default=-1)
    # Who wrote last has lines and curves from after a checkpoint that the other may have, too.
    further = (here, lease.unbroken) >= (there, True)
    return there < 0 or (further and _identity(run.read) == _identity(storage.find))


def _identity(read: Callable[[str], bytes | None]) -> bytes:
    """Returns what no other run there has: its id, or, where an earlier version began it, its command."""
    return read(RUN_ID) or (read(CONFIG) or b"").partition(b"\n")[0]


def hand_over(run: RunDirectory, settings: Settings) -> None:
    """Ends the mirroring of a run: storage has everything, and the local folder goes.

    Raises:
        StorageError: storage cannot be written; the local folder stays.
    """
    if (said := stranded(run, settings)) is not None:
        raise StorageError(said)
    leave(run)


def leave(run: RunDirectory) -> None:
    """Removes the local folder of a run that storage has all of, and gives both back."""
    if run.storage is not None:
        with held():
            shutil.rmtree(run.path.parent)
            run.unlock()


def stranded(run: RunDirectory, settings: Settings) -> str | None:
    """Copies what is new to storage; where that fails, returns why, where everything is, and how it gets there."""
    try:
        run.mirror(settings.keep_checkpoints)
    except Lost as error:
        return str(error)
    except StorageError as error:
        return (
            f"{error} Nothing is lost: the run is in {run.path} on {platform.node()}. When storage can be written "
            f"again, `{run.resume_command()}` on that machine copies it."
        )
    return None


def discard(run: RunDirectory) -> None:
    """Removes a run that was refused before anything of it was recorded, here and in storage.

    Not if its folder is gone: what was recorded of it is then not known, and another run may have its path.
    """
    if run.metrics.path.exists() or not run.in_place:
        return
    if run.storage is None:
        run.remove()
    else:
        with contextlib.suppress(StorageError):
            run.storage.clear()
        if run.new and run.storage.folder is not None:
            shutil.rmtree(run.storage.folder)
        leave(run)


def _local(uri: str) -> tuple[RunDirectory, Lease, Storage]:
    """Takes the local folder of what is mirrored to `uri`, and a lease there."""
    storage = Storage(uri)
    run = RunDirectory(_cache(storage, "runs"))
    run.new = storage.folder is not None and not storage.folder.exists()
    for folder in filter(None, (run.path, storage.folder)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            hint = " Set XDG_CACHE_HOME to a folder that can be written." if folder == run.path else ""
            raise CommandError(
                f"{folder}, where the run is to work, cannot be made: {error.strerror}.{hint}"
            ) from error
    run.storage, run.lease = storage, Lease(storage, run.path)
    run.lock()
    return run, run.lease, storage


def _cache(storage: Storage, kind: str) -> Path:
    """Returns the local folder of what is in `storage`."""
    return user_cache() / kind / hashlib.sha256(storage.uri.encode()).hexdigest()[:12] / storage.name


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()
