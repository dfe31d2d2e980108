"""Paths that begin with `~`: a shell expands that only where it begins a word, and a YAML file never."""

import os


class HomeError(ValueError):
    """There is no such home directory; the message says what to write instead."""


def expand_home(path: str) -> str:
    """Returns a path whose `~` or `~user` at the start is that home directory; any other text as it is.

    Raises:
        HomeError: there is no such home directory.
    """
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        name = path.partition("/")[0]
        raise HomeError(f"There is no home directory {name}. Write ./{name} if a file or folder has that name.")
    return expanded
