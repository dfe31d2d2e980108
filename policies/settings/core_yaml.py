"""YAML by the core schema of its version 1.2: `1e-6` is a number, `011` is eleven, `1:30` and `no` are texts.

PyYAML reads version 1.1, where these are a text, nine, ninety and false. What is written here, both read alike.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

import yaml

from policies.settings.error import SettingsError

Scalar = str | int | float | bool | None
Value = Scalar | list[str] | list[float]
QUOTES = ("'", '"')

_TAG = "tag:yaml.org,2002:"
_CORE: dict[str, tuple[str, Callable[[str], Scalar]]] = {
    "null": (r"~|null|Null|NULL|", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (r"[-+]?[0-9]+", int),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
}
"""Per kind of plain scalar, how it is written, and what it means; all others are text. The schema's octal and
hexadecimal numbers are left out: no setting is one, so `0x10` is rather a slip than 16.
"""
_KEPT = (*(f"{_TAG}{kind}" for kind in ("str", "seq", "map")), None)


class _Loader(yaml.SafeLoader):
    """Refuses what would be read otherwise than meant: a key that stands twice, a tag that the value does not bear."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012, where PyYAML keeps them
    yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in _KEPT}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Checks that no key stands twice, of which YAML would keep the last one without a word."""
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()  # a text with the tag `!!map` has none
        known: set[tuple[str, str]] = set()
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in known:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key `{key.value}` stands twice", problem_mark=key.start_mark
                )
            known.add((key.tag, key.value))
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Takes aliases of single values only: a few lists of lists of aliases would fill any memory."""
        alias = self.peek_event() if self.check_event(yaml.AliasEvent) else None
        node = super().compose_node(parent, index)
        if alias is not None and not isinstance(node, yaml.ScalarNode):
            raise yaml.composer.ComposerError(
                problem=f"`*{alias.anchor}` stands for a list or a mapping; write that out",
                problem_mark=alias.start_mark,
            )
        return node

    def construct_core(self, node: yaml.ScalarNode) -> Scalar:
        """Makes a value of a scalar; what its tag calls a number, `!!int many`, may be none."""
        kind = node.tag.removeprefix(_TAG)
        pattern, convert = _CORE[kind]
        text = self.construct_scalar(node)
        problem = f"`{text}` is not of the type {kind}"
        try:
            if re.fullmatch(pattern, text):
                return convert(text)
        except ValueError:
            problem = f"a number of {len(text)} digits is too long to be read"
        raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


class _Dumper(yaml.SafeDumper):
    """Writes a text on one line, whatever it holds."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Line breaks and whatever else cannot be seen stand as escapes in quotes."""
        return self.represent_scalar(f"{_TAG}str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_text)
for _kind, (_pattern, _) in _CORE.items():
    _Loader.add_constructor(f"{_TAG}{_kind}", _Loader.construct_core)
    for _either in (_Loader, _Dumper):
        _either.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"(?:{_pattern})\Z"), None)


def read_yaml(text: str, where: str) -> Any:
    """Reads what a person wrote in YAML.

    Args:
        text: the YAML.
        where: it stands, for messages.

    Raises:
        SettingsError: it is no YAML, says something twice, or nests hundreds of lists.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise SettingsError(f"{where} nests lists or mappings too deeply to be read.") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SettingsError(
            f"{where} is not valid YAML: line {line} holds the character {chr(error.character)!r}. Remove it, or write "
            "it as an escape in double quotes."
        ) from error
    except yaml.YAMLError as error:
        reason = str(error).replace('"<unicode string>", ', "")
        raise SettingsError(f"{where} is not valid YAML: {' '.join(reason.split())}.") from error


def scalar(text: str, lists: bool = False) -> Value:
    """Returns the YAML scalar that `text` spells: a number, true, false, null, quoted text; or else `text` itself.

    Args:
        text: as it stands in a word.
        lists: it may be a list in brackets too.
    """
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError):
        return text
    if isinstance(value, str):
        return value if text.lstrip().startswith(QUOTES) else text
    if isinstance(value, list):
        return value if lists else text
    return value if isinstance(value, bool | int | float | None) else text


def spelled(value: Value) -> str:
    """Returns a value as one line of YAML, which `scalar` and `read_yaml` read back."""
    return write_yaml(value, flow=True).removesuffix("\n").removesuffix("\n...")


def as_word(value: Value) -> str:
    """Returns a value as it stands on a command line, which `scalar` reads back: a text as it is, if that will do."""
    if isinstance(value, list):
        return spelled(value)
    if not isinstance(value, str):
        return json.dumps(value)
    plain = scalar(value, lists=True) == value.strip() and value.isprintable() and not value.startswith(QUOTES)
    return value if plain else spelled(value)


def write_yaml(value: object, flow: bool = False) -> str:
    """Returns values, lists and mappings as YAML, each text on one line, in the order given; or all on one line."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=flow, width=math.inf, allow_unicode=True, sort_keys=False
    )
    return text
