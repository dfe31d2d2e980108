"""What a search varies: `--over key=values`, and seeds."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cory_env.pickled import display_name
from launch.console.errors import CommandError
from policies.settings.settings import METADATA, Settings, SettingsError, make_settings, nearest_key, settings_in
from policies.settings.yaml12 import Value, scalar, to_cli, write_yaml

SEED_KEY = "seed"
TIME_KEY = "updates"
"""The setting that ends a trial, and the name under which it reports how far it is."""
OBJECTIVE = "combined_reward"
"""What trials report as their objective."""
LOG_SCALE, UNIFORM_SCALE = "log", "uniform"


class Axis(NamedTuple):
    """One setting that a search varies: over a list of values, or over a range."""

    key: str
    values: tuple[Any, ...]
    """All values of a list; the two ends of a range."""
    scale: str | None = None
    """`log` or `uniform` of a range; None of a list."""

    @property
    def word(self) -> str:
        """The axis as it is written on the command line."""
        if self.scale is not None:
            return f"{self.key}={self.scale}:{self.values[0]}:{self.values[1]}"
        return f"{self.key}={','.join(map(to_axis_text, self.values))}"

    def domain(self, *, grid: bool) -> Any:
        """The axis for Tune: a list is a grid, or something to draw from."""
        from ray import tune

        if self.scale is None:
            return tune.grid_search(list(self.values)) if grid else tune.choice(list(self.values))
        low, high = self.values
        whole = _is_integer(self.key)
        if self.scale == LOG_SCALE:  # Tune leaves the upper end of a range of whole numbers out
            return tune.lograndint(low, high + 1) if whole else tune.loguniform(low, high)
        return tune.randint(low, high + 1) if whole else tune.uniform(low, high)


def read_axes(words: Sequence[str]) -> list[Axis]:
    """Reads `key=1,2,null`, `key=log:1e-6:1e-4` and `key=uniform:0:1`.

    Raises:
        CommandError: a word is none of these, or names a setting that there is not, or that is not to be searched.
    """
    axes: dict[str, Axis] = {}
    for word in words:
        key, _, text = word.partition("=")
        if not text:
            raise CommandError(
                f"--over {word} names no values; write key=1,2,5 or key=log:1e-6:1e-4 or key=uniform:0:1."
            )
        if key not in Settings.model_fields:
            raise CommandError(f"Unknown setting `{key}` in --over.{nearest_key(key, list(Settings.model_fields))}")
        if not METADATA[key].search:
            raise CommandError(f"--over {key}: trials that differ in it do not compare. Set {key}=X for all instead.")
        if key in axes:
            raise CommandError(f"--over names {key} twice. Name all its values at once.")
        axes[key] = _parse_range(word, key, text) if text.startswith((f"{LOG_SCALE}:", f"{UNIFORM_SCALE}:")) else _parse_list(word, key, text)
    return list(axes.values())


def _parse_list(word: str, key: str, text: str) -> Axis:
    values = scalar(f"[{text}]", lists=True)
    if not isinstance(values, list):
        raise CommandError(f"--over {word} is no list of values as in YAML: quote texts with special characters.")
    if len(set(map(repr, values))) < len(values):
        raise CommandError(f"--over {word} names a value twice.")
    return Axis(key, tuple(values))


def _parse_range(word: str, key: str, text: str) -> Axis:
    scale, *ends = text.split(":")
    kind = int if _is_integer(key) else float
    try:
        low, high = map(kind, ends)
    except ValueError as error:
        numbers = "whole numbers" if kind is int else "numbers"
        raise CommandError(f"--over {word} is not a range; write {key}={scale}:LOW:HIGH, both {numbers}.") from error
    if not (-math.inf if scale == UNIFORM_SCALE else 0) < low < high < math.inf:
        above = "above zero and " if scale == LOG_SCALE else ""
        raise CommandError(f"--over {word}: LOW must be {above}below HIGH, and both finite.")
    return Axis(key, (low, high), scale)


def _is_integer(key: str) -> bool:
    return Settings.model_fields[key].annotation in (int, int | None)


def pin_objective(settings: Settings) -> Settings:
    """Fixes the combined reward at its KL weight before a search, which may vary `kl_coef`, but not its own goal."""
    return make_settings({**settings.model_dump(), "eval_kl_coef": settings.report_kl_coef})


def points(settings: Settings, axes: Sequence[Axis]) -> list[Settings]:
    """Returns the settings at all combinations of listed values and ends of ranges.

    Raises:
        CommandError: settings cannot have a value of the search, or not together with the others.
    """
    found = []
    for values in itertools.product(*(axis.values for axis in axes)):
        point = dict(zip((axis.key for axis in axes), values, strict=True))
        try:
            found.append(make_settings({**settings.model_dump(), **point}))
        except SettingsError as error:
            raise CommandError(f"--over {format_point(point)}: {error}") from error
    return found


def unique_kinds(found: Sequence[Settings]) -> list[Settings]:
    """Returns of many settings those that differ in what is asked, who answers, or how: one of each kind."""
    keys = sorted(settings_in("task", "policy", "sampling"))
    return list({repr([getattr(each, key) for key in keys]): each for each in found}.values())


def format_point(point: Mapping[str, Value]) -> str:
    """Returns the values of a point as `key=value key=value`."""
    return " ".join(f"{key}={show_value(value)}" for key, value in point.items())


def show_value(value: Value) -> str:
    """Returns a value as it is written on the command line, numbers with four digits at most, a reward without code."""
    return f"{value:.4g}" if isinstance(value, float) else display_name(to_cli(value))


def to_axis_text(value: Value) -> str:
    """Returns a value as it is written in the list of an axis, with all its digits."""
    return to_cli(value) if isinstance(value, int | float | None) else write_yaml([value], flow=True).strip()[1:-1]
