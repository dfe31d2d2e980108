"""YAML 1.2 with decimal numbers: `1e-6` is a number, `011` is eleven; `1:30`, `no`, `0x10` and `1_000` are texts.

A number in another notation is more often a typing error than meant, so it is a text, which no setting that is a number
accepts. A duplicate key is an error.

ruamel.yaml reads it. PyYAML, which implements only 1.1, writes it in a form that both versions read equally.
"""

import json
import math
import re
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import ScalarNode

from cory_env.message import SURROGATE_PROBLEM, has_surrogate
from policies.settings.error import SettingsError

Scalar = str | int | float | bool | None
Value = Scalar | list[str] | list[float] | list[dict[str, Scalar]] | dict[str, Any]
QUOTES = ("'", '"')
OTHER_NOTATION = re.compile(r"[-+]?0[xob]\w*|[-+\d.e]*_[-+\d.e_]*", re.ASCII | re.IGNORECASE)
"""Numbers that are not decimal: in hexadecimal, octal or binary digits, or with underscores."""


class _Constructor(SafeConstructor):
    """Reads dates as texts, and numbers only if they are decimal."""


def _read_int(constructor: SafeConstructor, node: ScalarNode) -> int | str:
    return str(node.value) if _is_other_notation(node) else constructor.construct_yaml_int(node)


def _read_float(constructor: SafeConstructor, node: ScalarNode) -> float | str:
    return str(node.value) if _is_other_notation(node) else constructor.construct_yaml_float(node)


def _is_other_notation(node: ScalarNode) -> bool:
    return isinstance(node.value, str) and OTHER_NOTATION.fullmatch(node.value) is not None


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)
_Constructor.add_constructor("tag:yaml.org,2002:int", _read_int)
_Constructor.add_constructor("tag:yaml.org,2002:float", _read_float)


class _Dumper(yaml.SafeDumper):
    """Writes every text on one line, and quotes it if YAML 1.2 would read it as another type."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Writes unprintable characters, such as line breaks, as escapes in double quotes."""
        style = '"' if not text.isprintable() else None if parse_scalar(text) == text else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def _load(text: str) -> Any:
    reader = YAML(typ="safe", pure=True)
    reader.Constructor = _Constructor
    return reader.load(text)


def read_yaml(text: str, source: str) -> Any:
    """Parses YAML written by a user."""
    try:
        content = _load(text)
    except RecursionError as error:
        raise SettingsError(f"{source} nests lists or mappings too deeply.") from error
    except (YAMLError, ValueError, KeyError) as error:  # ValueError, KeyError: a tag that does not fit its value
        reason = str(error)
        if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
            reason = f"{error.problem} in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
        raise SettingsError(f"{source} is not valid YAML: {' '.join(reason.split())}.") from error
    if has_surrogate(content):  # an escape in double quotes can spell one
        raise SettingsError(f"{source} {SURROGATE_PROBLEM}. Remove or replace the character.")
    return content


def parse_scalar(text: str, lists: bool = False, mappings: bool = False) -> Value:
    """Parses a YAML scalar: a number, true, false, null or quoted text; returns anything else as text."""
    try:
        value = _load(text)
    except (YAMLError, ValueError, KeyError, RecursionError):
        return text
    if isinstance(value, str):
        return value if text.lstrip().startswith(QUOTES) else text
    if isinstance(value, list):
        return value if lists else text
    if isinstance(value, dict):
        return value if mappings else text
    return value if isinstance(value, bool | int | float | None) else text


def to_yaml(value: Value) -> str:
    """Returns a value as one line of YAML; `scalar` and `read_yaml` are the inverse."""
    return write_yaml(value, flow=True).removesuffix("\n").removesuffix("\n...")


def to_cli(value: Value) -> str:
    """Returns a value as a word of a command line, quoted only if necessary; `scalar` is the inverse."""
    if isinstance(value, list | dict):
        return to_yaml(value)
    if not isinstance(value, str):
        return json.dumps(value)
    plain = parse_scalar(value, lists=True) == value.strip() and value.isprintable() and not value.startswith(QUOTES)
    return value if plain else to_yaml(value)


def write_yaml(value: object, flow: bool = False) -> str:
    """Returns values, lists and mappings as YAML, in their order, with each text on one line."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=flow, width=math.inf, allow_unicode=True, sort_keys=False
    )
    return text
