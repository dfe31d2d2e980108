"""The working directory of a job, which is uploaded to the cluster."""

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from cory_env.shadowing import shadowing_modules
from launch.console.errors import CommandError
from policies.compat.ray import uploaded_files

MAX_UPLOAD_BYTES = 50 * 2**20
"""Maximum size of an upload."""


def uploaded_sizes(folder: Path) -> dict[Path, int]:
    """Returns the sizes in bytes of the files that Ray uploads from a folder, by absolute path.

    Raises:
        CommandError: the folder does not exist, or contains a module `cory_rllib`.
    """
    if not folder.is_dir():
        raise CommandError(f"--working-dir {folder} is not a folder.")
    if file := shadowing_modules([folder]).get("cory_rllib"):
        raise CommandError(f"The job would import {file} instead of the package cory_rllib. Rename the module.")
    gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    return {path: path.stat().st_size for path in uploaded_files(folder.resolve(), gitignore)}


def check_size(folder: Path, sizes: dict[Path, int]) -> None:
    """Checks that a folder is small enough to be uploaded.

    Args:
        folder: to be uploaded.
        sizes: of its files.

    Raises:
        CommandError: the uploaded files exceed 50 MiB; the message has the largest files.
    """
    folder, total = folder.resolve(), sum(sizes.values())
    if total > MAX_UPLOAD_BYTES:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:5]
        listing = ", ".join(f"{path.relative_to(folder)} ({sizes[path] / 2**20:.1f} MiB)" for path in largest)
        raise CommandError(
            f"{folder} has {total / 2**20:.0f} MiB to upload, but the limit is 50 MiB: {listing}. List files that the "
            "job does not need in .rayignore, and keep models and data on storage that the nodes can reach."
        )


def check_uploaded(folder: Path, files: Collection[Path], paths: Iterable[str]) -> None:
    """Checks that the files of a command are uploaded. A job resolves relative paths in the uploaded folder.

    Args:
        folder: to be uploaded.
        files: the files in it that are uploaded.
        paths: files and folders that the command names. Absolute paths are the nodes' own, and are not checked.

    Raises:
        CommandError: a file is not uploaded.
    """
    folder, uploaded = folder.resolve(), {*files}
    for name in paths:
        path = Path(os.path.normpath(folder / name))
        if Path(name).is_absolute():
            continue
        if not path.is_relative_to(folder):
            raise CommandError(
                f"{name} is outside the working directory {folder}, and only that is uploaded. Set --working-dir to a "
                "folder that contains it, or use an absolute path that all nodes can reach."
            )
        if not path.exists():
            raise CommandError(
                f"{name} not found in the working directory {folder}, and only that is uploaded. Correct the path, or "
                "--working-dir."
            )
        parts = [path] if path.is_file() else [file for file in sorted(path.iterdir()) if file.is_file()]
        excluded = [file for file in parts if file not in uploaded and not file.name.startswith(".")]
        if excluded:
            raise CommandError(
                f"{excluded[0].relative_to(folder)} is excluded from the upload by a rule in .gitignore or .rayignore, "
                "or by Ray's defaults (RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES). Change the rule, or put the file on "
                "storage that all nodes can reach, and use its absolute path."
            )
