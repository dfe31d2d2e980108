"""Finding the files that a run's settings name, also from another working directory."""

import os
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path

from cory_env.home import upload_hint
from cory_env.tasks.rows import HUB
from launch.console.errors import CommandError
from policies.models.model_names import is_bundled
from policies.settings.settings import BY_CONTENT, Settings

PATH_SETTINGS = (*BY_CONTENT, "start_from")


def locate_files(
    settings: Settings, paths: Mapping[str, str], needed: Container[str] = BY_CONTENT, absolute: bool = False
) -> Settings:
    """Replaces file names that do not exist in the working directory with the recorded paths of the run.

    Args:
        paths: the run's recorded paths (`launch.run_folder.sources`).
        needed: settings whose files are read, so it is an error if a file that the run had is in neither place.
        absolute: replace names that exist in the working directory too.
    """

    def locate(key: str, value: str) -> str:
        name = path_part(value)
        recorded = paths.get(name)
        if recorded is None or (Path(name).exists() and not absolute):
            return value
        if Path(recorded).exists():
            return value.replace(name, recorded, 1)
        if key not in needed:
            return value
        folder = Path(recorded).parent
        is_recorded = Path(os.path.abspath(name)) == Path(recorded)
        problem = f"not found in {folder}" if is_recorded else f"found neither in {os.getcwd()} nor in {folder}"
        advice = "start the command in its folder" if key == "model" else f"set {key}=PATH"
        raise CommandError(
            f"{key}={value}: {Path(name).name} was {problem}, where the run had it. Restore it, or {advice}."
            f"{upload_hint(name)}"
        )

    changes: dict[str, object] = {}
    if settings.frozen_models:
        changes["roles"] = [
            role if role.frozen_model is None else replace(role, policy=locate("model", role.frozen_model))
            for role in settings.roles or ()
        ]
    for key in PATH_SETTINGS:
        if (value := getattr(settings, key)) is not None:
            changes[key] = [locate(key, name) for name in value] if isinstance(value, list) else locate(key, value)
    changes = {key: value for key, value in changes.items() if value != getattr(settings, key)}
    return settings.model_copy(update=changes) if changes else settings


def absolute_paths(settings: Settings) -> dict[str, str]:
    """Returns the absolute paths of the settings' files and folders, by their names."""
    values = [settings.data, settings.eval_data, settings.start_from]
    values += [name for name in settings.all_models.values() if not is_bundled(name)]
    names = [path_part(value) for value in values if value is not None]
    # Not `Path.exists`, which raises OSError for a name longer than a path may be, such as a long mixture of data sets.
    return {name: os.path.abspath(name) for name in names if os.path.exists(name)}


def path_part(value: str) -> str:
    """Returns the path part of a setting that names data, a model or a run."""
    return value.partition("?")[0].removeprefix(HUB)
