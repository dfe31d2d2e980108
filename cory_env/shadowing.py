"""Handles user modules that have the name of one of this project's packages, such as `policies.py`.

The driver and Ray's workers import the project's packages: `cory_rllib` imports them from its own parent folder,
whatever the search path has first. The reward process imports the user's modules (`UsersModulesFirst`), because it
needs only `cory_env` of the project.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from itertools import takewhile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
"""The folder that contains the project's packages."""
PROJECT_PACKAGES = ("cory_env", "policies", "launch", "cory_rllib")
WORKER_SETUP = "cory_rllib.worker.set_up"
"""The function that Ray's workers call first, before they get the driver's search path."""


def shadowing_modules(folders: Iterable[str | Path] | None = None) -> dict[str, Path]:
    """Finds regular modules that have the name of one of the project's packages.

    Args:
        folders: The folders to search. None: the current folder, and the search path's folders before the project's.

    Returns:
        The modules' files, by name.
    """
    if folders is None:
        folders = list(takewhile(lambda folder: Path(folder).resolve() != ROOT, _search_path()))
    specs = {name: _find_user_module(name, folders) for name in PROJECT_PACKAGES}
    return {name: Path(spec.origin) for name, spec in specs.items() if spec is not None and spec.origin is not None}


def _search_path() -> list[str]:
    return list(dict.fromkeys([os.getcwd(), *(path or os.getcwd() for path in sys.path)]))


def _find_user_module(name: str, folders: Iterable[str | Path]) -> ModuleSpec | None:
    """Finds a module in folders, except those with the project's packages: a checkout of it shadows nothing."""
    paths = [str(folder) for folder in folders if not Path(folder, "cory_rllib", "__init__.py").is_file()]
    return PathFinder.find_spec(name, paths)


@contextlib.contextmanager
def project_packages_first() -> Iterator[None]:
    """Puts the project's packages first on the search path, which spawned `multiprocessing` processes inherit."""
    prefix = [str(ROOT)] if shadowing_modules() else []
    sys.path[:0] = prefix
    try:
        yield
    finally:
        del sys.path[: len(prefix)]


class UsersModulesFirst(MetaPathFinder):
    """Finds the user's modules first; for `sys.meta_path` of a process that needs only `cory_env` of the project."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a module with the name of one of the project's packages, including folders without `__init__.py`."""
        return _find_user_module(fullname, _search_path()) if fullname in PROJECT_PACKAGES else None
