"""Leases on runs in storage, which ensure a single writer where file locks do not work.

The lease is a small object beside the run's files, with the owner and the time of its last heartbeat. A lease without a
heartbeat for `STALE` seconds may be taken over: its owner was killed, or lost the network and will stop at its next
upload. This requires the machines' clocks to agree within a minute.
"""

import contextlib
import json
import os
import platform
import secrets
import threading
import time
from pathlib import Path
from typing import NamedTuple, Self

from launch.console.errors import CommandError
from launch.run_folder.layout import LEASE
from launch.run_folder.locks import host_name
from launch.run_folder.storage import Storage, StorageError

RENEW_SECONDS = 30.0
"""Seconds between heartbeats."""
STALE = 120.0
"""Seconds without a heartbeat after which a lease may be taken over."""


class LeaseHeldError(CommandError):
    """Another process holds the lease. The message has that process and a remedy."""


class LeaseLostError(StorageError):
    """Another process has taken the lease over. The message has that process and this process's local folder."""


class Owner(NamedTuple):
    """The content of a lease."""

    writer: str
    """Id of the owner's local folder, which is stored there."""
    host: str
    process: int
    time: float
    """Time of the last heartbeat, in seconds since 1970."""

    @property
    def is_alive(self) -> bool:
        """Whether the last heartbeat is recent."""
        return time.time() - self.time < STALE

    def __str__(self) -> str:
        return f"{self.process} on {self.host}"

    @classmethod
    def read(cls, content: bytes | None) -> Self | None:
        """Parses a lease; None if there is none, or it is incomplete."""
        try:
            return None if content is None else cls(**json.loads(content))
        except (ValueError, TypeError):
            return None


class Lease:
    """Context manager: holds the lease on a run in storage, with a heartbeat thread."""

    def __init__(self, storage: Storage, folder: Path, is_locked: bool = False) -> None:
        """Initializes the lease without acquiring it.

        Args:
            storage: of the run.
            folder: the run's local folder, locked by this process.
            is_locked: whether this process has locked storage too. Then the lease's previous owner has ended, or is on
                a machine that the lock does not reach and stops at its next upload.
        """
        self._storage = storage
        self._folder = folder
        self._is_locked = is_locked
        self._released = threading.Event()
        self._heartbeat = threading.Thread(target=self._keep_renewing, daemon=True)

    def __enter__(self) -> Self:
        """Acquires the lease and starts the heartbeat.

        A lease from the same local folder does not count: the folder's lock shows that its owner has ended.

        Raises:
            LeaseHeldError: another process holds the lease, or acquired it at the same time and wrote last.
            StorageError: storage cannot be read or written.
        """
        file = self._folder / LEASE
        if not file.exists():
            file.write_text(secrets.token_hex(8))
        self._writer = file.read_text()
        if not self._is_locked:
            self._check_not_held()
        self._write()
        self._check_not_held()
        self._heartbeat.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Releases the lease if it is still held. If storage is unreachable, the lease expires later."""
        self._released.set()
        self._heartbeat.join()
        with contextlib.suppress(StorageError):
            if self._is_owner(self._owner()):
                self._storage.remove(LEASE)

    def renew(self) -> None:
        """Writes a heartbeat.

        Raises:
            LeaseLostError: another process has taken the lease over.
            StorageError: storage cannot be read or written.
        """
        owner = self._owner()
        if not self._is_owner(owner):  # None: the process that took it over has ended
            other = f"process {owner}" if owner else "another process"
            raise LeaseLostError(
                f"{self._storage.uri} was taken over by {other}, because this process had sent no heartbeat for "
                f"{STALE:.0f} s. This process's results are in {self._folder} on {platform.node()}."
            )
        self._write()

    def _keep_renewing(self) -> None:
        while not self._released.wait(RENEW_SECONDS):
            with contextlib.suppress(StorageError):  # the next upload reports it
                self.renew()

    def _check_not_held(self) -> None:
        owner = self._owner()
        if owner is not None and owner.is_alive and not self._is_owner(owner):
            age = max(time.time() - owner.time, 0.0)
            raise LeaseHeldError(
                f"{self._storage.uri} is in use by another run (process {owner}, last heartbeat {age:.0f} s ago). Stop "
                "it, or choose another location with --out. If it was killed, try again in "
                f"{max(STALE - age, 1.0):.0f} s."
            )

    def _owner(self) -> Owner | None:
        return Owner.read(self._storage.read(LEASE))

    def _is_owner(self, owner: Owner | None) -> bool:
        return owner is not None and owner.writer == self._writer

    def _write(self) -> None:
        owner = Owner(self._writer, host_name(), os.getpid(), time.time())
        self._storage.write(LEASE, json.dumps(owner._asdict()).encode())
