"""A user's own modules with the name of one of our packages, such as `policies.py`.

Ours are imported in the driver and in Ray's workers: `cory_rllib` imports them from beside itself, whatever else the
search path has first. In the process that computes rewards the user's are (`UsersModulesFirst`); of ours, that process
needs `cory_env` alone.
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
"""The folder of our packages."""
PACKAGES = ("cory_env", "policies", "launch", "cory_rllib")
WORKER_SETUP = "cory_rllib.worker.set_up"
"""What Ray's workers call first, by name, before they look for modules where the driver does."""


def shadowing_modules(folders: Iterable[str | Path] | None = None) -> dict[str, Path]:
    """Finds regular modules that have the name of one of our packages.

    Args:
        folders: where to look; None: in the present folder, and in those of the search path that come before ours.

    Returns:
        Their files, by name.
    """
    if folders is None:
        folders = list(takewhile(lambda folder: Path(folder).resolve() != ROOT, _search_path()))
    specs = {name: _users_spec(name, folders) for name in PACKAGES}
    return {name: Path(spec.origin) for name, spec in specs.items() if spec is not None and spec.origin is not None}


def _search_path() -> list[str]:
    return list(dict.fromkeys([os.getcwd(), *(path or os.getcwd() for path in sys.path)]))


def _users_spec(name: str, folders: Iterable[str | Path]) -> ModuleSpec | None:
    """Finds a module in folders, but for those with our packages: a checkout of this project shadows nothing."""
    paths = [str(folder) for folder in folders if not Path(folder, "cory_rllib", "__init__.py").is_file()]
    return PathFinder.find_spec(name, paths)


@contextlib.contextmanager
def own_packages_first() -> Iterator[None]:
    """Lets processes that `multiprocessing` spawns meanwhile import our packages: they take over the search path."""
    added = [str(ROOT)] if shadowing_modules() else []
    sys.path[:0] = added
    try:
        yield
    finally:
        del sys.path[: len(added)]


class UsersModulesFirst(MetaPathFinder):
    """Finds the user's modules, for `sys.meta_path` of a process that needs none of our packages but `cory_env`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a module with the name of one of our packages, a folder without an `__init__.py` too."""
        return _users_spec(fullname, _search_path()) if fullname in PACKAGES else None


def shadowed_import(module: str, packages: Iterable[str] = PACKAGES) -> tuple[str, Path] | None:
    """Finds a user's module that another module of theirs needs, but cannot have beside ours of the same name.

    Args:
        module: whose file's imports are looked at, those in functions too.
        packages: those of ours that are imported.

    Returns:
        Its name and file; None if there is none.
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
    """Yields the modules that a file imports; `from package import name` asks for `package.name`."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names if node.module in PACKAGES else [node.module]
