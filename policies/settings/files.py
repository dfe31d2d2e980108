"""Settings in YAML files: the presets that come along, and a user's own."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import get_args

from policies.settings.error import SettingsError
from policies.settings.settings import Settings, nearest_key, reject_unknown_settings
from policies.settings.yaml12 import Scalar, Value, read_yaml

DEFAULT_PRESET = "imdb-tiny"
BASE = "base"
"""The key by which a preset names the preset that it builds on."""

_FOLDER = files("policies.settings") / "presets"


def presets() -> dict[str, str]:
    """Returns the presets' names, each with the sentence that its file starts with."""
    found = {}
    for file in _FOLDER.iterdir():
        if file.name.endswith(".yaml"):
            found[file.name.removesuffix(".yaml")] = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    return dict(sorted(found.items()))


def read_preset(name: str) -> dict[str, Value]:
    """Returns a preset's settings, those of the presets under it included.

    Raises:
        SettingsError: there is none of that name; names those that there are.
    """
    if name not in presets():
        known = list(presets())
        hint = nearest_key(name, known)
        raise SettingsError(f"There is no preset `{name}`.{hint} The presets are: {', '.join(known)}.")
    values = _flat((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), f"preset {name}", also=(BASE,))
    base = values.pop(BASE, None)
    return {**(read_preset(str(base)) if base else {}), **values}


def read_file(path: Path) -> dict[str, Value]:
    """Returns the settings in a user's YAML file.

    Raises:
        SettingsError: it cannot be read, or holds something that is no setting.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SettingsError(f"The settings file {path} cannot be read: {reason}.") from error
    return _flat(text, str(path))


def takes_lists(key: str) -> bool:
    """Whether a setting may have several values."""
    return bool({list[str], list[float]} & {*get_args(Settings.model_fields[key].annotation)})


def _flat(text: str, where: str, also: tuple[str, ...] = ()) -> dict[str, Value]:
    loaded = read_yaml(text, where) or {}
    if not isinstance(loaded, Mapping):
        raise SettingsError(f"{where} must hold `key: value` lines, but holds a {type(loaded).__name__}.")
    for key, value in loaded.items():
        if key not in also:
            reject_unknown_settings([str(key)], f" in {where}")
        values = value if isinstance(value, list) and takes_lists(str(key)) else [value]
        if not all(isinstance(item, Scalar) for item in values):
            raise SettingsError(
                f"`{key}` in {where} holds a {'list' if isinstance(value, list) else 'mapping'}, but this setting is "
                "one value. Put a text that begins with a bracket or a brace in quotes."
            )
    return dict(loaded)
