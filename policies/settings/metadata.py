"""Metadata of settings: category, and when they may change.

Commands, reports and searches read it here, so a new setting is one line in `fields`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, cast

from pydantic import BaseModel, Field

Category = Literal["task", "policy", "sampling", "learning", "computing", "monitoring", "output"]
"""What a setting determines.

`task`: queries and rewards. `policy`: the parts of a policy. `sampling`: the distribution of responses. `learning`: how
policies learn from them. `computing`: placement and speed, which affect rounding at most. `monitoring`: evaluation,
health checks and stopping. `output`: output files.
"""


class SettingMetadata(NamedTuple):
    """Metadata of a setting."""

    category: Category
    resume: bool
    """It may change when a run resumes."""
    search: bool
    """A search may vary it."""
    clone: bool
    """It may change in a clone of population-based training, as no state in a checkpoint depends on it."""
    content: bool = False
    """It names files, so a resumed run may name other files with the same content (`launch.run_folder.sources`)."""


def _setting(
    category: Category,
    default: object,
    *,
    resume: bool | None = None,
    search: bool = True,
    clone: bool = False,
    content: bool = False,
    **limits: Any,
) -> Any:
    """Returns pydantic's `Field` for a setting of a category."""
    may_resume = category in ("computing", "output") if resume is None else resume
    metadata = SettingMetadata(category, may_resume, search and (category != "output"), clone, content)
    if isinstance(default, bool):
        limits["strict"] = False  # `yes` and `no` are texts in YAML 1.2
    return Field(default, json_schema_extra=metadata._asdict(), **limits)


task_setting = partial(_setting, "task")
policy_setting = partial(_setting, "policy")
sampling_setting = partial(_setting, "sampling")
learning_setting = partial(_setting, "learning")
computing_setting = partial(_setting, "computing")
monitoring_setting = partial(_setting, "monitoring")
output_setting = partial(_setting, "output")


def settings_metadata(fields: type[BaseModel]) -> dict[str, SettingMetadata]:
    """Returns setting name → metadata, in the order of the fields."""
    return {
        name: SettingMetadata(**cast(dict[str, Any], field.json_schema_extra))
        for name, field in fields.model_fields.items()
    }
