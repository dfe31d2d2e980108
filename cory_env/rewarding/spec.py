"""Names of rewards: one function (`cory_env.functions`), or a weighted sum of several,
`1.0 * my_rewards:right + -0.1 * my_rewards:length`. In a setting's value, ` + ` is written ` %2B `, and ` * ` ` %2A `.
"""

import math
from collections.abc import Sequence

from cory_env.functions import SpecError, parse_spec
from cory_env.pickled import display_name, is_pickled

PLUS, TIMES = " + ", " * "


def weighted_sum(specs: Sequence[str], weights: Sequence[float] | None = None) -> str:
    """Returns the name of a weighted sum of functions, as with TRL's `reward_funcs` and `reward_weights`.

    Args:
        specs: The functions' names. If there are several, or weights, ` + ` and ` * ` belong to the values of settings.
        weights: One weight per function; None means 1.0 each.
    """
    weights = [1.0] * len(specs) if weights is None else weights
    if not specs or len(weights) != len(specs):
        raise SpecError(
            f"There are {len(specs)} reward functions, but {len(weights)} reward_weights. Set one weight per function, "
            "in the same order, or leave reward_weights out."
        )
    if len(specs) == 1 and weights[0] == 1.0:
        return specs[0]
    escaped = [spec.replace(PLUS, " %2B ").replace(TIMES, " %2A ") for spec in specs]
    return PLUS.join(f"{float(weight)!r}{TIMES}{spec}" for spec, weight in zip(escaped, weights, strict=True))


def parse_sum(spec: str) -> list[tuple[str, float]]:
    """Splits a reward's name into its functions and their weights, without importing anything."""
    hint = " In a setting's value, write + as %2B, and * as %2A." if "?" in spec and " " in spec else ""
    parts: list[tuple[str, float]] = []
    for part in spec.split(PLUS):
        weight, _, name = part.partition(TIMES) if TIMES in part else ("1", "", part)
        try:
            number = math.nan if "_" in weight else float(weight)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise SpecError(
                f"The reward {display_name(spec)!r} has the invalid weight {weight!r}. Write a number before "
                f"{TIMES.strip()!r}.{hint}"
            )
        try:
            parse_spec(name)
        except SpecError as error:
            raise SpecError(f"{error}{hint}") from error
        parts.append((name, number))
    if len({name for name, _ in parts}) < len(parts):
        raise SpecError(f"The reward {display_name(spec)!r} repeats a function. Add up its weights.")
    return parts


def short_names(specs: Sequence[str]) -> list[str]:
    """Returns the functions' names for reports.

    A function's name comes without its module if that is unique. If it is not, the name includes the module, or a
    number if the function is pickled.
    """
    names = [parse_spec(spec)[1] for spec in specs]
    unique_names = [
        f"{name}_{i}" if is_pickled(spec) else spec for i, (name, spec) in enumerate(zip(names, specs, strict=True))
    ]
    return [name if names.count(name) == 1 else unique for name, unique in zip(names, unique_names, strict=True)]
