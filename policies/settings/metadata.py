"""What is known of a setting beside its value: what it decides, and when it may change.

Whatever a command, a report or a search has to know of settings it asks here, so a new setting is one line in `fields`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, cast

from pydantic import BaseModel, Field

Category = Literal["task", "policy", "sampling", "learning", "computing", "watching", "writing"]
"""What is asked and rewarded; what a policy consists of; what a response is drawn from; what is learned from it; where
and how fast that is computed, which changes rounding at most; what is measured, warned of and stopped at; what is
written down.
"""


class SettingMetadata(NamedTuple):
    """What is known of a setting."""

    category: Category
    resume: bool
    """It may change when a run goes on."""
    search: bool
    """A search may vary it."""
    clone: bool
    """It may change in a clone of population-based training: no state in a checkpoint depends on it."""
    content: bool = False
    """It names files, so when a run goes on it may name others that hold the same (`launch.run_folder.sources`)."""


def _setting(
    decides: Category,
    default: object,
    *,
    resume: bool | None = None,
    search: bool = True,
    clone: bool = False,
    content: bool = False,
    **limits: Any,
) -> Any:
    """Returns pydantic's `Field` for a setting that decides this."""
    may_resume = decides in ("computing", "writing") if resume is None else resume
    known = SettingMetadata(decides, may_resume, search and decides != "writing", clone, content)
    return Field(default, json_schema_extra=known._asdict(), **limits)


task_setting = partial(_setting, "task")
policy_setting = partial(_setting, "policy")
sampling_setting = partial(_setting, "sampling")
learning_setting = partial(_setting, "learning")
computing_setting = partial(_setting, "computing")
monitoring_setting = partial(_setting, "watching")
output_setting = partial(_setting, "writing")


def settings_metadata(fields: type[BaseModel]) -> dict[str, SettingMetadata]:
    """Returns what is known of each setting, by its name, in the order of the fields."""
    return {
        name: SettingMetadata(**cast(dict[str, Any], field.json_schema_extra))
        for name, field in fields.model_fields.items()
    }
