"""Turns a preset, files and `key=value` words into settings: defaults < preset < files in order < words."""

import difflib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, get_args

from launch.console.core_yaml import Scalar, Value, read_yaml, scalar, spelled
from launch.console.errors import CommandError
from policies.settings.settings import Settings, make_settings, nearest_key, put_over, refuse_idle

DEFAULT_PRESET = "imdb-tiny"
BASE = "base"
"""The key by which a preset names the preset that it builds on."""

_FOLDER = files("launch.console") / "presets"


def presets() -> dict[str, str]:
    """Returns the presets' names, each with the sentence that its file starts with."""
    found = {}
    for file in _FOLDER.iterdir():
        if file.name.endswith(".yaml"):
            found[file.name.removesuffix(".yaml")] = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    return dict(sorted(found.items()))


class Asked(NamedTuple):
    """What a command's words and `-c` files ask for."""

    preset: str | None
    files: list[Path]
    pairs: list[str]
    """`key=value` words."""

    @property
    def name(self) -> str:
        """What a new run is named after."""
        return run_name(self.preset, self.files)

    def settings(self) -> Settings:
        """Resolves them (`resolve`)."""
        return resolve(self.preset or DEFAULT_PRESET, self.files, self.pairs)


def asked(words: Sequence[str], files: Sequence[Path] = (), folder: Path = Path()) -> Asked:
    """Sorts a command's words: a preset, or else a file of settings, and `key=value`.

    Args:
        words: of which at most one has no `=`.
        files: those of `-c`, which win over that one.
        folder: that paths of files are relative to.

    Raises:
        CommandError: they name more than one preset or file, or neither.
    """
    named = [word for word in words if "=" not in word]
    pairs = [word for word in words if "=" in word]
    if len(named) > 1:
        raise CommandError(f"One preset or file: {' and '.join(named)} cannot be combined. Add files with -c FILE.")
    paths = [folder / file for file in files]
    for word in named:
        if is_file(word, folder):
            return Asked(None, [folder / word, *paths], pairs)
    return Asked(named[0] if named else None, paths, pairs)


def is_file(word: str, folder: Path = Path()) -> bool:
    """Tells whether a word, which is no preset, is the path of a file of settings.

    Raises:
        CommandError: by its looks it is, but there is none.
    """
    if word in presets():
        return False
    path = folder / word
    if path.is_file():
        return True
    if path.suffix in (".yaml", ".yml") or "/" in word:
        what = "is a folder, not a file of settings" if path.is_dir() else "does not exist"
        raise CommandError(f"{word} {what}. Name a YAML file, or a preset: {', '.join(presets())}.")
    return False


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


def read_preset(name: str) -> dict[str, Value]:
    """Returns a preset's settings, those of the presets under it included."""
    if name not in presets():
        close = difflib.get_close_matches(name, presets(), n=1, cutoff=0.4)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        raise CommandError(f"There is no preset `{name}`.{hint} The presets are: {', '.join(presets())}.")
    values = _flat((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), f"preset {name}", also=(BASE,))
    base = values.pop(BASE, None)
    return {**(read_preset(str(base)) if base else {}), **values}


def read_file(path: Path) -> dict[str, Value]:
    """Returns the settings in a user's YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CommandError(f"The settings file {path} cannot be read: {reason}.") from error
    return _flat(text, str(path))


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
        _check_key(key, "on the command line")
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


def _flat(text: str, where: str, also: tuple[str, ...] = ()) -> dict[str, Value]:
    loaded = read_yaml(text, where) or {}
    if not isinstance(loaded, Mapping):
        raise CommandError(f"{where} must hold `key: value` lines, but holds a {type(loaded).__name__}.")
    for key, value in loaded.items():
        if key not in also:
            _check_key(str(key), f"in {where}")
        if not isinstance(value, Scalar) and not (isinstance(value, list) and takes_lists(key)):
            raise CommandError(
                f"`{key}` in {where} holds a {'list' if isinstance(value, list) else 'mapping'}, but this setting is "
                "one value. Put a text that begins with a bracket or a brace in quotes."
            )
    return dict(loaded)


def takes_lists(key: str) -> bool:
    """Whether a setting may have several values."""
    return bool({list[str], list[float]} & {*get_args(Settings.model_fields[key].annotation)})


def _check_key(key: str, where: str) -> None:
    known = list(Settings.model_fields)
    if key not in known:
        raise CommandError(f"Unknown setting `{key}` {where}.{nearest_key(key, known)}")
