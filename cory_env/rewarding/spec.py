"""Finds the reward function that a configuration names: `module:function`, or `module:function?setting=value&...`.

Settings are handed to the function as keyword arguments, as text. They are part of the name, so they travel with the
configuration to every runner and into every checkpoint:
`cory_env.rewards.sentiment:positive_logit?model=lvwerra/distilbert-imdb`.

A function that no module holds, such as a notebook's, is named with its code (`pickled`).

Several functions make one reward, their weighted sum: `1.0 * my_rewards:right + -0.1 * my_rewards:length`.
"""

import importlib
import os
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from cory_env.rewarding.pickled import PICKLED, is_pickled, shown, unpickled

PLUS, TIMES = " + ", " * "
LONGEST = 120_000
"""Characters of a reward's name: Linux hands no more to a process as one word."""


class SpecError(ValueError):
    """A reward's name is malformed, or leads to no function or other object that can be called."""


def weighted(specs: Sequence[str], weights: Sequence[float] | None = None) -> str:
    """Returns the name of the weighted sum of functions, as TRL's `reward_funcs` and `reward_weights` give it.

    Args:
        specs: their names.
        weights: as many; None: 1.0 each.

    Raises:
        SpecError: there are not as many, or no functions, or a list of names was not read as one.
    """
    if any(spec.startswith("[") for spec in specs):
        raise SpecError(
            f"The reward {specs[0]!r} is no list: in one, names with settings stand in quotes, as in "
            "\"['my_rewards:near?by=2', 'my_rewards:short']\"."
        )
    weights = [1.0] * len(specs) if weights is None else weights
    if not specs or len(weights) != len(specs):
        raise SpecError(
            f"There are {len(specs)} reward functions and {len(weights)} reward_weights. Give each function a weight, "
            "in the same order, or leave reward_weights out."
        )
    if sum(map(len, specs)) > LONGEST:
        raise SpecError(
            f"The reward functions that were given with their code are {sum(map(len, specs)):,} characters together, "
            f"more than {LONGEST:,}. Put them into a module, and name them."
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
                f"The reward {shown(spec)!r} has {weight!r} before {TIMES.strip()!r}, which is no number."
            ) from error
        parse_spec(parts[-1][0])
    if len({name for name, _ in parts}) < len(parts):
        raise SpecError(f"The reward {shown(spec)!r} names a function twice. Add up its weights.")
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


def parse_spec(spec: str) -> tuple[str, str, dict[str, str]]:
    """Splits a reward's name into module, function and settings, without importing anything.

    Raises:
        SpecError: The name is not of this form, or gives a setting twice.
    """
    if is_pickled(spec):
        return PICKLED, spec.split(":")[1], {}
    target, _, query = spec.partition("?")
    module, colon, function = target.partition(":")
    pairs = [pair.partition("=") for pair in query.split("&")] if query else []
    well_formed = colon and all(part.isidentifier() for part in (*module.split("."), *function.split(".")))
    if not well_formed or not all(name.isidentifier() and equals for name, equals, _ in pairs):
        raise SpecError(
            f"The reward {spec!r} is not a function's name. Write module:function, such as my_rewards:length, "
            "or module:function?setting=value."
        )
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise SpecError(f"The reward {spec!r} gives a setting twice after the question mark. Give each once.")
    return module, function, {name: value for name, _, value in pairs}


def load_function(spec: str) -> Callable[..., object]:
    """Imports the function that `spec` names and binds its settings, or makes it of the code that it holds.

    Raises:
        SpecError: The module cannot be imported, or has no such function; or the code cannot be used here.
    """
    if is_pickled(spec):
        try:
            return unpickled(spec)
        except ValueError as error:
            raise SpecError(str(error)) from error
    module_name, function_name, settings = parse_spec(spec)
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise SpecError(
            f"The module {error.name!r}, needed for the reward {spec!r}, was not found: neither in {os.getcwd()}, "
            "nor on PYTHONPATH, nor installed. Start the run from the folder that holds it, or add that folder to "
            "PYTHONPATH."
        ) from error
    except Exception as error:
        raise SpecError(
            f"Importing the module {module_name!r} of the reward {spec!r} failed:\n{traceback.format_exc()}"
        ) from error
    file = getattr(found, "__file__", None) or "built in"
    for name in function_name.split("."):
        if name not in dir(found):
            raise SpecError(
                f"The module {module_name!r} ({file}) has no function {function_name!r}. Correct the reward's name, or "
                "the module that is found first."
            )
        found = getattr(found, name)
    if isinstance(found, type):
        raise SpecError(
            f"The reward {spec!r} names a class. Make an object of it in its module and name that, such as "
            f"{module_name}:reward after reward = {function_name}()."
        )
    if not callable(found):
        raise SpecError(f"The reward {spec!r} names a {type(found).__name__}, not a function. Name a function.")
    return partial(found, **settings) if settings else found
