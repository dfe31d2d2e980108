"""Turns a preset, files and `key=value` words into settings: defaults < preset < files in order < words."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cory_env.home import expand_home
from launch.console.errors import CommandError
from policies.settings.files import DEFAULT_PRESET, presets, read_file, read_preset, takes_lists
from policies.settings.overrides import apply_overrides
from policies.settings.settings import Settings, make_settings, reject_unknown_settings
from policies.settings.yaml12 import Value, scalar, to_yaml


class SettingsWords(NamedTuple):
    """What a command's words and `-c` files ask for."""

    preset: str | None
    files: list[Path]
    pairs: list[str]
    """`key=value` words."""

    @property
    def name(self) -> str:
        """What a new run is named after: its preset, or else its last file, or else the default preset."""
        return self.preset or (self.files[-1].stem if self.files else DEFAULT_PRESET)

    def settings(self) -> Settings:
        """Resolves them (`resolve`)."""
        return resolve(self.preset or DEFAULT_PRESET, self.files, self.pairs)


def split_words(words: Sequence[str], files: Sequence[Path] = ()) -> SettingsWords:
    """Sorts a command's words: a preset, or else a file of settings, and `key=value`.

    Args:
        words: of which at most one has no `=`.
        files: those of `-c`, which win over that one.

    Raises:
        CommandError: they name more than one preset or file, or neither.
    """
    named = [expand_home(word) for word in words if "=" not in word]
    pairs = [word for word in words if "=" in word]
    if len(named) > 1:
        raise CommandError(f"One preset or file: {' and '.join(named)} cannot be combined. Add files with -c FILE.")
    if named and is_file(named[0]):
        return SettingsWords(None, [Path(named[0]), *files], pairs)
    return SettingsWords(named[0] if named else None, [*files], pairs)


def is_file(word: str) -> bool:
    """Tells whether a word, which is no preset, is the path of a file of settings.

    Raises:
        CommandError: by its looks it is, but there is none.
    """
    if word in presets():
        return False
    path = Path(word)
    if path.is_file():
        return True
    if path.suffix in (".yaml", ".yml") or "/" in word:
        what = "is a folder, not a file of settings" if path.is_dir() else "does not exist"
        raise CommandError(f"{word} {what}. Name a YAML file, or a preset: {', '.join(presets())}.")
    return False


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
    values = read_preset(preset)
    for source in (*map(read_file, paths), read_words(words)):
        values = apply_overrides(values, source)
    return make_settings(values)


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
        reject_unknown_settings([key], " on the command line")
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
        line = f"{name}: {to_yaml(getattr(settings, name))}"
        meaning = " ".join((field.description or "").replace("`", "").split())
        lines.append(f"{line:<33} # {meaning}" if meaning else line)
    return "\n".join(lines) + "\n"
