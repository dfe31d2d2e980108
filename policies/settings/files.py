"""Settings in YAML files: bundled presets and the user's files."""

import copy
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import get_args, get_origin

from cory_env.home import upload_hint
from policies.settings.error import SettingsError
from policies.settings.migration.removed import drop_removed
from policies.settings.settings import Settings, nearest_key, reject_unknown_settings
from policies.settings.yaml12 import Scalar, Value, read_yaml

BASE_KEY = "base"
"""Key in a preset that names the preset it is based on."""

_FOLDER = files("policies.settings") / "presets"


def presets() -> dict[str, str]:
    """Returns preset name → description, which is the first line of its file."""
    return {**_descriptions()}


@cache
def _descriptions() -> dict[str, str]:
    descriptions = {}
    for file in _FOLDER.iterdir():
        if file.name.endswith(".yaml"):
            first_line = file.read_text(encoding="utf-8").splitlines()[0]
            descriptions[file.name.removesuffix(".yaml")] = first_line.removeprefix("# ")
    return dict(sorted(descriptions.items()))


def read_preset(name: str) -> dict[str, Value]:
    """Returns the settings of a preset, including those of the presets it is based on."""
    if name not in presets():
        names = list(presets())
        hint = nearest_key(name, names)
        raise SettingsError(f"Unknown preset `{name}`.{hint} Presets: {', '.join(names)}.")
    return copy.deepcopy(_read_preset(name))


@cache
def _read_preset(name: str) -> dict[str, Value]:
    values = _parse((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), f"preset {name}", extra_keys=(BASE_KEY,))
    base = values.pop(BASE_KEY, None)
    return {**(_read_preset(str(base)) if base else {}), **values}


def read_file(path: Path, recorded: bool = False) -> dict[str, Value]:
    """Returns the settings in a user's YAML file, or those that a run `recorded`, possibly of an earlier version."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        hint = upload_hint(path) if isinstance(error, FileNotFoundError) else ""
        raise SettingsError(f"The settings file {path} cannot be read: {reason}.{hint}") from error
    return _parse(text, str(path), recorded=recorded)


def takes_lists(key: str) -> bool:
    """Whether a setting accepts a list."""
    return any(get_origin(kind) is list for kind in get_args(Settings.model_fields[key].annotation))


def takes_mappings(key: str) -> bool:
    """Whether a setting accepts a mapping."""
    kinds = get_args(Settings.model_fields[key].annotation)
    return any(get_origin(kind) is dict or is_dataclass(kind) for kind in kinds)


def _parse(text: str, source: str, extra_keys: tuple[str, ...] = (), recorded: bool = False) -> dict[str, Value]:
    content = read_yaml(text, source) or {}
    if not isinstance(content, Mapping):
        raise SettingsError(f"{source} must contain `key: value` lines, not a {type(content).__name__}.")
    content = drop_removed(content) if recorded else content
    for key, value in content.items():
        if key not in extra_keys:
            reject_unknown_settings([str(key)], f" in {source}")
        if key == "roles" or (isinstance(value, Mapping) and takes_mappings(str(key))):  # pydantic checks these
            continue
        values = value if isinstance(value, list) and takes_lists(str(key)) else [value]
        if not all(isinstance(item, Scalar) for item in values):
            raise SettingsError(
                f"`{key}` in {source} is a {'list' if isinstance(value, list) else 'mapping'}, but this setting takes "
                "a single value. Quote a text that starts with a bracket or brace."
            )
    return dict(content)
