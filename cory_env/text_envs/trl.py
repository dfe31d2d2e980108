"""TRL's environment classes (`environment_factory`) as environments.

    env: trl:my_envs:Calculator
    env: trl:my_envs:Calculator?agents=solver,checker      several agents, which share the instance
    env: trl:my_envs:FACTORIES                             a dictionary; the column `environment` of a row chooses

The interface is that of TRL 1.16: `reset(**row)` returns None or a text, which is appended to the last user message;
`get_reward()` scores the end; all other public methods of the class are tools. An agent's turns end with a response
without a call. Then it is the next agent's turn, which sees the answers before.
"""

import asyncio
import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, SupportsFloat

from cory_env.functions import TRL_FACTORY, load_function
from cory_env.message import Message, escape_surrogates
from cory_env.text_envs.base import TurnBasedEnv
from cory_env.text_envs.instance import EnvError
from cory_env.text_envs.own_random import OwnRandom

ENVIRONMENT_COLUMN = "environment"
"""Column that names the factory of a row's environment, if there are several."""
_RESET, _GET_REWARD = "reset", "get_reward"
_PROMPT = "prompt"
"""The argument of `reset` with the query as messages."""


class trl_env(TurnBasedEnv):
    """An instance of a TRL environment, made once and reset for each episode.

    Random choices that it draws from Python's or NumPy's global generators depend on the episode's seed alone.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "trl_v0", "is_parallelizable": False}

    def __init__(self, factory: str, agents: str = "agent", **settings: str) -> None:
        """Makes the instance.

        Args:
            factory: `module:name` of a class or function without required arguments, or of a dictionary of them.
            agents: Names of the agents, in the order of their turns, joined by commas.
            settings: Arguments of the factory.

        Raises:
            SpecError: There is no such factory.
            EnvError: An instance has no `reset` or no `get_reward`, or a tool cannot be described.
        """
        super().__init__(*agents.split(","))
        make = load_function(factory, TRL_FACTORY)
        self._random = OwnRandom(0)
        with self._random.active():
            product = make(**settings)
            self._is_single = not isinstance(product, Mapping)
            if not self._is_single and settings:
                raise EnvError(f"is a dictionary, which has no setting {next(iter(settings))!r}")
            instances = {"": product} if self._is_single else {name: make_one() for name, make_one in product.items()}
        self._environments = {name: _Tools(instance) for name, instance in instances.items()}

    def start(self, seed: int) -> None:
        """Resets the instance with the row's columns."""
        row = dict(self.row or {})
        query = row.pop("query", "")
        if _PROMPT in row:
            raise EnvError("got data with a column prompt beside the query's. Add ?query_column=prompt, or rename it")
        prompt = query if isinstance(query, list) else [Message(role="user", content=query)]
        name = "" if self._is_single else row.pop(ENVIRONMENT_COLUMN, None)
        if name not in self._environments:
            raise EnvError(
                f"has no factory {name!r} for a row's column {ENVIRONMENT_COLUMN!r}. Factories: "
                f"{', '.join(self._environments)}"
            )
        self._environment = self._environments[name]
        self._random = OwnRandom(seed)
        text = self._call(self._environment.instance.reset, **{_PROMPT: prompt}, **row)
        if not isinstance(text, str | None):
            raise EnvError(f"returned {text!r:.80} from reset instead of None or a text")
        self._prompt = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + (text or "")}]
        self._results: dict[str, list[Message]] = {}
        self._answers: dict[str, str] = {}
        for info in self.infos.values():
            info["tools"] = self._environment.schemas

    def observe(self, agent: str) -> list[Message]:
        """Returns the results of the agent's last calls; before, the prompt with the answers of the agents before."""
        if agent in self._results:
            return self._results[agent]
        answers = "".join(f"\n\nAnswer of the {name}:\n{answer}" for name, answer in self._answers.items())
        return [*self._prompt[:-1], {**self._prompt[-1], "content": self._prompt[-1]["content"] + answers}]

    def act(self, agent: str, text: str | Message) -> Mapping[str, float]:
        """Runs the calls of a message; without calls, ends the agent's turns, and after the last agent the episode."""
        message = Message(role="assistant", content=text) if isinstance(text, str) else text
        if calls := message.get("tool_calls"):
            self._results[agent] = self._run(calls)
            self.agent_selection = agent
            return {}
        self._answers[agent] = message["content"]
        self.is_over = len(self._answers) == len(self.possible_agents)
        return self.truncate() if self.is_over else {}

    def truncate(self) -> Mapping[str, float]:
        """Returns the reward at the end, also of an episode that is cut off: the same for all agents."""
        reward = self._call(self._environment.instance.get_reward)
        if not isinstance(reward, SupportsFloat):
            raise EnvError(f"returned {reward!r:.80} from get_reward instead of a number")
        return dict.fromkeys(self.possible_agents, float(reward))

    def _call(self, function: Any, **keywords: Any) -> Any:
        with self._random.active():
            value = function(**keywords)
            return _event_loop().run(_awaited(value)) if inspect.isawaitable(value) else value

    def _run(self, calls: list[dict[str, Any]]) -> list[Message]:
        """Returns a message per call. What a call raises is its result, as in TRL."""
        with self._random.active():
            values = [self._environment.call(**call["function"]) for call in calls]
            if any(map(inspect.isawaitable, values)):
                values = _event_loop().run(_all_awaited(values))
        return [
            Message(
                role="tool",
                name=call["function"]["name"],
                content=escape_surrogates(str({"error": str(value)} if isinstance(value, Exception) else value)),
                tool_call_id=call["id"],
            )
            for call, value in zip(calls, values, strict=True)
        ]


class _Tools:
    """An instance and its tools: all public methods of its class except `reset` and `get_reward`."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance
        kind = type(instance)
        names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
        for name in (_RESET, _GET_REWARD):
            if name not in names:
                reward = ", which gives the reward: rewards outside the class are not supported"
                raise EnvError(
                    f"makes {kind.__name__}, a class without the method {name}{reward if name == _GET_REWARD else ''}. "
                    "Define it"
                )
        self._tools = {name: getattr(instance, name) for name in names if name not in (_RESET, _GET_REWARD)}
        self.schemas = []
        for name, tool in self._tools.items():
            from transformers.utils import get_json_schema  # takes seconds

            try:
                self.schemas.append(get_json_schema(tool))
            except Exception as error:
                raise EnvError(
                    f"has the tool {kind.__name__}.{name}, which needs type hints and a docstring that describes each "
                    f"argument: {error}"
                ) from error

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Returns what a tool returns, or the exception that it raises."""
        try:
            if name not in self._tools:
                raise ValueError(f"Tool {name} not found.")
            return self._tools[name](**arguments)
        except Exception as error:
            return error


@cache
def _event_loop() -> asyncio.Runner:
    """The one of this process, as instances may keep connections that belong to it."""
    return asyncio.Runner()


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def _all_awaited(values: list[Any]) -> list[Any]:
    """Awaits values at the same time; what one raises takes its place."""
    return await asyncio.gather(*map(_awaited, values), return_exceptions=True)
