"""Settings that earlier versions had. Their runs and results stay readable if these had no effect."""

from collections.abc import Mapping
from typing import Any

from policies.settings.settings import Settings, make_settings

REMOVED: dict[str, Any] = {
    "num_siblings": 1,
    "group_baseline": 0.0,
    "critic_inputs": "tokens",
    "wandb": False,
    "trackio": False,
}
"""By name, the value without an effect (docs/project/removed.md)."""


def drop_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns recorded settings without those that were removed and had no effect."""
    return {key: value for key, value in {**values}.items() if key not in REMOVED or value != REMOVED[key]}


def recorded_settings(values: Mapping[str, Any]) -> Settings:
    """Validates settings that a run or result recorded, possibly of an earlier version.

    Raises:
        SettingsError: a removed setting had an effect; or for the first unknown key, invalid value or conflict.
    """
    return make_settings(drop_removed(values))
