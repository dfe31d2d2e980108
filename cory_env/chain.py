"""The chain: one query answered by several agents, one after another (paper §2).

    chain = Chain(task, tokenizer, num_agents=2)
    episode = ChainEpisode(chain, task.train[0])
    while episode.agent is not None:                    # "pioneer", then "observer"
        tokens = generate(episode.prompt_ids())
        episode.respond({"tokens": tokens, "length": len(tokens)})
    rewards = episode.collective_rewards(task_rewards)  # {"pioneer": ..., "observer": ...}

Both the PettingZoo environment and the batched runner are thin wrappers around this episode logic. Responses are stored
as the generated tokens: they are decoded for the reward and for the next agent's prompt, but never tokenized again.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from gymnasium import spaces

from cory_env.chain_settings import ChainSettings, complete_template
from cory_env.prompt_encoder import PromptEncoder
from cory_env.tasks.task import FEEDBACK_PLACEHOLDER, Task, placeholders, references

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Chain:
    """Everything that episodes share: task, positions, limits and spaces. Has no episode state.

    Attributes:
        positions: The positions, with the roles that the agents have there.
        agents: The names of the agents, by position.
        encoders: By position, the encoder of the agent's prompts. Agents with different tokenizers exchange text.
        response_limits: By position, the maximum length of the response in tokens.
    """

    def __init__(self, task: Task, tokenizer: "PreTrainedTokenizerBase | None", **settings: Any) -> None:
        """Makes a chain of agents with one tokenizer.

        Args:
            task: Queries and prompts.
            tokenizer: The tokenizer of the model that responds. None: there are no encoders, as for `TextEpisode`.
            **settings: The fields of `ChainSettings`.

        Raises:
            ValueError: A setting is out of range, or no token can end a response.
            ChatError: The chat template is missing or unsuitable, or a query is a conversation and `chat` is off.
            ThinkingError: A tag of `thinking` is not a token of the model.
        """
        s = ChainSettings(**settings)
        if s.stop_when and task.feedback is None:
            raise ValueError(f"stop_when={s.stop_when} requires feedback, but task {task.name} has none.")
        self.task = task
        self.positions = s.make_positions()
        self.agents = tuple(position.agent for position in self.positions)
        self.encoders = () if tokenizer is None else (PromptEncoder(task, tokenizer, s),) * len(self.positions)
        self.knowledge_transfer = s.knowledge_transfer
        self.partner_reward = s.partner_reward
        self.stops_when_solved = s.stop_when == "solved"
        self.thinking = s.thinking
        self.max_prompt_tokens = s.max_prompt_tokens
        self.response_limits = tuple(p.role.max_response_tokens or s.max_response_tokens for p in self.positions)
        self.max_response_tokens = max(self.response_limits)

    def with_encoders(self, encoders: Sequence[PromptEncoder]) -> Self:
        """Returns this chain with other encoders, by position."""
        chain = copy.copy(self)
        chain.encoders = tuple(encoders)
        return chain

    def with_chat_template_kwargs(self, arguments: Mapping[str, Any]) -> Self:
        """Returns this chain with further arguments of the chat template, such as those of a client's request.

        Raises:
            ChatError: The chain has no chat template, or it does not read an argument.
        """
        encoders = {encoder: encoder.with_chat_template_kwargs(arguments) for encoder in dict.fromkeys(self.encoders)}
        return self.with_encoders([encoders[encoder] for encoder in self.encoders])

    @property
    def bare_template(self) -> str | None:
        """The prompt template of an agent that answers alone; None: the task's.

        It is that of the first role whose responses are answers to the query, without earlier responses.
        """
        roles = [position.role for position in self.positions]
        return complete_template(next((role for role in roles if role.produces_response), roles[0]), ())

    @property
    def role_rewards(self) -> dict[str, str]:
        """The reward functions of roles with one of their own, by role."""
        roles = {position.role.name: position.role.own_reward for position in self.positions}
        return {name: spec for name, spec in roles.items() if spec is not None}

    @property
    def uses_feedback(self) -> bool:
        """Whether prompts contain feedback, or the chain stops by it."""
        return self.stops_when_solved or any(map(self.shows_feedback, range(len(self.positions))))

    def shows_feedback(self, position: int) -> bool:
        """Whether the prompt of the agent at a position contains feedback."""
        template = self.positions[position].template
        if self.task.feedback is None or not self.knowledge_transfer or self.positions[position].stage == 0:
            return False
        if template is None:
            return self.task.shows_feedback
        attributes = {attribute for _, attribute in references(template)}
        return FEEDBACK_PLACEHOLDER in attributes or FEEDBACK_PLACEHOLDER in placeholders(template)

    def observation_space(self) -> spaces.Dict:
        """Returns a new observation space, the same for every role. Before an agent's turn, its length is 0."""
        tokens = spaces.Box(0, self.vocab_size - 1, (self.max_prompt_tokens,), np.int32)
        return spaces.Dict(tokens=tokens, length=spaces.Discrete(self.max_prompt_tokens + 1))

    def action_space(self) -> spaces.Dict:
        """Returns a new action space, the same for every role."""
        tokens = spaces.MultiDiscrete([self.vocab_size] * self.max_response_tokens)
        return spaces.Dict(tokens=tokens, length=spaces.Discrete(self.max_response_tokens, start=1))

    @property
    def vocab_size(self) -> int:
        """Upper bound of the token ids of all agents (exclusive)."""
        return max(encoder.vocab_size for encoder in self.encoders)
