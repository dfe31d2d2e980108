"""State of one query in a chain: whose turn it is, the prompts, and the responses so far."""

import math
import operator
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from cory_env.chain import Chain
from cory_env.prompt_encoder import Prompt
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


class ChainEpisode:
    """One query in a chain. Lists have one entry per position so far.

    Attributes:
        query: The query.
        responses: Token ids of the responses, up to and including the token that ended the response.
        ended: Whether the response is complete; if not, it reached the maximum length.
        completions: The decoded responses, up to the stop string; with `thinking`, only the text after the thought.
        answer_starts: The index of the answer's first token in the response: 0 without a thought, None if the thought
            was cut off, so that there is no answer.
        feedback: The feedback known so far: a text, None if nothing is to be corrected, `SKIPPED`, or `NO_ANSWER`.
        prompts: The prompts, also the one of the agent whose turn it is once somebody asked for it.
    """

    def __init__(self, chain: Chain, query: Query) -> None:
        self.chain = chain
        self.query = query
        self.responses: list[list[int]] = []
        self.ended: list[bool] = []
        self.completions: list[str] = []
        self.answer_starts: list[int | None] = []
        self.feedback: list[Feedback] = []
        self.prompts: list[Prompt] = []

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
        if self.awaits_feedback:
            raise ValueError(
                f"{self.agent} can only respond after feedback on the response before. Call compute_awaited first."
            )
        if len(self.prompts) == position:
            encoder, template = self.chain.encoders[position], self.chain.positions[position].template
            self.prompts.append(encoder.build_prompt(self.query, self._earlier(position), template))
        return self.prompts[position]

    def prompt_ids(self) -> list[int]:
        """Returns the token ids of the current agent's prompt. Raises what `prompt` raises."""
        return self.prompt().tokens

    @property
    def awaits_feedback(self) -> bool:
        """Whether the current agent's turn or prompt depends on feedback that is not noted yet."""
        position = len(self.responses)
        if self.agent is None:
            return False
        num_shown = self.chain.positions[position].stage if self.chain.shows_feedback(position) else 0
        missing = range(len(self.feedback), position if self.chain.stops_when_solved else num_shown)
        return any(map(self.has_answer, missing))

    def has_answer(self, position: int) -> bool:
        """Returns whether a response is an answer to the query: not a critic's text, nor a thought that was cut off."""
        return self.chain.positions[position].role.produces_response and self.answer_starts[position] is not None

    def thought(self, position: int) -> str | None:
        """Returns the thought in a response, without its tags; None if there is none."""
        begins_thought = self.prompts[position].begins_thought
        return self.chain.encoders[position].thought_text(self.responses[position], begins_thought)

    def thought_entry(self, position: int) -> dict[str, str]:
        """Returns `{"reasoning": thought}` for a response with a thought, else an empty dictionary."""
        thought = self.thought(position)
        return {} if thought is None else {"reasoning": thought}

    def shown_tokens(self, position: int) -> list[int]:
        """Returns the tokens of a response that others see: those after the thought."""
        response, start = self.responses[position], self.answer_starts[position]
        return response[len(response) if start is None else start :]

    def full_text(self, position: int) -> str:
        """Returns the text of a response with the thought and its tags."""
        if self.answer_starts[position] == 0:
            return self.completions[position]
        return self.chain.encoders[position].decode(self.responses[position])

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

    def _earlier(self, position: int) -> list[SeenResponse]:
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
        prompt = self.prompts[position].tokens if position < len(self.prompts) else []
        tokens = np.full(self.chain.max_prompt_tokens, self.chain.encoders[position].pad_token_id, np.int32)
        tokens[: len(prompt)] = prompt
        return {"tokens": tokens, "length": len(prompt)}

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
        encoder = self.chain.encoders[len(self.responses)]
        response, ended = encoder.truncate_response(self._validate_action(agent, action, encoder.vocab_size))
        self.answer_starts.append(encoder.answer_start(response, prompt.begins_thought))
        self.responses.append(response)
        self.ended.append(ended)
        answer = self.shown_tokens(len(self.responses) - 1)
        self.completions.append(encoder.decode(answer) if answer else "")

    def answer_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Returns a response of the current agent with this answer: if the prompt begins a thought, it is empty."""
        tags = self.chain.encoders[len(self.responses)].tags
        return [tags.end_id, *tokens] if tags is not None and self.prompt().begins_thought else [*tokens]

    def _validate_action(self, agent: str, action: Action, vocab_size: int) -> list[int]:
        """Returns the first `length` tokens of a valid action."""
        limit = self.chain.response_limits[len(self.responses)]
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
