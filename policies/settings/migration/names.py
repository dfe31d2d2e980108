"""Looks up a setting's name in another library, or in an earlier version."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

TABLES = ("trl", "verl", "openrlhf")
"""Markdown files of this folder, which the pages for users of these libraries contain."""
NONE = "–"
"""Entry of a setting that has no equivalent here."""
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
REMOVED: dict[str, Any] = {
    "num_siblings": 1,
    "group_baseline": 0.0,
    "critic_inputs": "tokens",
    "wandb": False,
    "trackio": False,
    "model_revision": None,
    "drop_zero_std_groups": False,
}
"""Settings of earlier versions by name, with the value without an effect (docs/lab/removed.md)."""
WITHOUT_EFFECT = frozenset(
    {
        *("runner_resources", "learner_resources", "prefix_sharing"),
        *("health_patience", "min_eos_ratio", "max_token_kl", "max_observer_deficit", "max_role_gap", "max_repetition"),
        *("stop_on_collapse", "samples_every"),
    }
)
"""Settings that decided where a run computed, when it warned, saved and stopped, but not what it learned."""
ARITHMETIC_OPTIONS = ("digits", "operations")
"""Settings that are options of a task today."""


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
    """Returns a sentence with the setting that `key` is in another library or was, or an empty string if it is none.

    Args:
        key: as a user wrote it: also with a typing error, hyphens, or Hydra's `+` in front.
    """
    name, names = key.strip("+-~").replace("-", "_"), foreign_names()
    if name in ARITHMETIC_OPTIONS:
        return f"It is an option of the task: task=arithmetic?{name}=VALUE."
    if name in REMOVED or name in WITHOUT_EFFECT:
        return "It was removed; docs/lab/removed.md says what to use instead."
    if name in names:
        return names[name]
    if any(other.startswith(f"{name}.") for other in names):
        return f"`{name}` is a group of settings of verl; settings here have no groups (docs/from-verl.md)."
    foreign = [other for other, sentence in names.items() if f"is `{other}` here" not in sentence]  # not our own names
    close = difflib.get_close_matches(name, foreign, n=1, cutoff=0.85)
    return names[close[0]] if close else ""
