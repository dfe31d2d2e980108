"""Whether this process is the driver of a Ray job, and the working directory that `ray job submit` uploads for it."""

import json
import os

IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets for the driver of a job: its runtime environment and metadata."""


def job_id() -> str | None:
    """Returns the id of the job that this process drives, such as `raysubmit_…`; None outside of a job."""
    metadata = json.loads(os.environ.get(IN_JOB) or "{}").get("metadata") or {}
    return metadata.get("job_submission_id")


def upload_hint(path: str = "") -> str:
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
