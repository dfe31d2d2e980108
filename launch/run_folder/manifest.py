"""The manifest of a checkpoint: its format, the version that wrote it, and a checksum of every file.

Checkpoints are written atomically (by a rename). The manifest detects later damage, by the disk, a copy or an edit.
"""

import json
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FORMAT = 1
"""Increased whenever older checkpoints can no longer be resumed exactly."""
NAME = "manifest.json"
_CHUNK_BYTES = 2**24


class FormatError(ValueError):
    """A checkpoint has a format that this version cannot read. The message has the format and a remedy."""


def own_version() -> str:
    """Returns the version of this package, or `(a checkout)` if it is not installed."""
    try:
        return version("cory-rllib")
    except PackageNotFoundError:
        return "(a checkout)"


def write_manifest(folder: Path) -> None:
    """Writes the manifest of all files in the folder."""
    entries = {"format": FORMAT, "cory-rllib": own_version(), "files": _checksums(folder)}
    (folder / NAME).write_text(json.dumps(entries, indent=1), encoding="utf-8")


def verify(folder: Path, part: str = "") -> str | None:
    """Verifies a folder's files against its manifest.

    Args:
        part: verify only files whose paths start with this prefix.

    Returns:
        The problem, as the predicate of a sentence about the folder; None if the folder is valid.
    """
    try:
        entries = json.loads((folder / NAME).read_text(encoding="utf-8"))
        format_, writer, checksums = entries["format"], entries["cory-rllib"], dict(entries["files"])
    except FileNotFoundError:
        return f"has no {NAME}"
    except (ValueError, KeyError, TypeError):
        return f"has a damaged {NAME}"
    if format_ != FORMAT:
        raise FormatError(
            f"{folder} has checkpoint format {format_}, written by cory-rllib {writer}, but version {own_version()} "
            f"reads only format {FORMAT}. Use version {writer}, or start a new run."
        )
    for name, checksum in checksums.items():
        if name.startswith(part):
            if not (folder / name).is_file():
                return f"lacks its file {name}"
            if _checksum(folder / name) != checksum:
                return f"has a damaged file {name}"
    return None


def _checksums(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / NAME)
    return {path.relative_to(folder).as_posix(): _checksum(path) for path in files}


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            total = zlib.crc32(chunk, total)
    return total
