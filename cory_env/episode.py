"""State of an episode: whose turn it is, the prompts, and the responses so far."""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from cory_env.chain import Chain
from cory_env.prompt_encoder import Prompt, PromptEncoder
from cory_env.tasks.task import Query
from cory_env.tasks.turns import NO_ANSWER, SKIPPED, Feedback, NoFeedback, SeenResponse


class Observation(TypedDict):
    """An agent's prompt: `tokens` int32 [max_prompt_tokens]; the first `length` are valid, the rest is padding."""

    tokens: NDArray[np.int32]
    length: int


class Action(TypedDict):
    """A whole response: `tokens` int [at most max_response_tokens]; only the first `length` count."""

    tokens: NDArray[np.integer] | Sequence[int]
    length: int | np.integer


class Episode(ABC):
    """An episode in which agents respond in turn. Lists have one entry per response so far.

    Subclasses decide whose turn it is, and build the prompts.

    Attributes:
        chain: The agents and their encoders, by position.
        query: The query.
        responses: Token ids of the responses, up to and including the token that ended the response.
        ended: Whether the response is complete; if not, it reached the maximum length.
        completions: The decoded responses, up to the stop string; with `thinking`, only the text after the thought.
        answer_starts: The index of the answer's first token in the response: 0 without a thought, None if the thought
            was cut off, so that there is no answer.
        prompts: The prompts, also the one of the agent whose turn it is once somebody asked for it.
    """

    def __init__(self, chain: Chain, query: Query) -> None:
        self.chain = chain
        self.query = query
        self.responses: list[list[int]] = []
        self.ended: list[bool] = []
        self.completions: list[str] = []
        self.answer_starts: list[int | None] = []
        self.prompts: list[Prompt] = []

    @property
    @abstractmethod
    def agent(self) -> str | None:
        """The agent whose turn it is; None if there is none."""

    @property
    @abstractmethod
    def agents(self) -> Sequence[str]:
        """The agents that have responded, by turn."""

    @property
    @abstractmethod
    def is_waiting(self) -> bool:
        """Whether the episode waits for something other than a response before it continues."""

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether the episode cannot be used, because a user's code failed and such failures are skipped."""

    @property
    @abstractmethod
    def max_turns(self) -> int:
        """The maximum number of turns of all agents together."""

    @property
    @abstractmethod
    def next_turns(self) -> range:
        """The turns whose responses can be generated now, all to the current agent's prompt."""

    @abstractmethod
    def position(self, turn: int) -> int:
        """Returns the position in the chain of the agent that responds in a turn."""

    @abstractmethod
    def prompt(self) -> Prompt:
        """Returns the current agent's prompt."""

    def prompt_ids(self) -> list[int]:
        """Returns the token ids of the current agent's prompt. Raises what `prompt` raises."""
        return self.prompt().tokens

    def prompt_array(self, turn: int) -> Observation:
        """Returns the prompt of a turn, padded to `max_prompt_tokens`."""
        return self._padded(self.prompts[turn].tokens, self.position(turn))

    def _padded(self, prompt: Sequence[int], position: int) -> Observation:
        tokens = np.full(self.chain.max_prompt_tokens, self.chain.encoders[position].pad_token_id, np.int32)
        tokens[: len(prompt)] = prompt
        return {"tokens": tokens, "length": len(prompt)}

    @abstractmethod
    def step_rewards(self, turn: int, task_rewards: Sequence[float]) -> Mapping[str, float]:
        """Returns what agents get at a turn of the finished episode, by agent.

        Args:
            task_rewards: Of all turns.
        """

    def observation_entry(self, turn: int) -> dict[str, str]:
        """Returns `{"observation": text}` for a response to what an environment shows, else an empty dictionary."""
        return {}

    def encoder(self, turn: int) -> PromptEncoder:
        """Returns the encoder of the agent that responds in a turn."""
        return self.chain.encoders[self.position(turn)]

    def thought(self, turn: int) -> str | None:
        """Returns the thought in a response, without its tags; None if there is none."""
        begins_thought = self.prompts[turn].begins_thought
        return self.encoder(turn).thought_text(self.responses[turn], begins_thought)

    def thought_entry(self, turn: int) -> dict[str, str]:
        """Returns `{"reasoning": thought}` for a response with a thought, else an empty dictionary."""
        thought = self.thought(turn)
        return {} if thought is None else {"reasoning": thought}

    def shown_tokens(self, turn: int) -> list[int]:
        """Returns the tokens of a response that others see: those after the thought."""
        response, start = self.responses[turn], self.answer_starts[turn]
        return response[len(response) if start is None else start :]

    def feedback_entry(self, turn: int) -> dict[str, str | None]:
        """Returns `{"feedback": text or None}` for a response with feedback, else an empty dictionary."""
        return {}

    def full_text(self, turn: int) -> str:
        """Returns the text of a response with the thought and its tags."""
        if self.answer_starts[turn] == 0:
            return self.completions[turn]
        return self.encoder(turn).decode(self.responses[turn])

    def respond(self, action: Action) -> None:
        """Takes the current agent's response and advances the turn. Tokens after `length` or an end token are ignored.

        Raises:
            ValueError: All agents have responded, or the action is not a valid response.
        """
        agent = self.agent
        if agent is None:
            raise ValueError(
                "All agents of this episode have responded, so it takes no more actions. Start a new episode."
            )
        prompt = self.prompt()  # even if nobody asked for it
        encoder = self.encoder(len(self.responses))
        response, ended = encoder.truncate_response(self._validate_action(agent, action, encoder.vocab_size))
        self.answer_starts.append(encoder.answer_start(response, prompt.begins_thought))
        self.responses.append(response)
        self.ended.append(ended)
        answer = self.shown_tokens(len(self.responses) - 1)
        self.completions.append(encoder.decode(answer) if answer else "")

    def answer_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Returns a response of the current agent with this answer: if the prompt begins a thought, it is empty."""
        tags = self.encoder(len(self.responses)).tags
        return [tags.end_id, *tokens] if tags is not None and self.prompt().begins_thought else [*tokens]

    def _validate_action(self, agent: str, action: Action, vocab_size: int) -> list[int]:
        """Returns the first `length` tokens of a valid action."""
        limit = self.chain.response_limits[self.position(len(self.responses))]
        try:
            tokens, length = np.asarray(action["tokens"]), operator.index(action["length"])
        except (TypeError, LookupError, ValueError):
            tokens, length = np.empty(0), 0
        fits = tokens.ndim == 1 and 1 <= length <= len(tokens) <= limit
        ids: NDArray[Any] = tokens[:length] if fits else np.empty(0)
        if not len(ids) or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(
                f"{agent}: invalid action {action!r}. Expected {{'tokens': 1 to {limit} ids from 0 to "
                f"{vocab_size - 1}, 'length': number of tokens that count}}."
            )
        response: list[int] = ids.tolist()
        return response


class ChainEpisode(Episode):
    """One query in a chain: each agent responds once, so a turn is a position.

    Attributes:
        feedback: The feedback known so far: a text, None if nothing is to be corrected, `SKIPPED`, or `NO_ANSWER`.
    """

    def __init__(self, chain: Chain, query: Query) -> None:
        super().__init__(chain, query)
        self.feedback: list[Feedback] = []

    @property
    def agent(self) -> str | None:
        """The agent whose turn it is; None when all have responded, or the chain has stopped.

        A chain stops if the feedback on its last response is None and its `stop_when` is `solved`, or if the feedback
        function failed and its error is skipped.
        """
        position = len(self.responses)
        if position == len(self.chain.agents) or self.failed:
            return None
        solved = 0 < position == len(self.feedback) and self.feedback[-1] is None
        return None if solved and self.chain.stops_when_solved else self.chain.agents[position]

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents that have responded, in the chain's order."""
        return self.chain.agents[: len(self.responses)]

    @property
    def failed(self) -> bool:
        """Whether the feedback function failed on a response (with `on_error="skip"`)."""
        return SKIPPED in self.feedback

    def prompt(self) -> Prompt:
        """Returns the current agent's prompt.

        Raises:
            QueryTooLongError: The prompt does not fit even without any reference.
            ValueError: All agents have responded, or the prompt requires feedback that is not noted yet.
        """
        position = len(self.responses)
        if self.agent is None:
            raise ValueError("All agents of this episode have responded, so there is no prompt. Start a new episode.")
        if self.is_waiting:
            raise ValueError(
                f"{self.agent} can only respond after feedback on the response before. Call compute_awaited first."
            )
        if len(self.prompts) == position:
            encoder, template = self.chain.encoders[position], self.chain.positions[position].template
            self.prompts.append(encoder.build_prompt(self.query, self._earlier(position), template))
        return self.prompts[position]

    @property
    def is_waiting(self) -> bool:
        """Whether the current agent's turn or prompt depends on feedback that is not noted yet."""
        position = len(self.responses)
        if self.agent is None:
            return False
        num_shown = self.chain.positions[position].stage if self.chain.shows_feedback(position) else 0
        missing = range(len(self.feedback), position if self.chain.stops_when_solved else num_shown)
        return any(map(self.has_answer, missing))

    @property
    def max_turns(self) -> int:
        """The number of positions."""
        return len(self.chain.positions)

    @property
    def next_turns(self) -> range:
        """The turns whose responses can be generated now: the current one, and the drafts beside it.

        Drafts do not see each other, so they have the same prompt, unless the chain may stop between them.
        """
        first = len(self.responses)
        positions = self.chain.positions[first:]
        drafts = [position for position in positions if position.stage == positions[0].stage]
        return range(first, first + (1 if self.chain.stops_when_solved else len(drafts)))

    def position(self, turn: int) -> int:
        """Returns the position of the agent that responds in a turn: the turn itself."""
        return turn

    def has_answer(self, position: int) -> bool:
        """Returns whether a response is an answer to the query: not a critic's text, nor a thought that was cut off."""
        return self.chain.positions[position].role.produces_response and self.answer_starts[position] is not None

    def feedback_entry(self, position: int) -> dict[str, str | None]:
        """Returns `{"feedback": text or None}` for a response with feedback, else an empty dictionary."""
        feedback = self.feedback[position] if position < len(self.feedback) else NO_ANSWER
        return {} if isinstance(feedback, NoFeedback) else {"feedback": feedback}

    def note_feedback(self, feedback: Sequence[Feedback]) -> None:
        """Notes the feedback on the responses that had none, in the chain's order.

        Raises:
            ValueError: The number of texts differs from the number of such responses.
        """
        num_missing = len(self.responses) - len(self.feedback)
        if len(feedback) != num_missing:
            raise ValueError(f"note_feedback() got feedback on {len(feedback)} responses, but expects {num_missing}.")
        self.feedback += feedback

    def _earlier(self, position: int) -> Sequence[SeenResponse]:
        """Returns the responses that the agent at a position sees."""
        return [
            SeenResponse.decoded(
                self.chain.encoders[shown.position].decode,
                self.shown_tokens(shown.position),
                self._shown_feedback(shown.position) if self.chain.shows_feedback(position) else None,
                shown.role,
                shown.is_reference,
                self.chain.positions[shown.position].role.produces_response,
            )
            for shown in self.chain.positions[position].shown_responses
        ]

    def _shown_feedback(self, position: int) -> str | None:
        """Returns the text that later agents see as feedback on a response; None if its role never gets any."""
        feedback = self.feedback_entry(position).get("feedback", NO_ANSWER)
        if feedback is None:
            return self.chain.task.solved_feedback
        if isinstance(feedback, str):
            return feedback
        return "" if self.chain.positions[position].role.produces_response else None  # "": its thought was cut off

    def observation(self, agent: str | None = None) -> Observation:
        """Returns an agent's observation: its prompt, or an empty one (length 0) before its turn.

        Args:
            agent: By default the one whose turn it is.

        Raises:
            ValueError: The agent is unknown, or None although all have responded.
        """
        agent = self.agent if agent is None else agent
        if agent is None or agent not in self.chain.agents:
            raise ValueError(f"There is no observation for agent {agent!r}. Agents: {', '.join(self.chain.agents)}.")
        position = self.chain.agents.index(agent)
        if agent == self.agent:
            self.prompt()
        return self._padded(self.prompts[position].tokens if position < len(self.prompts) else [], position)

    def step_rewards(self, turn: int, task_rewards: Sequence[float]) -> dict[str, float]:
        """Returns the collective rewards of all agents at the last turn, before it none."""
        return self.collective_rewards(task_rewards) if turn == len(self.responses) - 1 else {}

    def collective_rewards(self, task_rewards: Sequence[float]) -> dict[str, float]:
        """Returns each agent's collective reward, r_i + α · Σ_{j≠i} r_j (paper §2; α is `partner_reward`).

        An agent without a reward has r_i = NaN, which does not count. The other drafts of agent i's role do not count
        either.

        The sum is rounded once, so with α = 1 and no drafts all agents receive exactly the same number.

        Args:
            task_rewards: r_i of each agent that has responded, in the chain's order.

        Raises:
            ValueError: The number of rewards differs from the number of responses.
        """
        agents = self.agents
        if len(task_rewards) != len(agents):
            raise ValueError(
                f"Expected {len(agents)} task rewards, one per agent ({', '.join(agents)}), but got "
                f"{len(task_rewards)}."
            )
        own = [0.0 if math.isnan(reward) else reward for reward in task_rewards]
        stages = [position.stage for position in self.chain.positions]
        shares = [(stage, self.chain.partner_reward * reward) for stage, reward in zip(stages, own, strict=False)]
        return {
            agent: math.fsum([own[i], *(share for stage, share in shares if stage != stages[i])])
            for i, agent in enumerate(agents)
        }
