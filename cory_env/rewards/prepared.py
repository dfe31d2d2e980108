"""Decorators that let a reward load models, or check its requirements, before its first batch."""

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

TIMEOUT_VARIABLE = "CORY_REWARD_TIMEOUT"
"""Environment variable of the reward process: the seconds that one call may take."""

Function = TypeVar("Function", bound=Callable[..., object])


def prepare_with(prepare: Callable[..., object]) -> Callable[[Function], Function]:
    """Gives a reward a function that loads, for example, its model while the engines of a run start.

    Args:
        prepare: Called in the reward process before the first batch, with the settings in the reward's name. Its errors
            are ignored, because the reward itself raises them again. It becomes the reward's attribute `prepare`.
    """

    def decorate(function: Function) -> Function:
        function.prepare = prepare  # type: ignore[attr-defined]
        return function

    return decorate


def check_with(check: Callable[..., object]) -> Callable[[Function], Function]:
    """Gives a reward a function that checks whether the reward can be used on this machine.

    Args:
        check: Called in the reward process after the reward is loaded, with the settings in its name. If it raises,
            the reward is rejected with that error. It becomes the reward's attribute `check`.
    """

    def decorate(function: Function) -> Function:
        function.check = check  # type: ignore[attr-defined]
        return function

    return decorate


def import_extra(module: str, extra: str) -> Any:
    """Imports a module of a package that one of this project's extras installs.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"The package {error.name} is missing: pip install 'cory-rllib[{extra}]'") from None
