"""Looks up a setting's name in another library."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from pathlib import Path

TABLES = ("trl", "verl", "openrlhf")
"""Markdown files of this folder, which the pages for users of these libraries contain."""
NONE = "–"
"""Entry of a setting that has no equivalent here."""
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


@lru_cache(maxsize=1)
def foreign_names() -> dict[str, str]:
    """Returns the settings of other libraries, each with a sentence that names the setting here.

    A name that several libraries have is the first one's.
    """
    sentences: dict[str, str] = {}
    for table in TABLES:
        header, _, *lines = Path(__file__).with_name(f"{table}.md").read_text(encoding="utf-8").splitlines()
        library = header.split("|")[1].strip()
        for line in lines:
            name, here, note = (cell.strip() for cell in LINK.sub(r"\1", line).strip().strip("|").split("|"))
            equivalent = f"is {here} here{f' ({note})' if note else ''}"
            text = f"has no equivalent here: {note}" if here == NONE else equivalent
            sentences.setdefault(name.strip("`"), f"{library}'s {name} {text}.")
    return sentences


def explain_foreign_name(key: str) -> str:
    """Returns a sentence with the setting that `key` is in another library, or an empty string if it is none.

    Args:
        key: as a user wrote it: also with a typing error, hyphens, or Hydra's `+` in front.
    """
    name, names = key.strip("+-~").replace("-", "_"), foreign_names()
    if name in names:
        return names[name]
    if any(other.startswith(f"{name}.") for other in names):
        return f"`{name}` is a group of settings of verl; settings here have no groups (docs/from-verl.md)."
    foreign = [other for other, sentence in names.items() if f"is `{other}` here" not in sentence]  # not our own names
    close = difflib.get_close_matches(name, foreign, n=1, cutoff=0.85)
    return names[close[0]] if close else ""
