"""What a reward can load, or find out, before its first batch."""

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

TIMEOUT = "CORY_REWARD_TIMEOUT"
"""In the environment of a reward's process: the seconds that one call of it may take."""

Function = TypeVar("Function", bound=Callable[..., object])


def prepare_with(prepare: Callable[..., object]) -> Callable[[Function], Function]:
    """Marks a reward with what it can load ahead, such as a model, while the engines of a run still start.

    Args:
        prepare: called in the reward's process before the first batch, with the settings of the reward's name; what it
            raises is dropped, as the reward itself meets it again. It becomes the reward's attribute `prepare`.
    """

    def mark(function: Function) -> Function:
        function.prepare = prepare  # type: ignore[attr-defined]
        return function

    return mark


def check_with(check: Callable[..., object]) -> Callable[[Function], Function]:
    """Marks a reward with what finds out whether it can be used on a machine at all.

    Args:
        check: called in the reward's process once the reward is loaded, with the settings of its name; what it raises
            is why the reward is refused. It becomes the reward's attribute `check`.
    """

    def mark(function: Function) -> Function:
        function.check = check  # type: ignore[attr-defined]
        return function

    return mark


def import_extra(module: str, extra: str) -> Any:
    """Returns a module of a package that an extra of ours installs.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"This reward needs the package {error.name}: pip install 'cory-rllib[{extra}]'"
        ) from None
