"""The child process that runs a user's environments: many episodes, one step at a time.

The parent's first request is the environment's name, `module:function`, and each further one an `Advance` or a `Check`.
"""

import contextlib
import io
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from cory_env.functions import ENVIRONMENT, SpecError, load_function
from cory_env.message import Message
from cory_env.rewarding.child_process import Reply, connect, describe_exception
from cory_env.text_envs.instance import EnvError, Instance, State

API_TEST_STEPS = 200


class Check(NamedTuple):
    """Asks to run PettingZoo's own test, with a row of data for every episode; None: without data."""

    row: Mapping[str, object] | None = None


class Advance(NamedTuple):
    """Asks for the states of an episode that follow from the actions that the process does not know yet.

    A process that does not have the episode starts it, and so replays one that ended with another process.

    Attributes:
        key: The episode.
        seed: Its seed.
        row: Its row of data; None without data.
        actions: All actions so far.
        is_cut: Whether the episode is cut off after them.
        finished: Keys of episodes that need no more steps.
    """

    key: int
    seed: int
    row: Mapping[str, object] | None
    actions: tuple[str | Message, ...]
    is_cut: bool = False
    finished: tuple[int, ...] = ()


class _Episodes:
    """The episodes of a process. Instances whose episodes have ended are used again."""

    def __init__(self, make_env: Callable[[], Any]) -> None:
        self._make_env = make_env
        self._running: dict[int, tuple[Instance, int]] = {}  # by key, the instance and its number of actions
        self._unused = [Instance(make_env())]
        self.agents = self._unused[0].possible_agents

    def advance(self, request: Advance) -> list[State]:
        """Returns the states of an episode; of a new one, the first is the initial state."""
        for key in request.finished:
            self._release(key)
        instance, num_actions = self._running.pop(request.key, (None, 0))
        states: list[State] = []
        if instance is None:
            instance = self._unused.pop() if self._unused else Instance(self._make_env())
            states.append(instance.reset(request.seed, request.row))
        states += [instance.step(action) for action in request.actions[num_actions:]]
        if request.is_cut:
            states.append(instance.truncate())
        self._running[request.key] = instance, len(request.actions)  # not after an error: it may be broken
        if states and states[-1].agent is None:
            self._release(request.key)
        return states

    def _release(self, key: int) -> None:
        if key in self._running:
            self._unused.append(self._running.pop(key)[0])

    def check(self, request: Check) -> list[State]:
        """Runs PettingZoo's own test with a new instance, with random texts as actions.

        Raises:
            EnvError: The instance fails it.
        """
        from pettingzoo.test import api_test

        from cory_env.text_envs.base import text_env

        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            try:
                env = self._make_env()
                if request.row is not None:
                    env.reset = partial(_reset, env.reset, request.row)
                api_test(text_env(env), num_cycles=API_TEST_STEPS)
            except AssertionError as error:
                raise EnvError(f"fails PettingZoo's api_test: {error}") from error
        return []


def main() -> None:
    """Loads the environment, reports its agents, and advances episodes until the parent is gone."""
    connection, requests = connect()
    try:
        episodes = _Episodes(load_function(requests.get(), ENVIRONMENT))
    except BaseException as error:  # SystemExit too
        reason = str(error) if isinstance(error, SpecError) else f"it {_describe(error)}"
        connection.send(Reply(error=reason, fatal=True))
        return
    connection.send(Reply(values=list(episodes.agents)))
    while True:
        try:
            request = requests.get()
            respond = episodes.check if isinstance(request, Check) else episodes.advance
            reply = Reply(values=respond(request))
        except BaseException as error:
            reply = Reply(error=_describe(error))
        connection.send(reply)


def _reset(reset: Callable[..., None], row: Mapping[str, object], seed: int | None = None, options: Any = None) -> None:
    reset(seed=seed, options={**(options or {}), "row": row})


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, EnvError) else f"raised {describe_exception(error)}"
