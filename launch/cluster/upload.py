"""What a job takes along: the working directory, which is uploaded to the cluster."""

import logging
import os
from pathlib import Path

from launch.console.errors import CommandError

LARGEST = 50 * 2**20
"""Bytes that may be uploaded."""


def check_size(folder: Path) -> None:
    """Refuses to upload a folder that is too large.

    Raises:
        CommandError: it has more than 50 MiB, without what Ray leaves behind; the biggest files are named.
    """
    # What Ray uploads is said by its own walk alone: nested ignore files, and defaults that change.
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    if not folder.is_dir():
        raise CommandError(f"--working-dir {folder} is no folder.")
    folder, sizes = folder.resolve(), {}

    def note(path: Path) -> None:
        if path.is_file():
            sizes[path] = path.stat().st_size

    quiet = logging.getLogger(__name__)
    ignoring = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    _dir_travel(folder, [_get_excludes(folder, get_runtime_env_default_excludes())], note, ignoring, quiet)
    total = sum(sizes.values())
    if total > LARGEST:
        biggest = sorted(sizes, key=lambda path: -sizes[path])[:5]
        named = ", ".join(f"{path.relative_to(folder)} ({sizes[path] / 2**20:.1f} MiB)" for path in biggest)
        raise CommandError(
            f"{folder} has {total / 2**20:.0f} MiB to upload, and 50 are the limit: {named}. Name in .rayignore what "
            "the job does not need, and keep models and data on storage that the nodes reach."
        )
