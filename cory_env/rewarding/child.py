"""The child process that holds a reward: a function, or several whose weighted sum it is.

    python -c "from cory_env.rewarding.child import main; main()" FD PARENT_PID [--die-with-thread]

The parent's first request is the reward's name. The main thread runs the function. A second thread reads requests and
ends the process when the parent is gone, so that a function that hangs cannot outlive the run. The parent opens
standard output onto standard error, so a `print` does no harm.
"""

import asyncio
import contextlib
import copy
import ctypes
import inspect
import math
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple, SupportsFloat

from cory_env.functions import SpecError, load_function
from cory_env.pickled import display_name
from cory_env.rewarding.process import Batch, Reply, Request, Reward
from cory_env.rewarding.spec import parse_sum, short_names
from cory_env.shadowing import UsersModulesFirst

PARENT_CHECK = 1.0  # seconds between looks at whether the parent lives, where its pipe's end is held open by others

EVENT_LOOP = asyncio.Runner()
"""One for all calls, as in TRL: a semaphore or a client that a reward keeps belongs to the loop that it first met."""


class Part(NamedTuple):
    """One of the functions that make a reward."""

    spec: str
    name: str
    weight: float
    function: Callable[..., object]


def load(spec: str) -> list[Part]:
    """Loads what a reward's name names.

    Raises:
        SpecError: A function cannot be loaded, or says that it cannot be used here.
        ValueError: The arguments of one cannot be matched.
    """
    weights = dict(parse_sum(spec))
    names = short_names([*weights])
    parts = [Part(key, name, weights[key], load_function(key)) for key, name in zip(weights, names, strict=True)]
    for part in parts:
        required(part.function)
        try:
            call_hook(part.function, "check")
        except Exception as error:
            raise SpecError(str(error)) from error
    return parts


def call_all(parts: Sequence[Part], batch: Batch) -> Reply:
    """Calls every function on a batch; with several, what fails names its function."""
    if len(parts) == 1 and parts[0].weight == 1.0:
        return call(parts[0].function, batch)
    replies = []
    for part in parts:
        reply = call(part.function, batch, f"asks {display_name(part.spec)}, which ")
        if reply.error:
            return reply
        replies.append(reply)
    return Reply(values=[_sum(parts, values) for values in zip(*(reply.values for reply in replies), strict=True)])


def _sum(parts: Sequence[Part], values: Sequence[float | str]) -> float | str:
    """Returns the weighted sum of what functions gave for one sample, or what one of them gave instead of a number."""
    numbers = {}
    for part, value in zip(parts, values, strict=True):
        if isinstance(value, str):
            return value
        numbers[part.name] = value
    reward = Reward(math.fsum(part.weight * numbers[part.name] for part in parts))
    reward.parts = numbers
    return reward


def call(function: Callable[..., object], batch: Batch, asks: str = "") -> Reply:
    """Calls the function on a batch with the arguments that it accepts, and checks what it returns.

    It gets a copy of each value, so that what it does to one sample in place is not done to another of the same query.

    Args:
        function: The function.
        batch: What it rewards.
        asks: What stands before any error, to name one function of several.
    """
    offered = {**batch.columns, "prompts": batch.prompts, "completions": batch.completions}
    arguments, missing = select_arguments(function, offered)
    if missing:
        return Reply(
            fatal=True,
            error=f"it {asks}asks for {', '.join(missing)}, but is offered only {', '.join(sorted(offered))}. "
            "Rename its arguments, give them defaults, or add the columns to the data",
        )
    if empty := [name for name in required(function) if any(value is None for value in arguments[name])]:
        return Reply(
            error=f"{asks}was not called, because it asks for {', '.join(empty)}, and the data has no value there "
            "(with a default for that argument it would get None)"
        )
    try:
        copies = {name: [copy.deepcopy(value) for value in values] for name, values in arguments.items()}
        result = function(**copies)
        if inspect.isawaitable(result):
            result = EVENT_LOOP.run(_wait_for(result))
        return check_values(result, len(batch), asks)
    except BaseException as error:  # SystemExit too: a reward must not end its process without a word
        return Reply(error=f"{asks}raised {_describe(error)}")
    finally:
        sys.stdout.flush()


async def _wait_for(result: Awaitable[object]) -> object:
    return await result


def _describe(error: BaseException) -> str:
    """Returns the exception with the end of its traceback."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return text + "\n" + "".join(traceback.format_tb(error.__traceback__)[-5:]).rstrip()


def select_arguments(
    function: Callable[..., object], offered: dict[str, Sequence[object]]
) -> tuple[dict[str, Sequence[object]], list[str]]:
    """Returns those of the `offered` arguments that the function accepts, and the names it requires beyond them.

    Settings bound by the reward's name stay as bound, even where the data has a column of the same name.
    """
    bound = function.keywords if isinstance(function, partial) else {}
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [name for name in offered if (takes_all or name in parameters) and name not in bound]
    return {name: offered[name] for name in names}, [name for name in required(function) if name not in names]


def required(function: Callable[..., object]) -> tuple[str, ...]:
    """Returns the arguments for which the function has no default, and its name no setting.

    Raises:
        ValueError: It is a built-in without a signature, or does not know a setting.
    """
    parameters = inspect.signature(function).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name for p in parameters if p.default is p.empty and p.kind not in variable)


def check_values(result: object, size: int, asks: str) -> Reply:
    """Turns what a function returned for `size` samples into numbers; NumPy's and torch's scalars are welcome."""
    try:
        if isinstance(result, (str, bytes, dict)):
            raise TypeError
        values = list(result)  # type: ignore[call-overload]
    except TypeError:
        return Reply(error=f"{asks}returned {_shown(result)} instead of a list of {size} numbers")
    if len(values) != size:
        return Reply(error=f"{asks}returned {len(values)} values for {size} samples")
    return Reply(values=[_number(value, asks) for value in values])


def _number(value: object, asks: str) -> float | str:
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # an array or tensor of several elements
        if isinstance(value, SupportsFloat) and math.isfinite(number := float(value)):
            return number
    return f"{asks}returned {_shown(value)} instead of a finite number"


def _shown(value: object) -> str:
    if value is None:
        return "None (in TRL: a reward that does not apply; here every sample needs one)"
    return f"{value!r:.80} ({type(value).__name__})"


def call_hook(function: Callable[..., object], name: str) -> None:
    """Calls what the function has under the name `prepare` or `check`, if anything, with the settings of its name."""
    target, settings = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
    if callable(hook := getattr(target, name, None)):
        hook(**settings)


def _read_requests(connection: "Connection[Reply, Request]", parent: int, requests: "queue.Queue[Request]") -> None:
    try:
        while True:
            while not connection.poll(PARENT_CHECK):
                if os.getppid() != parent:
                    return
            requests.put(connection.recv())
    except (EOFError, OSError):
        return
    finally:
        os.killpg(os.getpgrp(), signal.SIGKILL)  # its own group: this process and whatever the function started


def main() -> None:
    """Loads the functions, says so, prepares them, and answers batches until the parent is gone."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    # A stopped Ray job sends this to all its processes, but the parent still needs rewards to finish its update.
    signal.signal(signal.SIGTERM, lambda *_: None)
    if "--die-with-thread" in sys.argv and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends even a function that never yields to Python
    connection: Connection[Reply, Request] = Connection(fd)
    requests: queue.Queue[Request] = queue.Queue()
    threading.Thread(target=_read_requests, args=(connection, parent, requests), daemon=True).start()
    spec = requests.get()
    assert isinstance(spec, str)
    sys.meta_path.insert(0, UsersModulesFirst())
    try:
        parts = load(spec)
        ready = Reply(needs=tuple(dict.fromkeys(name for part in parts for name in required(part.function))))
    except SpecError as error:
        ready = Reply(error=str(error), fatal=True)
    except ValueError as error:
        ready = Reply(error=f"its arguments cannot be matched: {error}", fatal=True)
    connection.send(ready)
    if ready.error:
        return
    for part in parts:
        with contextlib.suppress(BaseException):  # SystemExit too: the first call meets it again, and tells
            call_hook(part.function, "prepare")
    while True:
        batch = requests.get()
        assert isinstance(batch, Batch)
        connection.send(call_all(parts, batch))
