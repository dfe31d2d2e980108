"""Handles user modules that have the name of one of this project's packages, such as `policies.py`.

The driver and Ray's workers import the project's packages: `cory_rllib` imports them from its own parent folder,
whatever the search path has first. The reward process imports the user's modules (`UsersModulesFirst`), because it
needs only `cory_env` of the project.
"""

import ast
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
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


def shadowed_import(module: str, packages: Iterable[str] = PROJECT_PACKAGES) -> tuple[str, Path] | None:
    """Finds a user module that a module imports but cannot get, because a project package has the same name.

    Args:
        module: The module whose imports are checked, including those inside functions.

    Returns:
        The user module's name and file; None if there is no such module.
    """
    shadowing = {name: file for name, file in shadowing_modules().items() if name in packages}
    if not shadowing:
        return None
    spec = None if module in shadowing else find_spec(module)
    source = None if spec is None else spec.origin
    imported = _imports(Path(source)) if source is not None and source.endswith(".py") else ()
    for name in (module, *imported):
        package = name.partition(".")[0]
        if package in shadowing and (name == package or find_spec(name) is None):
            return package, shadowing[package]
    return None


def _imports(file: Path) -> Iterator[str]:
    """Yields the modules that a file imports; `from package import name` counts as `package.name`."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names if node.module in PROJECT_PACKAGES else [node.module]
