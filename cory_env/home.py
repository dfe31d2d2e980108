"""Expands `~` at the start of paths. A shell expands it only at the start of a word, and YAML files never do."""

import os


class HomeError(ValueError):
    """The home directory does not exist."""


def expand_home(path: str) -> str:
    """Replaces `~` or `~user` at the start of a path by that home directory. Other text stays unchanged.

    Raises:
        HomeError: The home directory does not exist.
    """
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        name = path.partition("/")[0]
        raise HomeError(f"Home directory {name} not found. Write ./{name} if a file or folder has that name.")
    return expanded
