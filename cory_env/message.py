"""Texts and messages: finds lone surrogates, which neither UTF-8 nor a tokenizer accepts, and texts that show nothing.

A lone surrogate is half of the pair that stands for an emoji in UTF-16. JSON can spell it, so clients that cut a text
between the two halves send it. Python also puts one in place of a byte that is not UTF-8.
"""

import re
import unicodedata
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

SURROGATE_PROBLEM = "contains half of a surrogate pair, such as an emoji cut in two"
"""The predicate of a sentence about a text."""

MESSAGES_RULE = (
    "If a query is a conversation, its completion is a list of one message, as in TRL: "
    '[{"role": "assistant", "content": ...}]. Read the text as completion[0]["content"].'
)
"""How rewards and feedback functions read the completions of conversations."""

_SURROGATE = re.compile("[\ud800-\udfff]")


class Message(TypedDict):
    """One message of a conversation, in the form that chat templates take.

    Attributes:
        tool_calls: Of an assistant's message: `{"type": "function", "function": {"name": ..., "arguments": {...}}}`.
        name, tool_call_id: Of a message of the role `tool`: whose result it is.
    """

    role: str
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]
    name: NotRequired[str]
    tool_call_id: NotRequired[str]


class TextError(ValueError):
    """A text cannot be written in UTF-8."""


def has_surrogate(value: object) -> bool:
    """Whether a text, or any text nested in lists and mappings (keys too), contains a lone surrogate."""
    values, visited = [value], set[int]()  # aliases in YAML can nest one list in itself exponentially often
    while values:
        match values.pop():
            case str(text):
                if not text.isascii() and _SURROGATE.search(text):
                    return True
            case Mapping() | list() | tuple() as container if id(container) not in visited:
                visited.add(id(container))
                values += [*container.keys(), *container.values()] if isinstance(container, Mapping) else container
    return False


def escape_surrogates(text: str) -> str:
    """Returns a text with each lone surrogate as an escape sequence, for messages that quote what is wrong."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: it has only spaces, control and format characters, such as zero-width spaces."""
    return all(character.isspace() or unicodedata.category(character) in ("Cc", "Cf") for character in text)
