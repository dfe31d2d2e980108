"""The child process that computes a reward: one function, or the weighted sum of several; and feedback, if asked for.

    python -c "from cory_env.rewarding.child import main; main()" FD PARENT_PID [--die-with-thread]

The parent's first request has the specs of the reward and of the feedback function (`child_process`).
"""

import asyncio
import contextlib
import copy
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, SupportsFloat

from cory_env.functions import SpecError, load_function
from cory_env.message import SURROGATE_PROBLEM, has_surrogate
from cory_env.pickled import display_name
from cory_env.rewarding.child_process import Reply, connect, describe_exception
from cory_env.rewarding.process import FEEDBACK, REWARD, Batch, Reward, SampleError
from cory_env.rewarding.spec import parse_sum, short_names

MAX_REWARD = 1e15
"""Largest magnitude of a reward: the squares of a million such rewards add up to 1e36, and fp32 ends at 3.4e38."""
TOO_LARGE = f"but learners compute in fp32, so rewards must be from -{MAX_REWARD:g} to {MAX_REWARD:g}"

EVENT_LOOP = asyncio.Runner()
"""One loop for all calls, as in TRL, because a reward's semaphores and clients are bound to their first loop."""


class WeightedFunction(NamedTuple):
    """One function of a reward, with its weight in the sum."""

    spec: str
    name: str
    weight: float
    function: Callable[..., object]


def load_functions(spec: str, kind: str = REWARD) -> list[WeightedFunction]:
    """Loads the functions of a reward, or a feedback function."""
    weights = {spec: 1.0} if kind == FEEDBACK else dict(parse_sum(spec))
    names = short_names([*weights])
    parts = [
        WeightedFunction(key, name, weights[key], load_function(key, FEEDBACK if kind == FEEDBACK else REWARD))
        for key, name in zip(weights, names, strict=True)
    ]
    for part in parts:
        try:
            call_hook(part.function, "check")
        except Exception as error:
            raise SpecError(str(error)) from error
    return parts


def call_all(parts: Sequence[WeightedFunction], batch: Batch) -> Reply:
    """Calls every function on a batch. If there are several, an error names its function.

    The feedback function returns texts or None; several rewards are summed.
    """
    if len(parts) == 1 and parts[0].weight == 1.0:
        return call(parts[0].function, batch)
    replies = []
    for part in parts:
        reply = call(part.function, batch, f"calls {display_name(part.spec)}, which ")
        if reply.error:
            return reply
        replies.append(reply)
    return Reply(
        values=[_weighted_sum(parts, values) for values in zip(*(reply.values for reply in replies), strict=True)]
    )


def _weighted_sum(parts: Sequence[WeightedFunction], values: Sequence[object]) -> float | SampleError:
    """Returns the weighted sum of the functions' values for one sample, or the first error among them."""
    numbers = {}
    for part, value in zip(parts, values, strict=True):
        if isinstance(value, SampleError):
            return value
        assert isinstance(value, float)
        numbers[part.name] = value
    terms = [part.weight * numbers[part.name] for part in parts]
    if (largest := max(map(abs, [*terms, sum(terms)]))) > MAX_REWARD:
        return SampleError(f"has {largest:g} in its weighted sum, {TOO_LARGE}")
    reward = Reward(math.fsum(terms))
    reward.parts = numbers
    return reward


def call(function: Callable[..., object], batch: Batch, prefix: str = "") -> Reply:
    """Calls the function on a batch with the arguments that it accepts, and checks its return value.

    The function gets a copy of each value, so that changing one sample in place does not change another of the same
    query. Settings in the reward's name take precedence over columns of the same name.

    Args:
        prefix: Text before any error message, to name the function if a reward has several.
    """
    bound = function.keywords if isinstance(function, partial) else {}
    parameters, required = inspect.signature(function).parameters, required_arguments(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [name for name in batch.columns if (takes_all or name in parameters) and name not in bound]
    if missing := [name for name in required if name not in names]:
        return Reply(
            fatal=True,
            error=f"it {prefix}requires {', '.join(missing)}, but only {', '.join(sorted(batch.columns))} are "
            "available. Rename its arguments, give them defaults, or add the columns to the data",
        )
    if empty := [name for name in required if any(value is None for value in batch.columns[name])]:
        return Reply(
            error=f"{prefix}was not called, because it requires {', '.join(empty)}, which the data does not have for "
            "this query (if the argument had a default, the function would get None)"
        )
    try:
        result = function(**{name: [copy.deepcopy(value) for value in batch.columns[name]] for name in names})
        if inspect.isawaitable(result):
            result = EVENT_LOOP.run(_await_result(result))
        return check_values(result, batch, prefix)
    except BaseException as error:  # SystemExit too: a reward must not end its process silently
        return Reply(error=f"{prefix}raised {describe_exception(error)}")
    finally:
        sys.stdout.flush()


async def _await_result(result: Awaitable[object]) -> object:
    return await result


def required_arguments(function: Callable[..., object]) -> tuple[str, ...]:
    """Returns the arguments that have neither a default nor a setting in the function's name."""
    parameters = inspect.signature(function).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name for p in parameters if p.default is p.empty and p.kind not in variable)


def check_values(result: object, batch: Batch, prefix: str = "") -> Reply:
    """Converts a function's return value for a batch.

    Rewards become finite numbers; NumPy and torch scalars are accepted. Feedback is text, or None if nothing is to be
    corrected.
    """
    size, is_feedback = len(batch), batch.function == FEEDBACK
    try:
        if isinstance(result, (str, bytes, dict)):
            raise TypeError
        values = list(result)  # type: ignore[call-overload]
    except TypeError:
        expected = "texts (or None)" if is_feedback else "numbers"
        return Reply(error=f"{prefix}returned {_format_value(result)} instead of a list of {size} {expected}")
    if len(values) != size:
        return Reply(error=f"{prefix}returned {len(values)} values for {size} samples")
    return Reply(values=[(_feedback if is_feedback else _number)(value, prefix) for value in values])


def _feedback(value: object, prefix: str) -> str | None:
    if isinstance(value, str) and has_surrogate(value):
        return SampleError(f"{prefix}returned {_format_value(value)}: the text {SURROGATE_PROBLEM}")
    if value is None or isinstance(value, str):
        return value
    return SampleError(f"{prefix}returned {_format_value(value)} instead of a text or None")


def _number(value: object, prefix: str) -> float | SampleError:
    # RuntimeError: an array or tensor of several elements; OverflowError: an integer above the largest float
    with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
        if isinstance(value, SupportsFloat) and math.isfinite(number := float(value)):
            if abs(number) > MAX_REWARD:
                return SampleError(f"{prefix}returned {_format_value(value)}, {TOO_LARGE}")
            return number
    return SampleError(f"{prefix}returned {_format_value(value)} instead of a finite number")


def _format_value(value: object) -> str:
    if value is None:
        return "None (in TRL: the reward does not apply; here every sample requires a reward)"
    return f"{value!r:.80} ({type(value).__name__})"


def call_hook(function: Callable[..., object], name: str) -> None:
    """Calls the function's attribute `prepare` or `check`, if it has one, with the settings in the function's name."""
    target, settings = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
    if callable(hook := getattr(target, name, None)):
        hook(**settings)


def main() -> None:
    """Loads the functions, reports that, prepares them, and answers batches until the parent is gone."""
    connection, requests = connect()
    specs = requests.get()
    try:
        functions = {name: load_functions(spec, name) for name, spec in specs.items()}
        parts = [part for function in functions.values() for part in function]
        names = dict.fromkeys(name for part in parts for name in required_arguments(part.function))
        ready = Reply(needs=tuple(names))
    except SpecError as error:
        ready = Reply(error=str(error))
    except ValueError as error:
        ready = Reply(error=f"its arguments cannot be matched: {error}")
    connection.send(ready)
    if ready.error:
        return
    for part in parts:
        with contextlib.suppress(BaseException):  # SystemExit too: the first call raises it again and reports it
            call_hook(part.function, "prepare")
    while True:
        batch = requests.get()
        connection.send(call_all(functions[batch.function], batch))
