"""Commands as one writes them in a shell, on one line each."""

import shlex
from collections.abc import Sequence


def one_line(words: Sequence[str]) -> str:
    """Returns words as a command that bash or zsh splits into them again, whatever they hold, without a line break.

    A word with a line break, or anything else that cannot be seen, stands as `$'...'`, with escapes.
    """
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_escaped, word))}'" for word in words)


def _escaped(character: str) -> str:
    code = ord(character)
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(
        character, f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )
