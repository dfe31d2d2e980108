"""`EnvEpisode`: an episode of an environment, with the conversation of each of its agents."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import cast

from cory_env.chain import Chain
from cory_env.episode import Action, Episode
from cory_env.message import Message
from cory_env.prompt_encoder import Prompt, PromptError
from cory_env.tasks.task import Query
from cory_env.text_envs.instance import State
from cory_env.text_envs.task import EnvTask
from cory_env.text_envs.tool_calls import find_format, read_message

_KEYS = count()


class EnvEpisode(Episode):
    """An episode of an environment: a turn is one response of the agent that the environment selects.

    Each agent has a conversation: an observation, its response, the next observation, and so on. Its earlier responses
    stay in its prompts as the tokens that it generated.

    Attributes:
        chain: The environment's agents by position, and their encoders; its task is an `EnvTask`.
        key: A number that no other episode of this process has.
        states: The initial state, and the one after each response.
        error: Why the episode failed, if failures are skipped; empty if it did not.
        actions: The actions so far, as the environment sees them, without thoughts: the responses as texts, or as
            messages if the agent has tools.
        is_truncated: Whether it was cut off: by the environment, at an agent's last turn (`max_turns`), or because a
            prompt became too long.
        is_cut: Whether the environment has still to be told that the episode is cut off.
    """

    def __init__(self, chain: Chain, query: Query) -> None:
        super().__init__(chain, query)
        assert isinstance(chain.task, EnvTask)
        self._max_agent_turns = chain.task.max_turns
        self.key = next(_KEYS)
        self.states: list[State] = []
        self.actions: tuple[str | Message, ...] = ()
        self.error = ""
        self.is_truncated = self.is_cut = False
        self._messages: dict[str, list[Message]] = {}
        self._last_turns: dict[str, int] = {}

    @property
    def seed(self) -> int:
        """The seed of the environment's instance."""
        seed = self.query.columns["seed"]
        assert isinstance(seed, int)
        return seed

    @property
    def row(self) -> Mapping[str, object] | None:
        """The row of data that the instance is made of; None without data."""
        return cast(Mapping[str, object] | None, self.query.columns.get("row"))

    @property
    def failed(self) -> bool:
        """See `Episode`."""
        return bool(self.error)

    @property
    def is_waiting(self) -> bool:
        """Whether the environment has to be reset, or to take an action."""
        return not self.failed and len(self.states) <= len(self.responses)

    @property
    def agent(self) -> str | None:
        """The agent whose turn it is; None at the end, and while the environment has not taken the last action."""
        return None if self.failed or self.is_waiting or self.is_truncated else self.states[-1].agent

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents that have responded, by turn."""
        agents = [state.agent for state in self.states[: len(self.responses)]]
        return tuple(agent for agent in agents if agent is not None)

    @property
    def max_turns(self) -> int:
        """See `Episode`."""
        return self._max_agent_turns * len(self.chain.agents)

    @property
    def next_turns(self) -> range:
        """The current turn."""
        return range(len(self.responses), len(self.responses) + 1)

    def position(self, turn: int) -> int:
        """Returns the index of the agent that responds in a turn among the environment's agents."""
        agent = self.states[turn].agent
        assert agent is not None
        return self.chain.agents.index(agent)

    def prompt(self) -> Prompt:
        """Returns the current agent's prompt."""
        return self.prompts[len(self.responses)]

    def respond(self, action: Action) -> None:
        """See `Episode`."""
        super().respond(action)
        turn = len(self.responses) - 1
        taken: str | Message = self.completions[turn]
        if tools := self.states[turn].tools:
            tokens = self.responses[turn], self.shown_tokens(turn)
            taken = read_message(self.encoder(turn), self.prompts[turn], *tokens, tools)
        self.actions = (*self.actions, taken)

    def note_state(self, state: State) -> None:
        """Notes the state after a reset or the last response, and builds the next prompt.

        If the episode is cut off (`is_cut`), the state after that only adds rewards to the last one.

        Raises:
            PromptError, ChatError, TextError: The first prompt of an agent cannot be built. Later ones that exceed
                `max_prompt_tokens` truncate the episode.
        """
        turn, agent = len(self.responses), state.agent
        if self.is_cut:
            self.is_cut = False
            self.states[-1] = _add_rewards(self.states[-1], state.rewards)
            return
        self.states.append(state)
        self.is_truncated = state.is_truncated and agent is None
        if agent is None:
            return
        if self.agents.count(agent) == self._max_agent_turns:
            self.is_truncated = self.is_cut = True
            return
        prompt = self._build_prompt(agent, state)
        if len(prompt.tokens) <= self.chain.max_prompt_tokens:
            self.prompts.append(prompt)
            self._last_turns[agent] = turn
        elif agent in self._last_turns:
            self.is_truncated = self.is_cut = True
        else:
            raise PromptError(
                f"begins with a prompt of {len(prompt.tokens)} tokens, but max_prompt_tokens is "
                f"{self.chain.max_prompt_tokens}"
            )

    def _build_prompt(self, agent: str, state: State) -> Prompt:
        encoder, last = self.chain.encoders[self.chain.agents.index(agent)], self._last_turns.get(agent)
        if state.tools:
            find_format(encoder)
        if last is None or state.replaces:
            self._messages[agent] = [*state.messages]
            return encoder.encode_messages(self._messages[agent], state.tools)
        messages, action = self._messages[agent], self.actions[last]
        messages.append(Message(role="assistant", content=self.full_text(last)) if isinstance(action, str) else action)
        before = self.prompts[last].tokens, self.responses[last]
        if "tool_calls" in messages[-1] and state.messages[0]["role"] == "tool":
            prompt = encoder.encode_tool_results(*before, state.messages)
        else:
            prompt = encoder.encode_continuation(messages, *before, state.messages, state.tools)
        messages += state.messages
        return prompt

    def observation_entry(self, turn: int) -> dict[str, str]:
        """See `Episode`."""
        return {"observation": "\n".join(message["content"] for message in self.states[turn].messages)}

    def step_rewards(self, turn: int, task_rewards: Sequence[float]) -> dict[str, float]:
        """Returns what the turn's agent gets until its next turn, plus `partner_reward` times what all others get."""
        _, partners = self.turn_rewards()[turn]
        return {self.agents[turn]: task_rewards[turn] + self.chain.partner_reward * partners}

    def returns(self) -> dict[str, float]:
        """Returns the sum of each agent's own rewards."""
        return {agent: sum(state.rewards.get(agent, 0.0) for state in self.states) for agent in self.chain.agents}

    def turn_rewards(self) -> list[tuple[float, float]]:
        """Returns, for each turn, what its agent got until its next turn, and the sum of what all others got."""
        agents, following = self.agents, dict[str, int]()
        rewards: list[tuple[float, float]] = []
        for turn in reversed(range(len(agents))):
            agent = agents[turn]
            window: Sequence[State] = self.states[turn + 1 : following.get(agent, len(self.states)) + 1]
            own = sum(state.rewards.get(agent, 0.0) for state in window)
            rewards.append((own, sum(sum(state.rewards.values()) for state in window) - own))
            following[agent] = turn
        return rewards[::-1]


def _add_rewards(state: State, rewards: Mapping[str, float]) -> State:
    agents = {**state.rewards, **rewards}
    return state._replace(rewards={agent: state.rewards.get(agent, 0.0) + rewards.get(agent, 0.0) for agent in agents})
