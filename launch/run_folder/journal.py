"""Append-only JSON Lines files that survive a kill: a line is whole or absent, and a resumed run leaves no doubles."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.console.errors import CommandError
from launch.run_folder.records import to_json
from policies.models.atomic import named_errors, sync


class Journal:
    """A JSON Lines file of records that are numbered, in a run by the `update` they belong to."""

    def __init__(self, path: Path, number: str = "update") -> None:
        """Names the file, which may not exist yet, and the key under which every record holds its number."""
        self.path = path
        self.number = number

    def append(self, record: Mapping[str, object]) -> None:
        """Writes one record to the disk before it returns.

        Raises:
            CommandError: its folder is gone.
        """
        line = json.dumps(to_json(dict(record)), ensure_ascii=False, allow_nan=False) + "\n"
        with _folder_needed(self.path), named_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Returns all whole records; what a kill or a full disk left of a last line is no record.

        Raises:
            CommandError: another line is damaged.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise CommandError(
                    f"{self.path} line {number} is not what a run wrote there ({error}). Restore it, or remove it."
                ) from error
        return records

    def cut_after(self, last: int) -> None:
        """Drops all records with a higher number, and what a kill left of a line, in one step."""
        kept = [record for record in self.read() if record[self.number] <= last]
        atomic_write(self.path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))


def atomic_write(path: Path, text: str) -> None:
    """Gives a file new content, in one step: a reader, or a kill, finds the old content or the new.

    Raises:
        CommandError: its folder is gone.
    """
    beside = path.with_name(f".{path.name}.new")
    with _folder_needed(path):
        with named_errors(path), beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync(path.parent)


@contextlib.contextmanager
def _folder_needed(path: Path) -> Iterator[None]:
    """Says which folder is missing if a file cannot be written for that reason.

    Raises:
        CommandError: there is no such folder.
    """
    try:
        yield
    except FileNotFoundError as error:
        if path.parent.is_dir():
            raise
        raise CommandError(f"The folder {path.parent} is gone: it was removed or renamed meanwhile.") from error
