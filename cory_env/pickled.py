"""Reward functions given as objects: of a module by their name there, others with their code.

A function that no module holds, such as a notebook's, is named `pickled:NAME:CODE`: CODE is what cloudpickle makes of
it, in base64. So it travels with the settings into every process and every run's folder, as other names do; whoever
loads it runs that code.
"""

import base64
import pickle
import re
import sys
from collections.abc import Callable
from functools import partial

PICKLED = "pickled"
MAX_CHARACTERS = 64 * 1024
"""Characters of a code, at most: it stands in every settings file."""

_CODE = re.compile(rf"\b{PICKLED}:(\w+):[\w=-]*")


def spec_of(function: Callable[..., object]) -> str:
    """Names a function, as settings do.

    Raises:
        ValueError: it cannot be pickled, or its code would be too long.
    """
    target = function.func if isinstance(function, partial) else function
    name = re.sub(r"\W", "", getattr(target, "__name__", type(target).__name__))
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module and path and _found(module, path) is function:
        return f"{module}:{path}"
    import cloudpickle

    advice = f"put it into a module, my_rewards.py, and write reward='my_rewards:{name}'"
    try:
        code = base64.urlsafe_b64encode(cloudpickle.dumps(function)).decode()
    except Exception as error:  # whatever the objects raise that it refers to
        raise ValueError(
            f"the function {name} cannot be sent to the process that computes rewards, as what it refers to cannot be "
            f"pickled ({error}); make that inside the function, or {advice}"
        ) from error
    if len(code) > MAX_CHARACTERS:
        raise ValueError(
            f"the function {name} and what it refers to are {len(code):,} characters when pickled, more than "
            f"{MAX_CHARACTERS:,}; load inside the function what is large, or {advice}"
        )
    return f"{PICKLED}:{name}:{code}"


def unpickled(spec: str) -> Callable[..., object]:
    """Makes the function of its name `pickled:NAME:CODE`.

    Raises:
        ValueError: there is no such function in it, or not with this Python and these packages.
    """
    _, name, code = spec.split(":")
    try:
        function: Callable[..., object] = pickle.loads(base64.urlsafe_b64decode(code))
    except Exception as error:
        raise ValueError(
            f"The reward {name} was given as a Python function, and cannot be made here of what was kept of it "
            f"({type(error).__name__}: {error}). Use the Python and the packages with which it was given, or name a "
            "function of a module."
        ) from error
    return function


def is_pickled(spec: str) -> bool:
    """Tells whether a name holds its function's code, and is well-formed."""
    return _CODE.fullmatch(spec) is not None


def display_name(spec: str) -> str:
    """Returns a reward's name, or that of a sum of several, as messages have it: without code."""
    return _CODE.sub(r"\1", spec)


def _found(module: str, path: str) -> object:
    """Returns what other processes find under a name, too; None where there is nothing."""
    found: object = sys.modules.get(module)
    if module == "__main__" or getattr(found, "__spec__", None) is None:
        return None
    for name in path.split("."):
        found = getattr(found, name, None)
    return found
