"""The search space: `--over key=values`."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
from policies.settings.yaml12 import Value, parse_scalar, to_cli, write_yaml

SEED_KEY = "seed"
TIME_KEY = "updates"
"""Key of the number of completed updates in a trial's results."""
OBJECTIVE = "combined_reward"
"""Key of the objective in a trial's results."""
LOG_SCALE, UNIFORM_SCALE = "log", "uniform"


class Axis(NamedTuple):
    """One dimension of a search: a setting with a list of values, or with a range."""

    key: str
    values: tuple[Any, ...]
    """The values of a list, or the two ends of a range."""
    scale: str | None = None
    """`log` or `uniform` for a range; None for a list."""

    @property
    def option(self) -> str:
        """The axis as a value of `--over`."""
        if self.scale is not None:
            return f"{self.key}={self.scale}:{self.values[0]}:{self.values[1]}"
        return f"{self.key}={','.join(map(to_axis_text, self.values))}"

    def domain(self) -> Any:
        """Returns the axis as a Tune search space."""
        from ray import tune

        if self.scale is None:
            return tune.grid_search(list(self.values))
        low, high = self.values
        is_integer = _is_integer(self.key)
        if self.scale == LOG_SCALE:  # Tune excludes the upper end of an integer range
            return tune.lograndint(low, high + 1) if is_integer else tune.loguniform(low, high)
        return tune.randint(low, high + 1) if is_integer else tune.uniform(low, high)


def read_axes(options: Sequence[str]) -> list[Axis]:
    """Parses values of `--over`: `key=1,2,null`, `key=log:1e-6:1e-4` or `key=uniform:0:1`."""
    axes: dict[str, Axis] = {}
    for option in options:
        key, _, text = option.partition("=")
        if not text:
            raise CommandError(
                f"--over {option} has no values. Write key=1,2,5 or key=log:1e-6:1e-4 or key=uniform:0:1."
            )
        reject_unknown_settings([key], " in --over")
        if not METADATA[key].search:
            raise CommandError(f"--over {key}: trials that differ in it are not comparable. Set {key}=X for all.")
        if key in axes:
            raise CommandError(f"--over {key} is given twice. Put all values into one --over.")
        is_range = text.startswith((f"{LOG_SCALE}:", f"{UNIFORM_SCALE}:"))
        axes[key] = _parse_range(option, key, text) if is_range else _parse_list(option, key, text)
    return list(axes.values())


def _parse_list(option: str, key: str, text: str) -> Axis:
    values = parse_scalar(f"[{text}]", lists=True)
    if not isinstance(values, list):
        raise CommandError(f"--over {option} is not a valid YAML list. Quote texts with special characters.")
    if len(set(map(repr, values))) < len(values):
        raise CommandError(f"--over {option} contains a value twice.")
    return Axis(key, tuple(values))


def _parse_range(option: str, key: str, text: str) -> Axis:
    scale, *bounds = text.split(":")
    number_type = int if _is_integer(key) else float
    try:
        low, high = map(number_type, bounds)
    except ValueError as error:
        numbers = "integers" if number_type is int else "numbers"
        raise CommandError(f"--over {option} is not a range. Write {key}={scale}:LOW:HIGH, both {numbers}.") from error
    if not (-math.inf if scale == UNIFORM_SCALE else 0) < low < high < math.inf:
        above = "above zero and " if scale == LOG_SCALE else ""
        raise CommandError(f"--over {option}: LOW must be {above}below HIGH, and both finite.")
    return Axis(key, (low, high), scale)


def _is_integer(key: str) -> bool:
    return Settings.model_fields[key].annotation in (int, int | None)


def pin_objective(settings: Settings) -> Settings:
    """Sets `eval_kl_coef` to its current value, so that searching over `kl_coef` does not change the objective."""
    return make_settings({**settings.model_dump(), "eval_kl_coef": settings.report_kl_coef})


def grid_points(settings: Settings, axes: Sequence[Axis]) -> list[Settings]:
    """Returns the settings at all combinations of list values and range ends."""
    settings_list = []
    for values in itertools.product(*(axis.values for axis in axes)):
        point = dict(zip((axis.key for axis in axes), values, strict=True))
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


def to_axis_text(value: Value) -> str:
    """Formats a value as in the list of an axis, with all digits."""
    return to_cli(value) if isinstance(value, int | float | None) else write_yaml([value], flow=True).strip()[1:-1]
