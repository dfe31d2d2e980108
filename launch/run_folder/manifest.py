"""The manifest of a checkpoint: its format, who wrote it, and a checksum of every file.

A rename makes a checkpoint whole when it is written. What a disk, a copy or a hand does to it later shows here.
"""

import json
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FORMAT = 1
"""Goes up whenever an older checkpoint can no longer be continued as it would have been."""
NAME = "manifest.json"
_CHUNK = 2**24  # bytes read at once


class FormatError(ValueError):
    """A checkpoint is in another format than this version reads; the message says which, and what to do."""


def own_version() -> str:
    """Returns the version of this distribution; a checkout that was never installed has none."""
    try:
        return version("cory-rllib")
    except PackageNotFoundError:
        return "(a checkout)"


def write(folder: Path) -> None:
    """Writes the manifest of all files that are in the folder now."""
    entries = {"format": FORMAT, "cory-rllib": own_version(), "files": _checksums(folder)}
    (folder / NAME).write_text(json.dumps(entries, indent=1), encoding="utf-8")


def verify(folder: Path, part: str = "") -> str | None:
    """Returns what is wrong with a folder, to follow its name in a sentence, or None.

    Args:
        folder: with a manifest.
        part: look only at files whose path begins like this.

    Raises:
        FormatError: it may be whole, but another version wrote it in another format.
    """
    try:
        entries = json.loads((folder / NAME).read_text(encoding="utf-8"))
        written, writer, sealed = entries["format"], entries["cory-rllib"], dict(entries["files"])
    except FileNotFoundError:
        return f"has no {NAME}"
    except (ValueError, KeyError, TypeError):
        return f"has a damaged {NAME}"
    if written != FORMAT:
        raise FormatError(
            f"{folder} is in checkpoint format {written}, written by cory-rllib {writer}; this is {own_version()}, "
            f"which goes on from format {FORMAT} only. Use that version, or start a new run."
        )
    for name, checksum in sealed.items():
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
        while chunk := file.read(_CHUNK):
            total = zlib.crc32(chunk, total)
    return total
