"""Where the files of a run's settings are: a command in another folder finds those that it began with."""

import importlib.util
import os
import sys
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from cory_env.functions import parse_spec, search_working_folder
from cory_env.pickled import display_name, is_pickled
from cory_env.shadowing import ROOT
from cory_env.tasks.rows import HUB
from launch.console.errors import CommandError
from policies.models.model_names import is_bundled
from policies.settings.settings import BY_CONTENT, Settings

NAMED = (*BY_CONTENT, "start_from")
"""Settings that name files or folders."""
NOT_CALLED = (ROOT / "policies", ROOT / "launch")
"""Our packages in whose place a function's process imports a user's module of that name."""
_added: list[str] = []
"""Folders in which runs had modules, the latest run's first."""


def located(
    settings: Settings,
    paths: Mapping[str, str],
    needed: Container[str] = BY_CONTENT,
    settable: Container[str] = BY_CONTENT,
    absolute: bool = False,
) -> Settings:
    """Returns settings whose files are there: where they name none in the present folder, those that a run began with.

    Args:
        settings: of a run.
        paths: where its files lay (`launch.run_folder.sources`).
        needed: the settings whose files must be there.
        settable: the settings that the command can be given.
        absolute: name all files by absolute paths.

    Raises:
        CommandError: a file or folder that is needed is neither here nor there.
    """
    changes: dict[str, object] = {}
    for key in NAMED:
        value = getattr(settings, key)
        names = value if isinstance(value, list) else [value] if value is not None else []
        present = [_locate(key, name, paths, key in needed, key in settable, absolute) for name in names]
        if present != names:
            changes[key] = present if isinstance(value, list) else present[0]
    return settings.model_copy(update=changes) if changes else settings


def absolute_paths(settings: Settings, functions: Iterable[str]) -> dict[str, str]:
    """Returns where the files and folders lie that settings name, and the modules of functions, by their names."""
    values = [settings.data, settings.eval_data, settings.start_from]
    values += [name for name in settings.models.values() if not is_bundled(name)]
    names = [path_in(value) for value in values if value is not None]
    paths = {name: os.path.abspath(name) for name in names if Path(name).exists()}
    files = {display_name(name): module_file(name) for name in functions}
    return paths | {name: os.path.abspath(file) for name, file in files.items() if file is not None}


def module_file(function: str) -> Path | None:
    """Returns the file of the module in which a function is; None where there is none, or it cannot be found."""
    if is_pickled(function):
        return None
    module = parse_spec(function)[0]
    file = Path(*module.split(".")).with_suffix(".py")  # in this folder, where rewards are looked for first
    if file.is_file():
        return file
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    origin = None if spec is None else spec.origin
    if origin is None or not Path(origin).is_file() or any(Path(origin).is_relative_to(own) for own in NOT_CALLED):
        return None
    return Path(origin)


def add_module_folders(functions: Iterable[str], paths: Mapping[str, str]) -> None:
    """Lets this process, and those that it starts, import the modules of functions from where a run had them.

    Only modules that are not found otherwise: the run's folder comes after all others, the present one included, but
    before those that were added for other runs.

    Args:
        functions: their names.
        paths: where the run's files lay.
    """
    search_working_folder()
    earlier = [folder for folder in _added if folder in sys.path]
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in earlier]
    sys.path[:] = [path for path in sys.path if path not in earlier]
    latest = []
    for name in functions:
        recorded = paths.get(display_name(name))
        if recorded is not None and module_file(name) is None and Path(recorded).is_file():
            latest.append(str(Path(recorded).parents[parse_spec(name)[0].count(".")]))
    _added[:] = dict.fromkeys([*latest, *earlier])
    sys.path += _added
    os.environ["PYTHONPATH"] = os.pathsep.join([*inherited, *_added])


def _locate(key: str, value: str, paths: Mapping[str, str], needed: bool, settable: bool, absolute: bool) -> str:
    name = path_in(value)
    recorded = paths.get(name)
    if recorded is None or (Path(name).exists() and not absolute):
        return value
    if Path(recorded).exists():
        return value.replace(name, recorded, 1)
    if not needed:
        return value
    folder = Path(recorded).parent
    where = str(folder) if Path(os.path.abspath(name)) == Path(recorded) else f"{os.getcwd()} nor in {folder}"
    advice = f"say where it is: {key}=PATH" if settable else "start from the folder that holds it"
    raise CommandError(
        f"{key}={value}: there is no {Path(name).name} in {where}, where the run had it. Put it back, or {advice}."
    )


def path_in(value: str) -> str:
    """Returns the path in the name of data, a model or a run, if it is one."""
    return value.partition("?")[0].removeprefix(HUB)
