"""One instance of a user's environment: checks what it returns, and steps agents that are done."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat

from cory_env.message import SURROGATE_PROBLEM, Message, has_surrogate
from cory_env.rewarding.child import MAX_REWARD, TOO_LARGE


class EnvError(ValueError):
    """An environment breaks the contract; the message is the predicate of a sentence."""


class State(NamedTuple):
    """What follows from a reset or an action.

    Attributes:
        agent: The agent whose turn it is; None: the episode has ended.
        messages: What is new for that agent since its last turn.
        replaces: Whether `messages` are its whole conversation instead.
        rewards: The rewards that agents got, by agent.
        is_truncated: Whether an agent was cut off (`truncations`).
        tools: The tools that the agent may call, as JSON schemas.
    """

    agent: str | None
    messages: tuple[Message, ...] = ()
    replaces: bool = False
    rewards: Mapping[str, float] = {}
    is_truncated: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()


class Instance:
    """An instance of an AEC environment. It may be reset again and again."""

    def __init__(self, env: Any) -> None:
        """Checks that `env` has agents.

        Raises:
            EnvError: It is no AEC environment, or names no agents.
        """
        names = getattr(env, "possible_agents", None)
        if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
            raise EnvError(
                f"returned {env!r:.80} ({type(env).__name__}), not a PettingZoo AEC environment whose possible_agents "
                "is a list of names"
            )
        self.env = env
        self.possible_agents = tuple(names)

    def reset(self, seed: int, row: Mapping[str, object] | None = None) -> State:
        """Starts the episode of a seed, and of a row of data if there are any."""
        self.env.reset(seed=seed, **({} if row is None else {"options": {"row": row}}))
        return self._state({})

    def step(self, action: str | Message) -> State:
        """Takes the response of the agent whose turn it is: a text, or a message if the agent has tools."""
        self.env.step(action)
        return self._state(_numbers(self.env.rewards))

    def truncate(self) -> State:
        """Ends an episode that is cut off, with the rewards that the environment's `truncate` returns, if it has it."""
        truncate = getattr(self.env, "truncate", None)
        return State(None, rewards=_numbers(truncate()) if callable(truncate) else {}, is_truncated=True)

    def _state(self, rewards: Mapping[str, float]) -> State:
        """Removes agents that are done, and returns the state of the next one."""
        is_truncated = False
        for _ in range(len(self.possible_agents) + 1):
            if not self.env.agents:
                return State(None, rewards=rewards, is_truncated=is_truncated)
            agent = self.env.agent_selection
            if agent not in self.env.agents:
                raise EnvError(f"selected agent {agent!r}, which is not among its agents {self.env.agents}")
            if not (self.env.terminations[agent] or self.env.truncations[agent]):
                messages, replaces = _read(self.env.observe(agent))
                tools = _read_tools(getattr(self.env, "infos", {}).get(agent))
                return State(agent, messages, replaces, rewards, is_truncated, tools)
            is_truncated = is_truncated or bool(self.env.truncations[agent])
            self.env.step(None)
        raise EnvError(f"selects agent {agent!r} again, although it is done and was stepped with None")


def _read(observation: object) -> tuple[tuple[Message, ...], bool]:
    """Returns an observation as messages, and whether they are the whole conversation."""
    if isinstance(observation, Mapping) and observation.keys() == {"text"}:  # of `text_env`
        observation = observation["text"]
    values: Any = observation
    if replaces := isinstance(observation, Mapping) and observation.keys() == {"messages"}:
        values = observation["messages"]
    if isinstance(values, str):
        values = [{"role": "user", "content": values}]
    is_conversation = isinstance(values, list | tuple) and all(
        isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
        for value in values
    )
    if not is_conversation or not values:
        raise EnvError(
            f"returned the observation {observation!r:.80} ({type(observation).__name__}) instead of a text or a list "
            "of messages with role and content"
        )
    if has_surrogate(values):
        raise EnvError(f"returned an observation that {SURROGATE_PROBLEM}: {observation!r:.80}")
    if values[-1]["role"] == "assistant":
        raise EnvError("returned a conversation whose last message is the assistant's")
    return tuple(_message(value) for value in values), replaces


def _message(value: Mapping[str, Any]) -> Message:
    message = Message(role=value["role"], content=value["content"])
    for key in ("name", "tool_call_id"):
        if isinstance(value.get(key), str):
            message[key] = value[key]
    return message


def _read_tools(info: object) -> tuple[Mapping[str, Any], ...]:
    tools: Any = info.get("tools") if isinstance(info, Mapping) else None
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or not all(map(_is_schema, tools)):
        raise EnvError(
            f"returned infos with the tools {tools!r:.80} instead of a list of JSON schemas, such as "
            '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
        )
    return tuple(tools)


def _is_schema(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _numbers(rewards: object) -> dict[str, float]:
    if not isinstance(rewards, Mapping):
        raise EnvError(f"returned the rewards {rewards!r:.80} instead of a number for each agent")
    return {agent: _number(agent, reward) for agent, reward in rewards.items()}


def _number(agent: str, reward: object) -> float:
    number = float(reward) if isinstance(reward, SupportsFloat) else math.nan
    if not math.isfinite(number):
        raise EnvError(f"gave {agent} the reward {reward!r:.80} instead of a finite number")
    if abs(number) > MAX_REWARD:
        raise EnvError(f"gave {agent} the reward {reward!r:.80}, {TOO_LARGE}")
    return number
