"""What a job takes along: the working directory, which is uploaded to the cluster."""

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from cory_env.shadowing import shadowing_modules
from launch.console.errors import CommandError
from policies.compat.ray import uploaded_files

LARGEST = 50 * 2**20
"""Bytes that may be uploaded."""


def uploaded_sizes(folder: Path) -> dict[Path, int]:
    """Returns the files that Ray uploads of a folder, by their absolute paths, with their sizes in bytes.

    Raises:
        CommandError: there is no such folder.
    """
    if not folder.is_dir():
        raise CommandError(f"--working-dir {folder} is no folder.")
    if file := shadowing_modules([folder]).get("cory_rllib"):
        raise CommandError(f"The job would import {file} in the place of our package cory_rllib. Rename that module.")
    gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    return {path: path.stat().st_size for path in uploaded_files(folder.resolve(), gitignore)}


def check_size(folder: Path, sizes: dict[Path, int]) -> None:
    """Refuses to upload a folder that is too large.

    Args:
        folder: to be uploaded.
        sizes: of its files.

    Raises:
        CommandError: it has more than 50 MiB, without what Ray leaves behind; the biggest files are named.
    """
    folder, total = folder.resolve(), sum(sizes.values())
    if total > LARGEST:
        biggest = sorted(sizes, key=lambda path: -sizes[path])[:5]
        named = ", ".join(f"{path.relative_to(folder)} ({sizes[path] / 2**20:.1f} MiB)" for path in biggest)
        raise CommandError(
            f"{folder} has {total / 2**20:.0f} MiB to upload, and 50 are the limit: {named}. Name in .rayignore what "
            "the job does not need, and keep models and data on storage that the nodes reach."
        )


def check_uploaded(folder: Path, files: Collection[Path], paths: Iterable[str]) -> None:
    """Refuses what a job would look for in vain: its relative paths begin at what was uploaded.

    Args:
        folder: to be uploaded.
        files: that are uploaded of it.
        paths: of files and folders that a command names. Absolute ones are the nodes' own.

    Raises:
        CommandError: one is not uploaded.
    """
    folder, uploaded = folder.resolve(), {*files}
    for name in paths:
        path = Path(os.path.normpath(folder / name))
        if Path(name).is_absolute():
            continue
        if not path.is_relative_to(folder):
            raise CommandError(
                f"{name} lies outside of the working directory {folder}, which is all that the job has. Name a folder "
                "that holds it by --working-dir, or an absolute path that all nodes reach."
            )
        if not path.exists():
            raise CommandError(
                f"There is no {name} in the working directory {folder}, which is all that the job has. Correct the "
                "path, or --working-dir."
            )
        parts = [path] if path.is_file() else [file for file in sorted(path.iterdir()) if file.is_file()]
        left_out = [file for file in parts if file not in uploaded and not file.name.startswith(".")]
        if left_out:
            raise CommandError(
                f"{left_out[0].relative_to(folder)} is left out of the upload by a rule in .gitignore or .rayignore, "
                "or by Ray's own (RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES). Change the rule, or put the file on "
                "storage that all nodes reach and name it by an absolute path."
            )
