"""Finding the files that a run's settings name, also from another working directory."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cory_env.tasks.rows import HUB
from policies.models.model_names import is_bundled
from policies.settings.settings import BY_CONTENT, Settings

PATH_SETTINGS = (*BY_CONTENT, "start_from")


def locate_files(settings: Settings, paths: Mapping[str, str], absolute: bool = False) -> Settings:
    """Replaces file names that do not exist in the working directory with the recorded paths of the run, if they exist.

    Args:
        paths: the run's recorded paths (`launch.run_folder.sources`).
        absolute: replace names that exist in the working directory too.
    """

    def locate(value: str) -> str:
        name = path_part(value)
        recorded = paths.get(name, "")
        is_present = Path(name).exists() and not absolute
        return value.replace(name, recorded, 1) if recorded and Path(recorded).exists() and not is_present else value

    changes: dict[str, object] = {}
    if settings.frozen_models:
        changes["roles"] = [
            role if role.frozen_model is None else replace(role, policy=locate(role.frozen_model))
            for role in settings.roles or ()
        ]
    for key in PATH_SETTINGS:
        if (value := getattr(settings, key)) is not None:
            changes[key] = [locate(name) for name in value] if isinstance(value, list) else locate(value)
    changes = {key: value for key, value in changes.items() if value != getattr(settings, key)}
    return settings.model_copy(update=changes) if changes else settings


def absolute_paths(settings: Settings) -> dict[str, str]:
    """Returns the absolute paths of the settings' files and folders, by their names."""
    values = [settings.data, settings.eval_data, settings.start_from]
    values += [name for name in settings.all_models.values() if not is_bundled(name)]
    names = [path_part(value) for value in values if value is not None]
    return {name: os.path.abspath(name) for name in names if Path(name).exists()}


def path_part(value: str) -> str:
    """Returns the path part of a setting that names data, a model or a run."""
    return value.partition("?")[0].removeprefix(HUB)
