"""Finding the files that a run's settings name, also from another working directory."""

import importlib.util
import os
import sys
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from cory_env.functions import parse_spec, search_working_folder
from cory_env.home import upload_hint
from cory_env.pickled import display_name, is_pickled
from cory_env.shadowing import ROOT
from cory_env.tasks.rows import HUB
from launch.console.errors import CommandError
from policies.models.model_names import is_bundled
from policies.settings.settings import BY_CONTENT, Settings

PATH_SETTINGS = (*BY_CONTENT, "start_from")
OWN_PACKAGE_DIRS = (ROOT / "policies", ROOT / "launch")
"""Our packages that a user's module of the same name shadows in a function's process."""
_module_folders: list[str] = []
"""Module folders of runs that were added to `sys.path`, the latest run's first."""


def locate_files(
    settings: Settings, paths: Mapping[str, str], needed: Container[str] = BY_CONTENT, absolute: bool = False
) -> Settings:
    """Replaces file names that do not exist in the working directory with the recorded paths of the run.

    Args:
        paths: the run's recorded paths (`launch.run_folder.sources`).
        needed: settings whose files must exist.
        absolute: replace those that exist in the working directory too.
    """

    def locate(key: str, value: str, is_needed: bool) -> str:
        name = path_part(value)
        recorded = paths.get(name)
        if recorded is None or (Path(name).exists() and not absolute):
            return value
        if Path(recorded).exists():
            return value.replace(name, recorded, 1)
        if not is_needed:
            return value
        raise CommandError(
            f"{key}={value}: {Path(name).name} is no longer in {Path(recorded).parent}, where the run had it. Restore "
            f"it, or start the command in a folder that has it.{upload_hint(name)}"
        )

    changes: dict[str, object] = {}
    if settings.frozen_models:
        changes["roles"] = [
            role
            if role.frozen_model is None
            else role.model_copy(update={"policy": locate("roles", role.frozen_model, "model" in needed)})
            for role in settings.roles or ()
        ]
    for key in PATH_SETTINGS:
        value = getattr(settings, key)
        if isinstance(value, list):
            changes[key] = [locate(key, name, key in needed) for name in value]
        elif value is not None:
            changes[key] = locate(key, value, key in needed)
    changes = {key: value for key, value in changes.items() if value != getattr(settings, key)}
    return settings.model_copy(update=changes) if changes else settings


def absolute_paths(settings: Settings, functions: Iterable[str]) -> dict[str, str]:
    """Returns the absolute paths of the settings' files and folders, and of functions' modules, by their names."""
    values = [settings.data, settings.eval_data, settings.start_from]
    values += [name for name in settings.all_models.values() if not is_bundled(name)]
    names = [path_part(value) for value in values if value is not None]
    paths = {name: os.path.abspath(name) for name in names if Path(name).exists()}
    files = {display_name(name): module_file(name) for name in functions}
    return paths | {name: os.path.abspath(file) for name, file in files.items() if file is not None}


def module_file(function: str) -> Path | None:
    """Returns the file of a function's module; None if it has none, or it is not found."""
    if is_pickled(function):
        return None
    module = parse_spec(function)[0]
    file = Path(*module.split(".")).with_suffix(".py")  # rewards are first imported from the working directory
    if file.is_file():
        return file
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    file = Path((spec and spec.origin) or "")
    return file if file.is_file() and not any(map(file.is_relative_to, OWN_PACKAGE_DIRS)) else None


def add_module_folders(functions: Iterable[str], paths: Mapping[str, str]) -> None:
    """Adds a run's module folders to `sys.path` and PYTHONPATH, for functions that are not importable otherwise.

    The folders come after all others, including the working directory, but before those of earlier runs.
    """
    search_working_folder()
    earlier = [folder for folder in _module_folders if folder in sys.path]
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in earlier]
    sys.path[:] = [path for path in sys.path if path not in earlier]
    latest = []
    for name in functions:
        recorded = paths.get(name)
        if recorded is not None and module_file(name) is None and Path(recorded).is_file():
            latest.append(str(Path(recorded).parents[parse_spec(name)[0].count(".")]))
    _module_folders[:] = dict.fromkeys([*latest, *earlier])
    sys.path += _module_folders
    os.environ["PYTHONPATH"] = os.pathsep.join([*inherited, *_module_folders])


def path_part(value: str) -> str:
    """Returns the path part of a setting that names data, a model or a run."""
    return value.partition("?")[0].removeprefix(HUB)
