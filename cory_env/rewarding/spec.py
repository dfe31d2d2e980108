"""The name of a reward: one function's (`cory_env.functions`), or the weighted sum of several,
`1.0 * my_rewards:right + -0.1 * my_rewards:length`.
"""

from collections.abc import Sequence

from cory_env.functions import SpecError, parse_spec
from cory_env.pickled import display_name, is_pickled

PLUS, TIMES = " + ", " * "


def weighted_sum(specs: Sequence[str], weights: Sequence[float] | None = None) -> str:
    """Returns the name of the weighted sum of functions, as TRL's `reward_funcs` and `reward_weights` give it.

    Args:
        specs: their names.
        weights: as many; None: 1.0 each.

    Raises:
        SpecError: there are not as many, or no functions.
    """
    weights = [1.0] * len(specs) if weights is None else weights
    if not specs or len(weights) != len(specs):
        raise SpecError(
            f"There are {len(specs)} reward functions and {len(weights)} reward_weights. Give each function a weight, "
            "in the same order, or leave reward_weights out."
        )
    if len(specs) == 1 and weights[0] == 1.0:
        return specs[0]
    return PLUS.join(f"{float(weight)!r}{TIMES}{spec}" for spec, weight in zip(specs, weights, strict=True))


def parse_sum(spec: str) -> list[tuple[str, float]]:
    """Splits a reward's name into those of its functions, each with its weight, without importing anything.

    Raises:
        SpecError: A name is not of its form, or a function stands twice.
    """
    parts: list[tuple[str, float]] = []
    for part in spec.split(PLUS):
        weight, times, name = part.partition(TIMES)
        try:
            parts.append((name, float(weight)) if times else (part, 1.0))
        except ValueError as error:
            raise SpecError(
                f"The reward {display_name(spec)!r} has {weight!r} before {TIMES.strip()!r}, which is no number."
            ) from error
        parse_spec(parts[-1][0])
    if len({name for name, _ in parts}) < len(parts):
        raise SpecError(f"The reward {display_name(spec)!r} names a function twice. Add up its weights.")
    return parts


def short_names(specs: Sequence[str]) -> list[str]:
    """Returns what functions are called in reports: their bare names where these differ, else as they are named, those
    with their code by a number.
    """
    bare = [parse_spec(spec)[1] for spec in specs]
    others = [
        f"{name}_{at}" if is_pickled(spec) else spec for at, (name, spec) in enumerate(zip(bare, specs, strict=True))
    ]
    return [name if bare.count(name) == 1 else other for name, other in zip(bare, others, strict=True)]
