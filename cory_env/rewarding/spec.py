"""Finds the reward function that a configuration names: `module:function`, or `module:function?setting=value&...`.

Settings are handed to the function as keyword arguments, as text. They are part of the name, so they travel with the
configuration to every runner and into every checkpoint:
`cory_env.rewards.sentiment:positive_logit?model=lvwerra/distilbert-imdb`.
"""

import importlib
import os
import traceback
from collections.abc import Callable
from functools import partial


class SpecError(ValueError):
    """A reward's name is malformed, or leads to no function or other object that can be called."""


def parse_spec(spec: str) -> tuple[str, str, dict[str, str]]:
    """Splits a reward's name into module, function and settings, without importing anything.

    Raises:
        SpecError: The name is not of this form, or gives a setting twice.
    """
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
    """Imports the function that `spec` names and binds its settings.

    Raises:
        SpecError: The module cannot be imported, or has no such function.
    """
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
