"""What a reward can load before its first batch."""

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def prepared_by(prepare: Callable[..., object]) -> Callable[[Function], Function]:
    """Marks a reward with what it can load ahead, such as a model, while the engines of a run still start.

    Args:
        prepare: called in the reward's process before the first batch, with the settings of the reward's name; what it
            raises is dropped, as the reward itself meets it again. It becomes the reward's attribute `prepare`.
    """

    def mark(function: Function) -> Function:
        function.prepare = prepare  # type: ignore[attr-defined]
        return function

    return mark
