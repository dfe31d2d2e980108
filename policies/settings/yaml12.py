"""YAML of version 1.2: `1e-6` is a number, `011` is eleven, `1:30` and `no` are texts; a duplicate key is an error.

ruamel.yaml reads it. PyYAML, which knows version 1.1 alone, writes: what both read alike.
"""

import json
import math
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from policies.settings.error import SettingsError

Scalar = str | int | float | bool | None
Value = Scalar | list[str] | list[float]
QUOTES = ("'", '"')


class _Constructor(SafeConstructor):
    """Leaves dates as the texts they are."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


class _Dumper(yaml.SafeDumper):
    """Writes a text on one line, whatever it holds, and in quotes if version 1.2 takes it for something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Line breaks and whatever else cannot be seen stand as escapes in quotes."""
        style = '"' if not text.isprintable() else None if scalar(text) == text else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def _load(text: str) -> Any:
    reader = YAML(typ="safe", pure=True)
    reader.Constructor = _Constructor
    return reader.load(text)


def read_yaml(text: str, where: str) -> Any:
    """Reads what a person wrote in YAML.

    Args:
        text: the YAML.
        where: it stands, for messages.

    Raises:
        SettingsError: it is no YAML, says something twice, or nests hundreds of lists.
    """
    try:
        return _load(text)
    except RecursionError as error:
        raise SettingsError(f"{where} nests lists or mappings too deeply to be read.") from error
    except (YAMLError, ValueError, KeyError) as error:  # the latter two of a tag that does not fit its value
        reason = str(error)
        if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
            reason = f"{error.problem} in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
        raise SettingsError(f"{where} is not valid YAML: {' '.join(reason.split())}.") from error


def scalar(text: str, lists: bool = False) -> Value:
    """Returns the YAML scalar that `text` spells: a number, true, false, null, quoted text; or else `text` itself.

    Args:
        text: as it stands in a word.
        lists: it may be a list in brackets too.
    """
    try:
        value = _load(text)
    except (YAMLError, ValueError, KeyError, RecursionError):
        return text
    if isinstance(value, str):
        return value if text.lstrip().startswith(QUOTES) else text
    if isinstance(value, list):
        return value if lists else text
    return value if isinstance(value, bool | int | float | None) else text


def to_yaml(value: Value) -> str:
    """Returns a value as one line of YAML, which `scalar` and `read_yaml` read back."""
    return write_yaml(value, flow=True).removesuffix("\n").removesuffix("\n...")


def to_cli(value: Value) -> str:
    """Returns a value as it stands on a command line, which `scalar` reads back: a text as it is, if that will do."""
    if isinstance(value, list):
        return to_yaml(value)
    if not isinstance(value, str):
        return json.dumps(value)
    plain = scalar(value, lists=True) == value.strip() and value.isprintable() and not value.startswith(QUOTES)
    return value if plain else to_yaml(value)


def write_yaml(value: object, flow: bool = False) -> str:
    """Returns values, lists and mappings as YAML, each text on one line, in the order given; or all on one line."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=flow, width=math.inf, allow_unicode=True, sort_keys=False
    )
    return text
