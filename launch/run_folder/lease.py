"""A lease on a run in storage: the record of the process that owns it, where no lock may reach.

The record, a small object beside the run's files, names the owner and a time, which is renewed as long as the owner
lives. A run whose record was not renewed for `STALE` seconds may be taken over: its owner was killed, or has lost the
network, and then stops at its next upload. So the clocks of the machines must agree within a minute.
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
from launch.run_folder.storage import Storage, StorageError

RENEWED = 30.0
"""Seconds after which a lease is renewed."""
STALE = 120.0
"""Seconds after which one that was not renewed may be taken over."""


class LeaseHeldError(CommandError):
    """Another process has the lease; the message says which, and what to do."""


class LeaseLostError(StorageError):
    """Another process has taken the lease over; the message says which, and where this one's run is."""


class Owner(NamedTuple):
    """What the record says."""

    writer: str
    """The local folder in which the owner works, by an id that is kept there."""
    host: str
    process: int
    time: float
    """When it was last renewed, in seconds since 1970."""

    @property
    def is_alive(self) -> bool:
        """Whether it was renewed lately."""
        return time.time() - self.time < STALE

    def __str__(self) -> str:
        """As messages name it."""
        return f"{self.process} on {self.host}"

    @classmethod
    def read(cls, content: bytes | None) -> Self | None:
        """Reads the record's content; None: there is none, or it was cut off."""
        try:
            return None if content is None else cls(**json.loads(content))
        except (ValueError, TypeError):
            return None


class Lease:
    """This process's lease on a run in storage, while it is entered as a context."""

    def __init__(self, storage: Storage, folder: Path, is_locked: bool = False) -> None:
        """Names the run, and the local folder in which it works.

        Args:
            storage: of the run.
            folder: local; this process has locked it.
            is_locked: this process has locked storage too. So whoever wrote the record has ended; or is on a machine
                that the lock does not reach, and stops at its next upload.
        """
        self._storage = storage
        self._folder = folder
        self._is_locked = is_locked
        self._released = threading.Event()
        self._heartbeat = threading.Thread(target=self._keep_renewing, daemon=True)

    def __enter__(self) -> Self:
        """Takes the lease, and renews it from then on.

        Raises:
            Held: another process has it, or takes it at the same time and wrote last. None has that worked in the same
                local folder: its lock says that it ended.
            StorageError: storage cannot be read or written.
        """
        file = self._folder / LEASE
        if not file.exists():
            file.write_text(secrets.token_hex(8))
        self._writer = file.read_text()
        if not self._is_locked:
            self._refuse_other()
        self._write()
        self._refuse_other()
        self._heartbeat.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the lease back, if it is still held. If storage cannot be reached, it may be taken over by and by."""
        self._released.set()
        self._heartbeat.join()
        with contextlib.suppress(StorageError):
            if self._is_owner(self._owner()):
                self._storage.remove(LEASE)

    def renew(self) -> None:
        """Says that the owner lives.

        Raises:
            Lost: another process has taken the lease over.
            StorageError: storage cannot be read or written.
        """
        owner = self._owner()
        if not self._is_owner(owner):  # none: who took it over has ended
            other = f"process {owner}" if owner else "another process"
            raise LeaseLostError(
                f"{self._storage.uri} was taken over by {other}, as this one had not been heard of for {STALE:.0f} s. "
                f"What this one did is in {self._folder} on {platform.node()}."
            )
        self._write()

    def _keep_renewing(self) -> None:
        while not self._released.wait(RENEWED):
            with contextlib.suppress(StorageError):  # the next upload reports it
                self.renew()

    def _refuse_other(self) -> None:
        owner = self._owner()
        if owner is not None and owner.is_alive and not self._is_owner(owner):
            silent = max(time.time() - owner.time, 0.0)
            raise LeaseHeldError(
                f"{self._storage.uri} is in use by another run (process {owner}, heard of "
                f"{silent:.0f} s ago). Stop it, or name another place with --out. If it was killed, try again in "
                f"{max(STALE - silent, 1.0):.0f} s."
            )

    def _owner(self) -> Owner | None:
        return Owner.read(self._storage.read(LEASE))

    def _is_owner(self, owner: Owner | None) -> bool:
        return owner is not None and owner.writer == self._writer

    def _write(self) -> None:
        owner = Owner(self._writer, platform.node(), os.getpid(), time.time())
        self._storage.write(LEASE, json.dumps(owner._asdict()).encode())
