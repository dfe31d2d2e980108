"""Combines settings from a preset, files and `key=value` arguments: defaults < preset < files in order < arguments."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cory_env.home import expand_home, upload_hint
from launch.console.errors import CommandError
from policies.settings.files import presets, read_file, read_preset, takes_lists, takes_mappings
from policies.settings.overrides import apply_overrides
from policies.settings.settings import Settings, make_settings, reject_unknown_settings
from policies.settings.yaml12 import Value, parse_scalar, to_yaml


class SettingsArguments(NamedTuple):
    """The preset, files and `key=value` arguments of a command."""

    preset: str | None
    files: list[Path]
    pairs: list[str]

    @property
    def name(self) -> str:
        """The name for a new run: its preset, else its last file, else `run`."""
        return self.preset or (self.files[-1].stem if self.files else "run")

    def check_task(self) -> None:
        """Checks that the arguments say what to train on."""
        if self.preset is None and not self.files and not {"task", "data", "env"} & parse_overrides(self.pairs).keys():
            raise CommandError(
                "Name a preset or a file of settings, such as imdb-tiny or mine.yaml, or set task or env. The presets "
                f"are {', '.join(presets())}."
            )

    def settings(self) -> Settings:
        """Resolves the settings (see `resolve_settings`)."""
        return resolve_settings(self.preset, self.files, self.pairs)


def split_arguments(words: Sequence[str], files: Sequence[Path] = ()) -> SettingsArguments:
    """Splits a command's arguments into a preset or a file of settings, and `key=value` pairs.

    Args:
        words: the arguments; at most one has no `=`.
        files: the files of `-c`, which take precedence over a file in `words`.
    """
    sources = [expand_home(word) for word in words if "=" not in word]
    pairs = [word for word in words if "=" in word]
    if len(sources) > 1:
        raise CommandError(f"One preset or file: {' and '.join(sources)} cannot be combined. Add files with -c FILE.")
    if sources and is_file(sources[0]):
        return SettingsArguments(None, [Path(sources[0]), *files], pairs)
    return SettingsArguments(sources[0] if sources else None, [*files], pairs)


def is_file(word: str) -> bool:
    """Whether an argument is the path of a file of settings rather than a preset."""
    if word in presets():
        return False
    path = Path(word)
    if path.is_file():
        return True
    if path.suffix in (".yaml", ".yml") or "/" in word:
        problem = "is a folder, not a file of settings" if path.is_dir() else "does not exist"
        hint = "" if path.is_dir() else upload_hint(word)
        raise CommandError(f"{word} {problem}. Use a YAML file, or a preset: {', '.join(presets())}.{hint}")
    return False


def resolve_settings(preset: str | None, paths: Sequence[Path], words: Sequence[str]) -> Settings:
    """Resolves the settings of a run.

    Args:
        preset: a name of `presets()`; None: the defaults.
        paths: YAML files of flat settings; later files take precedence.
        words: `key=value` arguments; they take precedence over everything.
    """
    values = {} if preset is None else read_preset(preset)
    for source in (*map(read_file, paths), parse_overrides(words)):
        values = apply_overrides(values, source)
    return make_settings(values)


def parse_overrides(words: Sequence[str]) -> dict[str, Value]:
    """Parses `key=value` arguments. Values are YAML scalars, or else plain text."""
    values: dict[str, Value] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not key or not equals:
            raise CommandError(f"`{word}` is not a setting. Write key=value, such as lr=1e-5.")
        reject_unknown_settings([key], " on the command line")
        if not text:
            raise CommandError(f"`{word}` has no value. Is a shell variable unset? Write {key}=null to set it to None.")
        values[key] = parse_scalar(text, lists=takes_lists(key), mappings=takes_mappings(key))
    return values


def settings_to_yaml(settings: Settings) -> str:
    """Formats all settings as YAML for `-c`, with their descriptions as comments."""
    lines, values = [], settings.model_dump()
    for name, field in Settings.model_fields.items():
        line = f"{name}: {to_yaml(values[name])}"
        description = " ".join((field.description or "").replace("`", "").split())
        lines.append(f"{line:<33} # {description}" if description else line)
    return "\n".join(lines) + "\n"
