"""Finding the files that a run's settings name, also from another working directory."""

import importlib.util
import os
import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from functools import partial
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
    settings: Settings,
    paths: Mapping[str, str],
    needed: Container[str] = BY_CONTENT,
    settable: Container[str] = BY_CONTENT,
    absolute: bool = False,
) -> Settings:
    """Replaces file names that do not exist in the working directory with the recorded paths of the run.

    Args:
        paths: the run's recorded paths (`launch.run_folder.sources`).
    """
    changes: dict[str, object] = {}
    if settings.frozen_models:
        locate = partial(
            _resolve_path, "roles", paths=paths, needed="model" in needed, settable=False, absolute=absolute
        )
        changes["roles"] = [
            role if role.frozen_model is None else replace(role, policy=locate(value=role.frozen_model))
            for role in settings.roles or ()
        ]
    for key in PATH_SETTINGS:
        value = getattr(settings, key)
        names = value if isinstance(value, list) else [value] if value is not None else []
        present = [_resolve_path(key, name, paths, key in needed, key in settable, absolute) for name in names]
        if present != names:
            changes[key] = present if isinstance(value, list) else present[0]
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
    origin = None if spec is None else spec.origin
    if (
        origin is None
        or not Path(origin).is_file()
        or any(Path(origin).is_relative_to(folder) for folder in OWN_PACKAGE_DIRS)
    ):
        return None
    return Path(origin)


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
        recorded = paths.get(display_name(name))
        if recorded is not None and module_file(name) is None and Path(recorded).is_file():
            latest.append(str(Path(recorded).parents[parse_spec(name)[0].count(".")]))
    _module_folders[:] = dict.fromkeys([*latest, *earlier])
    sys.path += _module_folders
    os.environ["PYTHONPATH"] = os.pathsep.join([*inherited, *_module_folders])


def _resolve_path(key: str, value: str, paths: Mapping[str, str], needed: bool, settable: bool, absolute: bool) -> str:
    name = path_part(value)
    recorded = paths.get(name)
    if recorded is None or (Path(name).exists() and not absolute):
        return value
    if Path(recorded).exists():
        return value.replace(name, recorded, 1)
    if not needed:
        return value
    folder = Path(recorded).parent
    is_recorded = Path(os.path.abspath(name)) == Path(recorded)
    problem = f"not found in {folder}" if is_recorded else f"found neither in {os.getcwd()} nor in {folder}"
    advice = f"set {key}=PATH" if settable else "start the command in its folder"
    raise CommandError(
        f"{key}={value}: {Path(name).name} was {problem}, where the run had it. Restore it, or {advice}."
        f"{upload_hint(name)}"
    )


def path_part(value: str) -> str:
    """Returns the path part of a setting that names data, a model or a run."""
    return value.partition("?")[0].removeprefix(HUB)
