"""Revisions of models on the hub. Learning uses this without the environment, so it does not import `cory_env`."""

from pathlib import Path


def split_revision(path: str) -> tuple[str, dict[str, str]]:
    """Splits the revision off a hub id.

    Args:
        path: A folder or hub id; `ID@REVISION` for a commit, tag or branch. Hub ids contain no `@`.

    Returns:
        The folder or hub id, and `from_pretrained`'s argument `revision`; empty for the default branch.
    """
    hub_id, at, revision = path.partition("@")
    return (hub_id, {"revision": revision}) if at and not Path(path).exists() else (path, {})
