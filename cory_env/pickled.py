"""Names for functions passed as objects: module and function, or the pickled code.

A function that is in no module, such as one from a notebook, is named `pickled:NAME:CODE`, with CODE the base64 of its
cloudpickle. The settings carry that name into every process and run folder, as they do other names. Loading it runs
that code.
"""

import base64
import pickle
import re
import sys
from collections.abc import Callable
from functools import partial

PICKLED = "pickled"
MAX_CHARACTERS = 64 * 1024
"""Maximum length of the code, because every settings file contains it."""

_CODE = re.compile(rf"\b{PICKLED}:(\w+):[\w=-]*")


def spec_of(function: Callable[..., object]) -> str:
    """Returns the name of a function for use in settings."""
    target = function.func if isinstance(function, partial) else function
    name = re.sub(r"\W", "", getattr(target, "__name__", type(target).__name__))
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module and path and _lookup(module, path) is function:
        return f"{module}:{path}"
    import cloudpickle

    advice = f"put the function into a module, my_rewards.py, and set reward='my_rewards:{name}'"
    try:
        code = base64.urlsafe_b64encode(cloudpickle.dumps(function)).decode()
    except Exception as error:  # the objects that it refers to may raise anything
        raise ValueError(
            f"function {name} cannot be sent to the reward process, because an object that it refers to cannot be "
            f"pickled ({error}); create that object inside the function, or {advice}"
        ) from error
    if len(code) > MAX_CHARACTERS:
        raise ValueError(
            f"function {name} has {len(code):,} characters when pickled with the objects that it refers to, more than "
            f"the maximum of {MAX_CHARACTERS:,}; load large objects inside the function, or {advice}"
        )
    return f"{PICKLED}:{name}:{code}"


def unpickle_function(spec: str) -> Callable[..., object]:
    """Unpickles the function from its name `pickled:NAME:CODE`."""
    _, name, code = spec.split(":")
    try:
        function: Callable[..., object] = pickle.loads(base64.urlsafe_b64decode(code))
    except Exception as error:
        raise ValueError(
            f"The reward {name} was passed as a Python function, and its saved code cannot be loaded here "
            f"({type(error).__name__}: {error}). Use the same Python version and packages as then, or name a function "
            "of a module."
        ) from error
    return function


def is_pickled(spec: str) -> bool:
    """Returns whether a function's name is well-formed and contains its code."""
    return _CODE.fullmatch(spec) is not None


def display_name(spec: str) -> str:
    """Returns a reward's name for messages, without code; the reward may be a weighted sum."""
    return _CODE.sub(r"\1", spec)


def _lookup(module: str, path: str) -> object:
    """Returns the object that other processes would import under a name, or None."""
    value: object = sys.modules.get(module)
    if module == "__main__" or getattr(value, "__spec__", None) is None:
        return None
    for name in path.split("."):
        value = getattr(value, name, None)
    return value
