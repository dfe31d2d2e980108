"""A lease on a run in storage: who may write there, where no lock reaches.

A small object beside the run's files names its holder and the time, and is renewed as long as that lives. One that was
not renewed for `STALE` seconds may be taken by anybody: its holder was killed, or has lost the network, and then finds
out when it next writes. So the clocks of the machines must agree within a minute.

The local folder in which a run works notes the lease under which it last had all of the run. Where storage still names
that one, nobody else has written there since.
"""

import contextlib
import json
import os
import platform
import secrets
import threading
import time
from pathlib import Path
from typing import NamedTuple

from launch.console.errors import CommandError
from launch.run_folder.layout import LEASE
from launch.run_folder.storage import Storage, StorageError

RENEWED = 30.0
"""Seconds after which a lease is renewed."""
STALE = 120.0
"""Seconds after which one that was not renewed is free."""
SETTLED = 2.0
"""Seconds after which, of several that took a free lease at once, all see who has it."""


class Held(CommandError):
    """Another process has the lease; the message says which, and what to do."""


class Lost(StorageError):
    """Another process has taken the lease from this one; the message says which, and where this one's run is."""


class Holder(NamedTuple):
    """What the object in storage says."""

    id: str
    """Of the lease: another one each time that it is taken."""
    host: str
    process: int
    time: float
    """When it was last renewed, in seconds since 1970; 0: it was given back."""


class Lease:
    """A lease for this process on the run in a storage, which works in a local folder that this process has locked."""

    def __init__(self, storage: Storage, folder: Path) -> None:
        self.unbroken = False
        """Nobody else has held a lease since the local folder noted its own."""
        self._storage = storage
        self._folder = folder
        self._id = secrets.token_hex(8)
        self._ended = threading.Event()
        self._writing = threading.Lock()

    def take(self, locked: bool) -> None:
        """Takes the lease, and renews it until it is given back.

        Args:
            locked: a lock on the storage says that nobody else can be writing there.

        Raises:
            Held: another process has it.
            StorageError: storage cannot be read or written.
        """
        there, noted = self._read(), self._noted()
        self.unbroken = noted == (there.id if there else None)
        alone = locked or (there is not None and self.unbroken)  # the local lock is this process's, so that one ended
        if there is not None and not alone and time.time() - there.time < STALE:
            raise Held(self._in_use(there))
        self._write(time.time())
        if not alone:
            time.sleep(SETTLED)
            if (there := self._read()) is not None and there.id != self._id:
                raise Held(self._in_use(there))
        threading.Thread(target=self._keep, daemon=True).start()

    def note(self) -> None:
        """Notes that the local folder has all of the run now."""
        (self._folder / LEASE).write_text(self._id)

    def renew(self) -> None:
        """Says that the holder lives.

        Raises:
            Lost: another process has taken the lease.
            StorageError: storage cannot be read or written.
        """
        with self._writing:
            if self._ended.is_set():
                return
            there = self._read()
            if there is not None and there.id != self._id:
                raise Lost(
                    f"{self._storage.uri} was taken over by process {there.process} on {there.host}, as this one had "
                    f"not been heard of for {STALE:.0f} s. What this one did is in {self._folder} on {platform.node()}."
                )
            self._write(time.time())

    def release(self) -> None:
        """Gives the lease back, if it is still held. Where storage cannot be reached, it becomes free by itself."""
        self._ended.set()
        with self._writing, contextlib.suppress(StorageError):
            there = self._read()
            if there is not None and there.id == self._id:
                if self._noted() is None:  # there is no local folder any more that could have more than storage
                    self._storage.remove(LEASE)
                else:
                    self._write(0.0)

    def _keep(self) -> None:
        while not self._ended.wait(RENEWED):
            with contextlib.suppress(StorageError):  # who next copies something is told
                self.renew()

    def _read(self) -> Holder | None:
        return _holder(self._storage.find(LEASE))

    def _write(self, now: float) -> None:
        holder = Holder(self._id, platform.node(), os.getpid(), now)
        self._storage.write(LEASE, json.dumps(holder._asdict()).encode())

    def _noted(self) -> str | None:
        file = self._folder / LEASE
        return file.read_text() if file.exists() else None

    def _in_use(self, holder: Holder) -> str:
        silent = max(time.time() - holder.time, 0.0)
        return (
            f"{self._storage.uri} is in use by another run (process {holder.process} on {holder.host}, heard of "
            f"{silent:.0f} s ago). Stop it, or name another place with --out. If it was killed, try again in "
            f"{max(STALE - silent, 1.0):.0f} s."
        )


def lease_holder(content: bytes | None) -> str | None:
    """Returns the process that holds a lease, as `123 on host`; None where nobody does.

    Args:
        content: of the object that says so; None where there is none.
    """
    holder = _holder(content)
    if holder is None or time.time() - holder.time >= STALE:
        return None
    return f"{holder.process} on {holder.host}"


def _holder(content: bytes | None) -> Holder | None:
    try:
        return None if content is None else Holder(**json.loads(content))
    except (ValueError, TypeError):  # cut off
        return None
