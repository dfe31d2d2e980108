"""`EnvPool`: environments in child processes, each with a time limit per step."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, Self

from cory_env.chat import ChatError
from cory_env.message import TextError
from cory_env.prompt_encoder import PromptError
from cory_env.rewarding.child_process import ChildProcess, Reply
from cory_env.rewarding.worker import MAX_ATTEMPTS, OnError, RewardError
from cory_env.text_envs.child import Advance, Check
from cory_env.text_envs.episode import EnvEpisode

logger = logging.getLogger(__name__)

Patience = Literal["none", "any", "all"]
"""Which of the episodes that wait `EnvPool.collect` waits for."""
_WAIT_SECONDS = 0.2  # at most, between looks at all processes
_LOAD_SECONDS = 60.0  # that importing an environment and making one may take, if a step has less time
_PAUSE_SECONDS = 0.005  # without a reply, after which a batch of replies counts as complete


class EnvPool:
    """Environments in child processes, which start on the first step and then stay; a context manager.

    An episode belongs to the process of its number, so a process takes one step after another, and several processes
    do so at the same time. If one has to be ended, its other episodes are replayed from their seeds and actions.

    Attributes:
        seconds: Seconds so far in which nothing was left to do but wait for environments.
        skipped: Number of episodes so far that failed (`on_error="skip"`).
    """

    def __init__(
        self,
        env: str,
        *,
        agents: Sequence[str] = (),
        num_processes: int = 1,
        timeout: float,
        on_error: OnError = "stop",
    ) -> None:
        """Makes the pool without starting processes.

        Args:
            env: The environment, `module:function`.
            agents: The agents that it must have, in any order; empty: any.
            num_processes: Number of processes.
            timeout: Seconds that a step may take.
            on_error: How to handle a failure: `stop` raises, `skip` marks the episode as failed.
        """
        self.env, self.timeout, self.on_error = env, timeout, on_error
        self.seconds = 0.0
        self.skipped = 0
        self._hosts = [_Host(env, agents, timeout) for _ in range(num_processes)]

    def agents(self) -> tuple[str, ...]:
        """Returns the environment's agents.

        Raises:
            RewardError: The environment cannot be made.
        """
        return self._hosts[0].agents()

    def check(self, row: Mapping[str, object] | None = None) -> str:
        """Runs PettingZoo's own test of environments; returns what is wrong, as the predicate of a sentence.

        Args:
            row: The row of data of all episodes.
        """
        return self._hosts[0].check(row)

    def prepare(self) -> None:
        """Starts the processes without waiting for them."""
        for host in self._hosts:
            host.start()

    def submit(self, index: int, episode: EnvEpisode) -> None:
        """Starts the reset or the step that an episode waits for.

        Args:
            index: The episode's number, from 0.
        """
        self._hosts[index % len(self._hosts)].submit(index, episode)

    def is_ready(self) -> bool:
        """Returns whether a process has replied."""
        return any(connection.poll() for connection in self._connections())

    def _connections(self) -> list[Connection[Any, Reply]]:
        """The connections with processes that are at work."""
        return [host.connection for host in self._hosts if host.connection is not None]

    def collect(self, patience: Patience) -> list[int]:
        """Returns the numbers of episodes that have been advanced, or have failed.

        Args:
            patience: `none`: only those that are ready now. `any`: waits until there is one, and then as long as others
                follow quickly, so that a batch of requests is not small only because environments take their steps
                one after another. `all`: waits for all.

        Raises:
            RewardError: An episode failed (`on_error="stop"`), or the environment cannot be made.
        """
        start = time.monotonic()
        indices: list[int] = []
        while True:
            advanced = [advance for host in self._hosts if (advance := host.collect()) is not None]
            for index, episode, error in advanced:
                if error:
                    self._fail(episode, error)
                indices.append(index)
            at_work = self._connections()
            timeout = _PAUSE_SECONDS if indices and patience == "any" else _WAIT_SECONDS
            is_done = patience == "none" or not at_work
            if not advanced and (is_done or (not wait(at_work, timeout) and indices and patience == "any")):
                self.seconds += time.monotonic() - start
                return indices

    def _fail(self, episode: EnvEpisode, error: str) -> None:
        agent = episode.agents[-1] if episode.responses else None
        turn = "the reset" if agent is None else f"{agent}'s turn {episode.agents.count(agent)}"
        end = "\n" if "\n" in error else ". "  # a traceback ends with its own line
        message = f"The environment {self.env} failed at {turn} with seed {episode.seed}: it {error}{end}"
        if self.on_error == "stop":
            raise RewardError(f"{message}Correct it, or set on_reward_error=skip to drop such episodes.")
        logger.warning("%sThe episode is dropped.", message)
        self.skipped += 1
        episode.error = error

    def discard(self) -> None:
        """Forgets all episodes, such as after an error."""
        for host in self._hosts:
            host.discard()

    def close(self) -> None:
        """Ends the processes; a later step starts others."""
        for host in self._hosts:
            host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Host:
    """A child process and its episodes."""

    def __init__(self, env: str, expected: Sequence[str], timeout: float) -> None:
        self._env, self._expected, self._timeout = env, expected, timeout
        self._process: ChildProcess | None = None
        self._agents: tuple[str, ...] | None = None  # None until the process has made the environment
        self._queue: deque[tuple[int, EnvEpisode]] = deque()
        self._current: tuple[int, EnvEpisode] | None = None
        self._finished: list[int] = []
        self._limit = self._deadline = 0.0
        self._num_kills = 0
        self._stepped: set[int] = set()  # keys of the episodes that the process has

    @property
    def connection(self) -> Connection[Any, Reply] | None:
        """The connection with a process that is at work."""
        return None if self._current is None or self._process is None else self._process.connection

    def start(self) -> ChildProcess:
        """Starts the process if necessary, and returns it."""
        if self._process is None or self._process.closed:
            self._process = ChildProcess("cory_env.text_envs.child", self._env, self._timeout)
            self._agents, self._stepped, self._finished = None, set(), []
        return self._process

    def agents(self) -> tuple[str, ...]:
        """Returns the environment's agents; starts the process if necessary."""
        process = self.start()
        if self._agents is None:
            reply = process.receive("took to load", max(self._timeout, _LOAD_SECONDS))
            if reply.error:
                self.close()
                reason = reply.error if reply.fatal else f"it {reply.error}"
                raise RewardError(f"The environment {self._env} cannot be used: {reason}")
            self._agents = tuple(reply.values)
            if self._expected and {*self._expected} != {*self._agents}:
                raise RewardError(
                    f"The roles are {', '.join(self._expected)}, but the agents of the environment {self._env} are "
                    f"{', '.join(self._agents)}. Name one role after each of them."
                )
        return self._agents

    def check(self, row: Mapping[str, object] | None) -> str:
        self.agents()
        process = self.start()
        process.send(Check(row))
        return process.receive("ran").error

    def submit(self, index: int, episode: EnvEpisode) -> None:
        self._queue.append((index, episode))
        self._start_next()

    def _start_next(self) -> None:
        if self._current is None and self._queue:
            self._current = self._queue.popleft()
            self._request(self._current[1])

    def _request(self, episode: EnvEpisode) -> None:
        self.agents()
        assert self._process is not None
        num_steps = 1 if episode.key in self._stepped else len(episode.actions) + 1
        self._limit = self._timeout * num_steps
        self._deadline = time.monotonic() + self._limit
        finished, self._finished = tuple(self._finished), []
        actions, is_cut = episode.actions, episode.is_cut
        self._process.send(Advance(episode.key, episode.seed, episode.row, actions, is_cut, finished))

    def collect(self) -> tuple[int, EnvEpisode, str] | None:
        """Returns an episode that has been advanced, with its number and the error, if it failed; None: not yet."""
        if self._current is None:
            return None
        assert self._process is not None
        reply = self._process.poll("ran", self._deadline, self._limit)
        if reply is None:
            return None
        if reply.killed and self._num_kills < MAX_ATTEMPTS - 1:
            self._num_kills += 1
            logger.warning("The environment %s %s; replaying its episodes.", self._env, reply.error)
            self._request(self._current[1])
            return None
        self._num_kills = 0
        index, episode = self._current
        error = reply.error or self._note(episode, reply)
        if episode.is_cut and not error:
            self._stepped.add(episode.key)
            self._request(episode)  # to let the environment end it
            return None
        self._current = None
        if error or episode.agent is None:
            self._finished.append(episode.key)
            self._stepped.discard(episode.key)
        else:
            self._stepped.add(episode.key)
        self._start_next()
        return index, episode, error

    def _note(self, episode: EnvEpisode, reply: Reply) -> str:
        """Notes the new state; returns what is wrong with it."""
        *replayed, state = reply.values
        if replayed and replayed != episode.states:
            return "took another course when it was replayed with the same seed and actions after its process had ended"
        if state.agent is not None and state.agent not in episode.chain.agents:
            return f"selected agent {state.agent!r}, which is not among its possible_agents"
        try:
            episode.note_state(state)
        except PromptError as error:
            return str(error).rstrip(".")
        except (ChatError, TextError) as error:
            return f"has no prompt: {str(error).rstrip('.')}"
        return ""

    def discard(self) -> None:
        if self._current is not None:
            self.close()  # its reply must not be taken for another one's
        self._queue.clear()
        self._current = None

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
