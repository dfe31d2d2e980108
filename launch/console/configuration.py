"""Turns a preset, files and `key=value` words into settings: defaults < preset < files in order < words."""

import re
from collections.abc import Sequence
from pathlib import Path

from launch.console.errors import CommandError
from policies.settings.core_yaml import Value, scalar, spelled
from policies.settings.files import DEFAULT_PRESET, check_key, read_file, read_preset, takes_lists
from policies.settings.settings import Settings, make_settings, put_over, refuse_idle


def split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Returns the preset that words name, if they do, and the `key=value` words.

    Raises:
        CommandError: they name more than one preset.
    """
    presets = [word for word in words if "=" not in word]
    if len(presets) > 1:
        raise CommandError(f"One preset at a time: {' and '.join(presets)} cannot be combined. Settings are key=value.")
    return presets[0] if presets else None, [word for word in words if "=" in word]


def run_name(preset: str | None, paths: Sequence[Path]) -> str:
    """Returns what a new run is named after: its preset, or else its last settings file, or else the default preset."""
    return preset or (re.sub(r"[^\w.-]+", "-", paths[-1].stem) if paths else DEFAULT_PRESET)


def resolve(preset: str, paths: Sequence[Path], words: Sequence[str]) -> Settings:
    """Resolves the settings of a run.

    Args:
        preset: a name of `presets()`.
        paths: YAML files of flat settings; later ones win.
        words: `key=value`; they win over everything.

    Raises:
        CommandError: an unknown preset or key, a file that cannot be read, a word without `=`.
        SettingsError: a value of the wrong type, or settings that contradict each other.
    """
    given = [*map(read_file, paths), read_words(words)]
    values = read_preset(preset)
    for source in given:
        values = put_over(values, source)
    settings = make_settings(values)
    for source in given:
        refuse_idle(source, settings)
    return settings


def read_words(words: Sequence[str]) -> dict[str, Value]:
    """Returns the settings in `key=value` words; each value is read as a YAML scalar, or else as the text it is.

    Raises:
        CommandError: an unknown key, a word without `=` or with nothing behind it.
    """
    values: dict[str, Value] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not key or not equals:
            raise CommandError(f"`{word}` is not a setting; write key=value, such as lr=1e-5.")
        check_key(key, "on the command line")
        if not text:
            raise CommandError(
                f"`{word}` has no value: is a shell variable not set? Write {key}=null if it is to be none."
            )
        values[key] = scalar(text, lists=takes_lists(key))
    return values


def as_yaml(settings: Settings) -> str:
    """Returns every setting as YAML, each with its meaning in a comment, ready for `-c`."""
    lines = []
    for name, field in Settings.model_fields.items():
        line = f"{name}: {spelled(getattr(settings, name))}"
        meaning = " ".join((field.description or "").replace("`", "").split())
        lines.append(f"{line:<33} # {meaning}" if meaning else line)
    return "\n".join(lines) + "\n"
