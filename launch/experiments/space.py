"""What a search varies: `--over key=values`, and seeds."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

from cory_env.pickled import shown
from launch.console.configuration import takes_lists
from launch.console.errors import CommandError
from policies.settings.contradictions import refuse_contradictions
from policies.settings.core_yaml import QUOTES, Value, as_word, scalar
from policies.settings.fields import Fields
from policies.settings.settings import ABOUT, Settings, SettingsError, deciding, make_settings, nearest_key

SEED = "seed"
TIME = "updates"
"""The setting that ends a trial, and the name under which it reports how far it is."""
METRIC = "combined_reward"
"""What trials report as their objective."""
LOG, UNIFORM = "log", "uniform"
MOST = 100_000
"""Combinations with whole numbers of ranges, which are checked before a search starts, at most."""
NAMED = 12
"""Whole numbers that would work, which a refusal names, at most."""
_PART = re.compile(
    r"""(?:^|,)(\s*"(?:[^"\\]|\\.)*"\s*(?=,|$)|\s*'(?:[^']|'')*'\s*(?=,|$)|\s*\[[^]]*\]\s*(?=,|$)|[^,]*)"""
)
"""A value of a list: what stands between two commas, which may also stand in a value in quotes or brackets."""


class Axis(NamedTuple):
    """One setting that a search varies: over a list of values, or over a range."""

    key: str
    values: tuple[Value, ...]
    """All values of a list; the two ends of a range."""
    scale: str | None = None
    """`log` or `uniform` of a range; None of a list."""

    @property
    def word(self) -> str:
        """The axis as it is written on the command line."""
        if self.scale is not None:
            return f"{self.key}={self.scale}:{self.values[0]}:{self.values[1]}"
        return f"{self.key}={','.join(map(exact_value, self.values))}"

    @property
    def ends(self) -> tuple[float, float]:
        """Of a range."""
        return cast(tuple[float, float], self.values)

    def label(self, value: Value) -> str:
        """Returns a value as plots and tables show it: with four digits where these tell the listed ones apart."""
        short = show_value(value)
        return short if sum(show_value(other) == short for other in self.values) < 2 else exact_value(value)

    @property
    def numbers(self) -> "Sequence[Value]":
        """All whole numbers of a range of them; else the values of the list, or the ends of the range."""
        if self.scale is None or not _is_whole(self.key):
            return self.values
        low, high = map(int, self.ends)
        return range(low, high + 1)

    def domain(self, *, grid: bool) -> Any:
        """The axis for Tune: a list is a grid, or something to draw from."""
        from ray import tune

        if self.scale is None:
            return tune.grid_search(list(self.values)) if grid else tune.choice(list(self.values))
        low, high = self.ends
        whole = _is_whole(self.key)
        if self.scale == LOG:  # Tune leaves the upper end of a range of whole numbers out
            return tune.lograndint(low, high + 1) if whole else tune.loguniform(low, high)
        return tune.randint(low, high + 1) if whole else tune.uniform(low, high)


def read_axes(words: Sequence[str]) -> list[Axis]:
    """Reads `key=1,2,null`, `key=log:1e-6:1e-4` and `key=uniform:0:1`.

    Raises:
        CommandError: a word is none of these, or names a setting that there is not, or that is not to be searched.
    """
    axes: list[Axis] = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not text:
            raise CommandError(
                f"--over {word} names no values; write key=1,2,5 or key=log:1e-6:1e-4 or key=uniform:0:1."
            )
        known = list(Settings.model_fields)
        if key not in known:
            raise CommandError(f"Unknown setting `{key}` in --over.{nearest_key(key, known)}")
        if not ABOUT[key].search:
            raise CommandError(f"--over {key}: trials that differ in it do not compare. Set {key}=X for all instead.")
        if key in (axis.key for axis in axes):
            raise CommandError(f"--over names {key} twice. Name all its values at once.")
        axes.append(_range(word, key, text) or _list(word, key, text))
    return axes


def _list(word: str, key: str, text: str) -> Axis:
    values = tuple(scalar(part.strip(), lists=takes_lists(key)) for part in _PART.findall(text))
    if takes_lists(key) and any(isinstance(value, str) and value.startswith("[") for value in values):
        raise CommandError(f"--over {word}: a list is not closed, or stands in quotes. Write {key}=[a,b],c.")
    if len(set(map(repr, values))) < len(values):
        raise CommandError(f"--over {word} names a value twice.")
    return Axis(key, values)


def _range(word: str, key: str, text: str) -> Axis | None:
    scale, *ends = text.split(":")
    if scale not in (LOG, UNIFORM):
        return None
    values = [scalar(end) for end in ends]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(values) != 2 or len(numbers) != 2 or not all(map(math.isfinite, numbers)):
        raise CommandError(f"--over {word} is not a range; write {key}={scale}:LOW:HIGH, both numbers.")
    low, high = numbers
    if low >= high or (scale == LOG and low <= 0):
        above = "above zero and " if scale == LOG else ""
        raise CommandError(f"--over {word}: LOW must be {above}below HIGH.")
    if _is_whole(key):
        if low != int(low) or high != int(high):
            raise CommandError(f"--over {word}: {key} takes whole numbers.")
        low, high = int(low), int(high)
    return Axis(key, (low, high), scale)


def _is_whole(key: str) -> bool:
    kind = Settings.model_fields[key].annotation
    return kind is int or kind == int | None


def pin_objective(settings: Settings) -> Settings:
    """Fixes the combined reward at its KL weight before a search, which may vary `kl_coef`, but not its own goal."""
    return make_settings({**settings.model_dump(), "eval_kl_coef": settings.report_kl_coef})


def points(settings: Settings, axes: Sequence[Axis]) -> list[Settings]:
    """Returns the settings at all combinations of listed values and ends of ranges.

    Raises:
        CommandError: settings cannot have a value of the search, or not together with the others. Of a range of whole
            numbers every one is tried: between two ends that go with the other settings may be some that do not.
    """
    given = settings.model_dump()
    ends = [_point(axes, values) for values in itertools.product(*(axis.values for axis in axes))]
    whole = next((axis for axis in axes if axis.numbers is not axis.values), None)
    if whole is not None and all(_is_valid({**given, **point}) for point in ends):
        _check_whole(settings, axes, whole)
    found = []
    for point in ends:
        try:
            found.append(make_settings({**given, **point}))
        except SettingsError as error:
            raise CommandError(f"--over {show_point(point)}: {error}") from error
    return found


def unique_kinds(found: Sequence[Settings]) -> list[Settings]:
    """Returns of many settings those that differ in what is asked, who answers, or how: one of each kind."""
    keys = sorted(deciding("task", "policy", "sampling"))
    return list({repr([getattr(each, key) for key in keys]): each for each in found}.values())


def _point(axes: Sequence[Axis], values: Sequence[Value]) -> dict[str, Value]:
    return dict(zip((axis.key for axis in axes), values, strict=True))


def _is_valid(values: dict[str, Any]) -> bool:
    """Tells whether each setting is right by itself."""
    try:
        Fields(**values)
    except ValidationError:
        return False
    return True


def _check_whole(settings: Settings, axes: Sequence[Axis], axis: Axis) -> None:
    """Refuses a range of whole numbers of which some contradict other settings, and says which do not."""
    count = math.prod(len(each.numbers) for each in axes)
    if count > MOST:
        raise CommandError(
            f"--over {axis.word}: {count} combinations of values are too many to check, which at most {MOST} are. "
            "Narrow the range, or list some of its values."
        )
    contradictions: dict[Value, str] = {}
    for values in itertools.product(*(each.numbers for each in axes)):
        point = _point(axes, values)
        try:
            refuse_contradictions(settings.model_copy(update=point))
        except ValueError as error:
            contradictions.setdefault(point[axis.key], f"{show_point(point)}: {error}")
    fitting = [number for number in axis.numbers if number not in contradictions]
    if contradictions and fitting:
        first = next(iter(contradictions.values())).partition(". ")[0]
        named = ",".join(map(str, fitting[:NAMED])) + (",..." if len(fitting) > NAMED else "")
        raise CommandError(
            f"--over {axis.word}: {len(contradictions)} of its {len(axis.numbers)} values cannot be, such as {first}. "
            f"List some that can: --over {axis.key}={named}."
        )


def refuse_unused(settings: Settings, axes: Sequence[Axis]) -> None:
    """Refuses a setting on which `cory train` alone acts.

    Raises:
        CommandError: `final_queries` is set, or searched.
    """
    if settings.final_queries is not None or "final_queries" in (axis.key for axis in axes):
        raise CommandError(
            "final_queries has no effect in a search: its trials have no last evaluation. Leave it out, and train the "
            "best point with it: cory train DIR/best.yaml final_queries=N."
        )


def check_evaluations(settings: Settings, scheduler: str, axes: Sequence[Axis]) -> None:
    """Refuses a scheduler that would have nothing to compare.

    Raises:
        CommandError: no trial is evaluated before its end, or each at other updates.
    """
    if "eval_every" in (axis.key for axis in axes):
        raise CommandError(
            f"--scheduler {scheduler} compares trials right after evaluations, so --over eval_every is none. Set "
            "eval_every=N for all, or leave the scheduler out."
        )
    if settings.eval_every >= settings.updates:
        raise CommandError(
            f"--scheduler {scheduler} compares trials after evaluations, but the first of these is after "
            f"{settings.eval_every} of {settings.updates} updates. Lower eval_every, or leave the scheduler out."
        )


def show_point(point: Mapping[str, Value]) -> str:
    """Returns the values of a point as `key=value key=value`."""
    return " ".join(f"{key}={show_value(value)}" for key, value in point.items())


def show_value(value: Value) -> str:
    """Returns a value as it is written on the command line, numbers with four digits at most, a reward without code."""
    return f"{value:.4g}" if isinstance(value, float) else shown(as_word(value))


def exact_value(value: Value) -> str:
    """Returns a value as it is written on the command line, with all its digits; in quotes where it holds a comma."""
    text = as_word(value)
    return (
        text
        if "," not in text or text.startswith(QUOTES) or isinstance(value, list)
        else "'{}'".format(text.replace("'", "''"))
    )
