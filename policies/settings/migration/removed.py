"""Settings that earlier versions had. Their runs and results stay readable if another setting says the same today."""

from collections.abc import Mapping, Sequence
from typing import Any

from policies.settings.migration.names import ARITHMETIC_OPTIONS, REMOVED, WITHOUT_EFFECT
from policies.settings.settings import Settings, make_settings


def drop_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns recorded settings without those that were removed, except for the ones that had an effect."""
    values = {key: value for key, value in {**values}.items() if key not in WITHOUT_EFFECT}
    if values.pop("kl_control", None) == "fixed":  # kl_target was 6 even then
        values = {key: value for key, value in values.items() if key not in ("kl_target", "kl_horizon")}
    options = {key: values.pop(key) for key in ARITHMETIC_OPTIONS if key in values}
    if text := "&".join(f"{key}={value}" for key, value in options.items() if value is not None):
        values["task"] = f"{values['task']}?{text}"
    if values.get("importance_sampling_mode") == "none":
        values |= {"importance_sampling_mode": "token_truncate", "importance_sampling_clip_max": None}
    if isinstance(thinking := values.get("thinking"), Mapping):
        readers = ("in_prompts", "in_feedback", "in_reward")
        values["thinking"] = {key: value for key, value in thinking.items() if value or key not in readers}
    if values.get("model_revision") is not None and "model" in values:
        values |= {"model": _with_revisions(values["model"], values["model_revision"]), "model_revision": None}
    if values.get("loss") == "cispo":  # its bounds were absolute weights, not distances from 1
        largest, smallest = values.pop("cispo_clip_max", 5.0), values.pop("cispo_clip_min", None)
        values |= {"clip_ratio": 1.0 - (smallest or 0.0), "clip_ratio_high": largest - 1.0}
    else:
        values = {key: value for key, value in values.items() if key not in ("cispo_clip_max", "cispo_clip_min")}
    return {key: value for key, value in values.items() if key not in REMOVED or value != REMOVED[key]}


def _with_revisions(model: str | Sequence[str], revision: str | Sequence[str | None]) -> str | list[str]:
    """Returns the models as `ID@REVISION`. One revision held for all models, and one model for all revisions."""
    if isinstance(model, str) and isinstance(revision, str):
        return f"{model}@{revision}"
    models = [model] if isinstance(model, str) else list(model)
    revisions = [revision] if isinstance(revision, str) else list(revision)
    count = max(len(models), len(revisions))
    models = models * count if len(models) == 1 else models
    revisions = revisions * count if len(revisions) == 1 else revisions
    names = [name if number is None else f"{name}@{number}" for name, number in zip(models, revisions, strict=True)]
    return names[0] if len(set(names)) == 1 else names


def recorded_settings(values: Mapping[str, Any]) -> Settings:
    """Validates settings that a run or result recorded, possibly of an earlier version."""
    return make_settings(drop_removed(values))
