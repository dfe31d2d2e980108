"""Looks up a setting's name in another library."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

TABLES = ("trl", "verl", "openrlhf")
"""Markdown files of this folder, which the pages for users of these libraries contain."""
NONE = "–"
"""Entry of a setting that has no equivalent here."""
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


class ForeignName(NamedTuple):
    """A setting of another library."""

    library: str
    name: str
    here: str
    """One or several settings or options in backticks, or `NONE`."""
    note: str
    """May be empty."""

    @property
    def sentence(self) -> str:
        """Which setting it is here."""
        if self.here == NONE:
            return f"{self.library}'s `{self.name}` has no equivalent here: {self.note}."
        verb = "are" if "`, `" in self.here or "·" in self.here else "is"
        note = LINK.sub(r"\1", self.note)
        return f"{self.library}'s `{self.name}` {verb} {self.here} here{f' ({note})' if note else ''}."


@lru_cache(maxsize=1)
def foreign_names() -> dict[str, ForeignName]:
    """Returns the settings of other libraries by name; a name that several have is the first one's."""
    rows: dict[str, ForeignName] = {}
    for table in TABLES:
        header, _, *lines = Path(__file__).with_name(f"{table}.md").read_text(encoding="utf-8").splitlines()
        library = header.split("|")[1].strip()
        for line in lines:
            name, here, note = (cell.strip() for cell in line.strip().strip("|").split("|"))
            rows.setdefault(name.strip("`"), ForeignName(library, name.strip("`"), here, note))
    return rows


def explain_foreign_name(key: str) -> str:
    """Returns a sentence with the setting that `key` is in another library, or an empty string if it is none.

    Args:
        key: as a user wrote it: also with a typing error, hyphens, or Hydra's `+` in front.
    """
    name, names = key.strip("+-~").replace("-", "_"), foreign_names()
    if name in names:
        return names[name].sentence
    if any(other.startswith(f"{name}.") for other in names):
        return f"`{name}` is a group of settings of verl; settings here have no groups (docs/from-verl.md)."
    foreign = [other for other, row in names.items() if row.here != f"`{other}`"]  # not our own names
    close = difflib.get_close_matches(name, foreign, n=1, cutoff=0.85)
    return names[close[0]].sentence if close else ""
