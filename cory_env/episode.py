"""One query on its way through a chain: whose turn it is, what that agent sees, what was answered."""

import math
import operator
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from cory_env.chain import Chain
from cory_env.tasks.task import Query


class Observation(TypedDict):
    """What an agent sees, its prompt: `tokens` int32 [max_prompt_tokens], of which the first `length` are real."""

    tokens: NDArray[np.int32]
    length: int


class Action(TypedDict):
    """A whole response: `tokens` int [at most max_response_tokens], of which the first `length` are real."""

    tokens: NDArray[np.integer] | Sequence[int]
    length: int | np.integer


class ChainEpisode:
    """One query on its way through a chain.

    Attributes:
        query: The query.
        responses: Per role so far, the tokens as kept: up to `length` and to what ends a response, included; none is
            invented.
        ended: Per role so far, whether the response ends by itself; else its length was cut.
        completions: Per role so far, the decoded response, up to the stop text.
        task_rewards: Per role that has a reward so far, its task reward; None where the reward was skipped.
        truncated: Per prompt so far, whether its reference was cut.
    """

    def __init__(self, chain: Chain, query: Query) -> None:
        self.chain = chain
        self.query = query
        self.responses: list[list[int]] = []
        self.ended: list[bool] = []
        self.completions: list[str] = []
        self.task_rewards: list[float | None] = []
        self.truncated: list[bool] = []
        self._prompts: list[list[int]] = []

    def fork(self) -> "ChainEpisode":
        """Returns an episode that is as this one is so far, and goes on by itself."""
        other = ChainEpisode(self.chain, self.query)
        for name in ("responses", "ended", "completions", "task_rewards", "truncated", "_prompts"):
            setattr(other, name, list(getattr(self, name)))
        return other

    @property
    def role(self) -> str | None:
        """Whose turn it is; None when all have answered."""
        position = len(self.responses)
        return self.chain.roles[position] if position < len(self.chain.roles) else None

    def prompt_ids(self) -> list[int]:
        """Returns the tokens of the current role's prompt, 1 to `max_prompt_tokens` of them.

        Raises:
            QueryTooLong: The prompt does not fit even without any reference.
            ValueError: All agents have answered, or the prompt holds the best response, but not all have a reward.
        """
        position = len(self.responses)
        if self.role is None:
            raise ValueError("All agents of this episode have answered, so there is no prompt. Start a new episode.")
        if len(self._prompts) == position:
            seen, at = self._observed(), self.chain.at
            prompt, truncated = at[position].build_prompt(
                self.query, [self.responses[k] for k in seen], [at[k] for k in seen]
            )
            self._prompts.append(prompt)
            self.truncated.append(truncated)
        return self._prompts[position]

    @property
    def awaits_rewards(self) -> bool:
        """Whether the current role's prompt depends on task rewards that are not noted yet (`observed` is `best`)."""
        chooses = self.chain.observed == "best" and self.chain.knowledge_transfer and self.role is not None
        return chooses and len(self.responses) > max(len(self.task_rewards), 1)  # of one, no best need be found

    def note_rewards(self, task_rewards: Sequence[float | None]) -> None:
        """Notes the task rewards of the responses that had none, in the chain's order.

        Raises:
            ValueError: There is not one for each such response.
        """
        waiting = len(self.responses) - len(self.task_rewards)
        if len(task_rewards) != waiting:
            raise ValueError(f"{waiting} responses have no task reward yet, but {len(task_rewards)} rewards came.")
        self.task_rewards += task_rewards

    def _observed(self) -> list[int]:
        """Returns the positions of the earlier responses that the current role sees."""
        if self.chain.observed == "all" or not self.responses:
            return list(range(len(self.responses)))
        if self.chain.observed == "last":
            return [len(self.responses) - 1]
        if self.awaits_rewards:
            raise ValueError(
                f"{self.role} sees the best of {len(self.responses)} responses, but only {len(self.task_rewards)} are "
                "rewarded. Call reward_so_far first."
            )
        rewards = [-math.inf if reward is None else reward for reward in self.task_rewards] or [0.0]
        return [rewards.index(max(rewards))]

    def observation(self, role: str | None = None) -> Observation:
        """Returns what `role` sees: its prompt, or nothing (length 0) where its turn has not come. Default: whose turn
        it is.

        Raises:
            ValueError: There is no such role, or no role is given and all have answered.
        """
        role = self.role if role is None else role
        if role is None or role not in self.chain.roles:
            raise ValueError(f"There is no observation for {role!r}. Ask for one of: {', '.join(self.chain.roles)}.")
        position = self.chain.roles.index(role)
        if position == len(self.responses):
            self.prompt_ids()
        prompt = self._prompts[position] if position < len(self._prompts) else []
        tokens = np.full(self.chain.max_prompt_tokens, self.chain.at[position].pad_token_id, np.int32)
        tokens[: len(prompt)] = prompt
        return {"tokens": tokens, "length": len(prompt)}

    def respond(self, action: Action) -> None:
        """Takes the current role's response and passes the turn on; tokens past `length` or its end are ignored.

        Raises:
            ValueError: All agents have answered, or the action is not a response; says what came and what was expected.
        """
        role = self.role
        if role is None:
            raise ValueError(
                "All agents of this episode have answered, so it takes no more actions. Start a new episode."
            )
        self.prompt_ids()  # an agent answers its prompt, looked at or not
        chain = self.chain.at[len(self.responses)]
        response, ended = chain.cut(self._checked(role, action, chain.vocab_size))
        self.responses.append(response)
        self.ended.append(ended)
        self.completions.append(chain.decode(response))

    def _checked(self, role: str, action: Action, vocab: int) -> list[int]:
        """Returns the first `length` tokens of an action that is one."""
        limit = self.chain.max_response_tokens
        try:
            tokens, length = np.asarray(action["tokens"]), operator.index(action["length"])
        except (TypeError, LookupError, ValueError):
            tokens, length = np.empty(0), 0
        fits = tokens.ndim == 1 and 1 <= length <= len(tokens) <= limit
        ids: NDArray[Any] = tokens[:length] if fits else np.empty(0)
        if not len(ids) or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= vocab:
            raise ValueError(
                f"{role}: expected an action {{'tokens': 1 to {limit} ids from 0 to {vocab - 1}, 'length': how many of "
                f"them count}}, but {action!r} came."
            )
        response: list[int] = ids.tolist()
        return response

    def collective_rewards(self, task_rewards: Sequence[float]) -> dict[str, float]:
        """Returns what each agent trains on, r_i + α · Σ_{j≠i} r_j (paper §2, collective reward; α is
        `partner_reward`).

        The sum is rounded once, so with α = 1 all agents receive exactly the same number.

        Args:
            task_rewards: r_i of each role, in the chain's order.

        Raises:
            ValueError: There is not one reward per role.
        """
        roles = self.chain.roles
        if len(task_rewards) != len(roles):
            raise ValueError(
                f"Expected {len(roles)} task rewards, one for each of {', '.join(roles)}, but {len(task_rewards)} came."
            )
        shares = [self.chain.partner_reward * reward for reward in task_rewards]
        return {role: math.fsum([task_rewards[i], *shares[:i], *shares[i + 1 :]]) for i, role in enumerate(roles)}
