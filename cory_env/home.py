"""Paths that users write: `~` at their start, and files that the upload for a Ray job may lack.

A shell expands `~` only at the start of a word, and YAML files never do.
"""

import json
import os

IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets for the driver of a job: its runtime environment and metadata."""


class HomeError(ValueError):
    """The home directory does not exist."""


def expand_home(path: str) -> str:
    """Replaces `~` or `~user` at the start of a path by that home directory. Other text stays unchanged."""
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        name = path.partition("/")[0]
        raise HomeError(f"Home directory {name} not found. Write ./{name} if a file or folder has that name.")
    return expanded


def job_id() -> str | None:
    """Returns the id of the job that this process drives, such as `raysubmit_…`; None outside of a job."""
    metadata = json.loads(os.environ.get(IN_JOB) or "{}").get("metadata") or {}
    return metadata.get("job_submission_id")


def upload_hint(path: str | os.PathLike[str] = "") -> str:
    """Returns a sentence, with a leading space, for an error about a missing file; empty outside of a job.

    Args:
        path: Of the file. An absolute path is not part of the upload, so it has no hint.
    """
    if IN_JOB not in os.environ or os.path.isabs(path):
        return ""
    return (
        " A Ray job has only the files that `ray job submit --working-dir` uploaded, which excludes those in "
        ".gitignore and .rayignore: change these, or use an absolute path that all nodes can reach."
    )
