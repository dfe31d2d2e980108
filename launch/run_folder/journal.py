"""Append-only JSON Lines files that survive a kill: no partial lines, and no duplicates after a resume."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.console.errors import CommandError
from launch.run_folder.records import to_json
from policies.files import atomic_write, named_errors


class Journal:
    """A JSON Lines file of updates."""

    def __init__(self, path: Path) -> None:
        """Initializes without reading or creating the file."""
        self.path = path

    def append(self, record: Mapping[str, object]) -> None:
        """Appends one record and syncs it to disk."""
        line = json.dumps(to_json(dict(record)), ensure_ascii=False, allow_nan=False) + "\n"
        with named_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Returns all records, without an incomplete last line (left by a kill or a full disk)."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise CommandError(
                    f"{self.path} line {number} is damaged ({error}). Restore it, or remove it."
                ) from error
        return records

    def cut_after(self, last: int) -> None:
        """Atomically removes all records of later updates, and an incomplete last line."""
        records = [record for record in self.read() if record["update"] <= last]
        atomic_write(self.path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
