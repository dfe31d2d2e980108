"""The search space: `--over key=values`."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from cory_env.pickled import display_name
from launch.console.errors import CommandError
from policies.settings.settings import (
    METADATA,
    Settings,
    SettingsError,
    make_settings,
    reject_unknown_settings,
    settings_in_categories,
)
from policies.settings.yaml12 import Value, parse_scalar, to_cli

SEED_KEY = "seed"
TIME_KEY, OBJECTIVE = "updates", "combined_reward"
"""Keys of the number of completed updates and of the objective in a trial's results."""
Axes = dict[str, list[Any]]


def read_axes(options: Sequence[str]) -> Axes:
    """Parses values of `--over`, such as `key=1,2,null`."""
    axes: Axes = {}
    for option in options:
        key, _, text = option.partition("=")
        if not text:
            raise CommandError(f"--over {option} has no values. Write key=1,2,5.")
        reject_unknown_settings([key], " in --over")
        if not METADATA[key].search:
            raise CommandError(f"--over {key}: trials that differ in it are not comparable. Set {key}=X for all.")
        if key in axes:
            raise CommandError(f"--over {key} is given twice. Put all values into one --over.")
        values = parse_scalar(f"[{text}]", lists=True)
        if not isinstance(values, list):
            raise CommandError(f"--over {option} is not a valid YAML list. Quote texts with special characters.")
        if len(set(map(repr, values))) < len(values):
            raise CommandError(f"--over {option} contains a value twice.")
        axes[key] = values
    return axes


def pin_objective(settings: Settings) -> Settings:
    """Sets `eval_kl_coef` to its current value, so that searching over `kl_coef` does not change the objective."""
    return make_settings({**settings.model_dump(), "eval_kl_coef": settings.report_kl_coef})


def grid_points(settings: Settings, axes: Axes) -> list[Settings]:
    """Returns the settings at all combinations of values."""
    settings_list = []
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        try:
            settings_list.append(make_settings({**settings.model_dump(), **point}))
        except SettingsError as error:
            raise CommandError(f"--over {format_point(point)}: {error}") from error
    return settings_list


def distinct_settings(settings_list: Sequence[Settings]) -> list[Settings]:
    """Removes settings that are equal in all task, policy and sampling settings; keeps one of each kind."""
    keys = sorted(settings_in_categories("task", "policy", "sampling"))
    return list({repr([getattr(settings, key) for key in keys]): settings for settings in settings_list}.values())


def format_point(point: Mapping[str, Value]) -> str:
    """Formats a point as `key=value key=value`."""
    return " ".join(f"{key}={format_setting_value(value)}" for key, value in point.items())


def format_setting_value(value: Value) -> str:
    """Formats a value as on the command line, with up to four significant digits and without pickled code."""
    return f"{value:.4g}" if isinstance(value, float) else display_name(to_cli(value))
