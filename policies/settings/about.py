"""What is known of a setting beside its value: what it decides, and when it may change.

Whatever a command, a report or a search has to know of settings it asks here, so a new setting is one line in `fields`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

from pydantic import BaseModel, Field

Decides = Literal["task", "policy", "sampling", "learning", "computing", "watching", "writing"]
"""What is asked and rewarded; what a policy consists of; what a response is drawn from; what is learned from it; where
and how fast that is computed, which changes rounding at most; what is measured, warned of and stopped at; what is
written down.
"""


class About(NamedTuple):
    """What is known of a setting."""

    decides: Decides
    resume: bool
    """It may change when a run goes on."""
    search: bool
    """A search may vary it."""
    clone: bool
    """It may change in a clone of population-based training: no state in a checkpoint depends on it."""
    content: bool = False
    """It names files, so when a run goes on it may name others that hold the same (`launch.run_folder.sources`)."""
    earlier: Any = ...
    """Its value in what was written down before there was such a setting; `...` where that is the default."""


def _deciding(decides: Decides) -> Callable[..., Any]:
    """Returns pydantic's `Field` for settings that decide this."""

    def field(
        default: object,
        *,
        resume: bool | None = None,
        search: bool = decides != "writing",
        clone: bool = False,
        content: bool = False,
        earlier: Any = ...,
        **limits: Any,
    ) -> Any:
        if resume is None:
            resume = decides in ("computing", "writing")
        known = About(decides, resume, search, clone, content, earlier)
        return Field(default, json_schema_extra=known._asdict(), **limits)

    return field


of_task = _deciding("task")
of_policy = _deciding("policy")
of_sampling = _deciding("sampling")
of_learning = _deciding("learning")
of_computing = _deciding("computing")
of_watching = _deciding("watching")
of_writing = _deciding("writing")


def about(fields: type[BaseModel]) -> dict[str, About]:
    """Returns what is known of each setting, by its name, in the order of the fields."""
    return {name: About(**cast(dict[str, Any], field.json_schema_extra)) for name, field in fields.model_fields.items()}
