"""Functions named in a configuration, such as rewards: `module:function`, or `module:function?setting=value&...`.

Settings are passed to the function as keyword arguments, as text; `~/` at the start of a value is the home directory.
As in URLs, `%26` in a value is `&`, `%2B` is `+`, `%2A` is `*`, and `%25` is `%`.
They are part of the name, so the configuration carries them to every runner and into every checkpoint:
`cory_env.rewards.sentiment:positive_logit?model=lvwerra/distilbert-imdb`.

The name of a function that is in no module, such as one from a notebook, contains its code (`cory_env.pickled`).
"""

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

from cory_env.home import expand_home, upload_hint
from cory_env.pickled import PICKLED, is_pickled, unpickle_function
from cory_env.shadowing import PROJECT_PACKAGES, shadowed_import

ENVIRONMENT = "environment"
"""The kind of a function that makes an environment; it may be a class."""
TRL_FACTORY = "environment factory"
"""The kind of a factory of TRL's environments: a callable, or a dictionary of callables."""
TRL = "trl:"
ADAPTERS = {
    "textarena:": ("cory_env.text_envs.textarena", "textarena_game", "id"),
    TRL: ("cory_env.text_envs.trl", "trl_env", "factory"),
}
"""Prefixes of environments that are no PettingZoo environments: the adapter, and its argument for what follows."""
IN_CHILD_PROCESSES = ("reward", "feedback", ENVIRONMENT, TRL_FACTORY)
"""Kinds whose functions have a process that needs only `cory_env` of the project."""


class SpecError(ValueError):
    """A function's name is malformed, or does not refer to a callable."""


def parse_spec(spec: str, kind: str = "reward") -> tuple[str, str, dict[str, str]]:
    """Splits a function's name into module, function and settings, without importing anything.

    Args:
        kind: What messages call the function, such as `reward`.
    """
    if is_pickled(spec):
        return PICKLED, spec.split(":")[1], {}
    try:
        target, settings = split_settings(spec)
        for prefix, (module, function, argument) in ADAPTERS.items():
            if target.startswith(prefix):
                return module, function, {argument: target.removeprefix(prefix), **settings}
        module, _, function = target.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *function.split("."))):
            raise ValueError(f"{target!r} is not a function's name")
    except ValueError as error:
        raise SpecError(
            f"Invalid {kind} {spec!r}: {error}. Write module:function, such as my_{kind}s:length, or "
            "module:function?setting=value."
        ) from error
    return module, function, settings


def split_settings(text: str) -> tuple[str, dict[str, str]]:
    """Splits `NAME?setting=value&...` into the name and its settings, with `%26` and the like in values decoded."""
    name, _, tail = text.partition("?")
    pairs = [pair.partition("=") for pair in tail.split("&")] if tail else []
    settings = {setting: value for setting, equals, value in pairs if setting.isidentifier() and equals}
    if len(settings) < len(pairs):
        raise ValueError(
            "the question mark must be followed by setting=value pairs, joined by &, without repetition; & in a value "
            "is written %26"
        )
    return name, {setting: unquote(value, errors="strict") for setting, value in settings.items()}


def search_working_folder() -> None:
    """Adds the current folder to the search path. For installed commands, Python adds the command's folder instead."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def load_function(spec: str, kind: str = "reward") -> Callable[..., Any]:
    """Imports the function that `spec` names and binds its settings, or unpickles it from the code in its name.

    A dictionary of environment factories becomes a function that returns it.

    Args:
        kind: What messages call the function, such as `reward`.
    """
    if is_pickled(spec):
        try:
            return unpickle_function(spec)
        except ValueError as error:
            raise SpecError(str(error)) from error
    module_name, function_name, settings = parse_spec(spec, kind)
    search_working_folder()
    try:
        if shadowed := shadowed_import(module_name, ("cory_env",) if kind in IN_CHILD_PROCESSES else PROJECT_PACKAGES):
            name, shadowing = shadowed
            raise SpecError(
                f"The {kind} {spec!r} imports {name}, which in its process is a package of CORY, not {shadowing}. "
                "Rename that module."
            )
        function: object = importlib.import_module(module_name)
    except SpecError:
        raise
    except ModuleNotFoundError as error:
        raise SpecError(
            f"Module {error.name!r} of the {kind} {spec!r} not found in {os.getcwd()}, on PYTHONPATH or among the "
            "installed packages. Start the run from the folder that contains it, or add that folder to PYTHONPATH."
            f"{upload_hint()}"
        ) from error
    except Exception as error:
        raise SpecError(
            f"Importing module {module_name!r} of the {kind} {spec!r} failed:\n{traceback.format_exc()}"
        ) from error
    file = getattr(function, "__file__", None) or "built in"
    for name in function_name.split("."):
        if name not in dir(function):
            raise SpecError(
                f"Module {module_name!r} ({file}) has no function {function_name!r}. Correct the {kind}'s name, or "
                "rename the module if it hides another one of that name."
            )
        function = getattr(function, name)
    is_class = isinstance(function, type) and kind not in (ENVIRONMENT, TRL_FACTORY)
    if kind == TRL_FACTORY and isinstance(function, Mapping):
        return partial(dict, function)
    if is_class or not callable(function):
        raise SpecError(
            f"The {kind} {spec!r} is a {'class' if isinstance(function, type) else type(function).__name__}, not a "
            "function. Name a function or a callable object."
        )
    values = {name: expand_home(value) if value.startswith("~/") else value for name, value in settings.items()}
    return partial(function, **values) if values else function
