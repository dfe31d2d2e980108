"""Functions that a configuration names, such as rewards: `module:function`, or `module:function?setting=value&...`.

Settings are handed to the function as keyword arguments, as text; `~/` at the start of one is the home directory. They
are part of the name, so they travel with the configuration to every runner and into every checkpoint:
`cory_env.rewards.sentiment:positive_logit?model=lvwerra/distilbert-imdb`.

A function that no module holds, such as a notebook's, is named with its code (`cory_env.pickled`).
"""

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from cory_env.home import expand_home
from cory_env.pickled import PICKLED, is_pickled, unpickled
from cory_env.shadowing import PACKAGES, shadowed_import


class SpecError(ValueError):
    """A function's name is malformed, or leads to nothing that can be called."""


def parse_spec(spec: str, what: str = "reward") -> tuple[str, str, dict[str, str]]:
    """Splits a function's name into module, function and settings, without importing anything.

    Raises:
        SpecError: The name is not of this form, or gives a setting twice.
    """
    if is_pickled(spec):
        return PICKLED, spec.split(":")[1], {}
    try:
        target, settings = split_settings(spec)
        module, _, function = target.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *function.split("."))):
            raise ValueError(f"{target!r} is not a function's name")
    except ValueError as error:
        raise SpecError(
            f"The {what} {spec!r} cannot be used: {error}. Write module:function, such as my_{what}s:length, or "
            "module:function?setting=value."
        ) from error
    return module, function, settings


def split_settings(text: str) -> tuple[str, dict[str, str]]:
    """Splits `NAME?setting=value&...` into the name and its settings.

    Raises:
        ValueError: The settings are not of this form, or one stands twice.
    """
    name, _, tail = text.partition("?")
    pairs = [pair.partition("=") for pair in tail.split("&")] if tail else []
    settings = {setting: value for setting, equals, value in pairs if setting.isidentifier() and equals}
    if len(settings) < len(pairs):
        raise ValueError("after the question mark must stand setting=value, joined by &, each setting once")
    return name, settings


def search_working_folder() -> None:
    """Lets modules of the present folder be imported; where a command is started, its own folder is there instead."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def load_function(spec: str, what: str = "reward") -> Callable[..., Any]:
    """Imports the function that `spec` names and binds its settings, or makes it of the code that it holds.

    Args:
        spec: its name.
        what: what messages call it: the setting that names it.

    Raises:
        SpecError: The module cannot be imported, or has no such function; or the code cannot be used here.
    """
    if is_pickled(spec):
        try:
            return unpickled(spec)
        except ValueError as error:
            raise SpecError(str(error)) from error
    module_name, function_name, settings = parse_spec(spec, what)
    search_working_folder()
    try:
        if shadowed := shadowed_import(module_name, ("cory_env",) if what == "reward" else PACKAGES):
            name, shadowing = shadowed
            raise SpecError(
                f"The {what} {spec!r} imports {name}, which in its process is a package of CORY, not {shadowing}. "
                "Rename that module."
            )
        found: object = importlib.import_module(module_name)
    except SpecError:
        raise
    except ModuleNotFoundError as error:
        raise SpecError(
            f"The module {error.name!r}, needed for the {what} {spec!r}, was not found: neither in {os.getcwd()}, "
            "nor on PYTHONPATH, nor installed. Start the run from the folder that holds it, or add that folder to "
            "PYTHONPATH."
        ) from error
    except Exception as error:
        raise SpecError(
            f"Importing the module {module_name!r} of the {what} {spec!r} failed:\n{traceback.format_exc()}"
        ) from error
    file = getattr(found, "__file__", None) or "built in"
    for name in function_name.split("."):
        if name not in dir(found):
            raise SpecError(
                f"The module {module_name!r} ({file}) has no function {function_name!r}. Correct the {what}'s name, or "
                "the module that is found first."
            )
        found = getattr(found, name)
    if isinstance(found, type) or not callable(found):
        raise SpecError(
            f"The {what} {spec!r} names a {'class' if isinstance(found, type) else type(found).__name__}, not a "
            "function. Name a function, or an object that can be called."
        )
    values = {name: expand_home(value) if value.startswith("~/") else value for name, value in settings.items()}
    return partial(found, **values) if values else found
