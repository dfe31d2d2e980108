"""Settings of a chain: its roles, the positions at which agents play them, and limits."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from cory_env.home import expand_home
from cory_env.tasks.task import FEEDBACK_PLACEHOLDER, placeholders, references

MAX_PROMPT_TOKENS = 4096
"""Largest prompt length that is chosen without being asked for."""
MAX_AGENTS = 32
"""Maximum number of agents of a chain: every later prompt contains all earlier responses, or waits for them."""

ObservedResponses = Literal["all", "last"]
"""Which earlier responses an agent sees."""

StopWhen = Literal["solved"]
"""When a chain ends before all agents have responded."""

TASK_REWARD, NO_REWARD = "task", "none"
RESERVED_NAMES = ("query", "reference", "feedback")
"""Placeholders of templates, which roles cannot be named after."""
POLICY_ID = re.compile(r"^llm_[1-9][0-9]*\Z")
"""Names of trained LLMs."""


@dataclass(frozen=True)
class Role:
    """A role of a chain.

    Attributes:
        name: An identifier, such as `solver`.
        prompt: Template of the role's prompt. It may use `{query}`, columns, `{reference}`, `{feedback}`, and
            `{solver.response}` and `{solver.feedback}` of an earlier role `solver`. An agent that sees no such
            response, such as the first one of a role that refers to itself, gets the task's prompt. None: the task's.
        max_response_tokens: Maximum response length in tokens; None: the chain's.
        produces_response: Whether the role's responses are answers to the query. Other roles, such as critics, write
            text for later agents: it gets no feedback, is not in `{reference}` and is never the chain's answer.
        reward: `task`, the task's reward; `none`, no reward of its own; or a function, `module:function`. None: `task`
            if the role produces a response, else `none`.
        count: Number of agents that respond without seeing each other: several drafts.
        repeat: Maximum number of times that the role responds in a row, each time seeing its earlier responses.
        policy: The LLM that has the role in training: a trained one, such as `llm_1`, or a frozen model's folder or hub
            id. None: the first role without a frozen model has the first trained LLM, and so on, in turn.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": False}

    name: str
    prompt: str | None = None
    max_response_tokens: int | None = None
    produces_response: bool = True
    reward: str | None = None
    count: int = 1
    repeat: int = 1
    policy: str | None = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in RESERVED_NAMES:
            raise ValueError(
                f"Invalid role name {self.name!r}. Use a plain word other than {', '.join(RESERVED_NAMES)}."
            )
        for name in ("count", "repeat", "max_response_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} of role {self.name} is {value}, but must be at least 1.")
        policy = self.policy
        if policy is not None and (not policy.strip() or (policy.startswith("llm_") and not POLICY_ID.match(policy))):
            raise ValueError(
                f"policy of role {self.name} is {policy!r}, but should be llm_1, llm_2, ..., or the folder or hub id "
                "of a frozen model."
            )
        if self.count > 1 and self.repeat > 1:
            raise ValueError(f"Role {self.name} has count={self.count} and repeat={self.repeat}. Set one of them to 1.")
        if self.reward == TASK_REWARD and not self.produces_response:
            raise ValueError(
                f"Role {self.name} has reward=task, but produces no response to the query. Set reward to none or to "
                "module:function."
            )

    @property
    def frozen_model(self) -> str | None:
        """Folder or hub id of the frozen model that has the role; None if a trained LLM has it."""
        return None if self.policy is None or POLICY_ID.match(self.policy) else expand_home(self.policy)

    @property
    def own_reward(self) -> str | None:
        """The role's own reward function; None if it has the task's reward or none."""
        return None if self.reward in (None, TASK_REWARD, NO_REWARD) else self.reward

    @property
    def has_reward(self) -> bool:
        """Whether the role's responses are rewarded."""
        return self.produces_response if self.reward is None else self.reward != NO_REWARD


class ShownResponse(NamedTuple):
    """An earlier response in an agent's prompt.

    Attributes:
        position: Its position.
        role: The role whose `{role.response}` it is; "" if a later response of that role takes its place.
        is_reference: Whether it belongs to `{reference}`.
    """

    position: int
    role: str
    is_reference: bool


class Position(NamedTuple):
    """A position in a chain: the agent that responds there, and what its prompt shows.

    Attributes:
        agent: The agent's name: the role's, with a number if the role has several positions.
        role: The agent's role.
        stage: The first position of the agents that respond without seeing each other.
        template: The prompt template; None: the task's. An agent that does not see the responses that its role's
            template shows gets the task's, too.
        shown_responses: The responses in the prompt, in the chain's order.
    """

    agent: str
    role: Role
    stage: int
    template: str | None
    shown_responses: tuple[ShownResponse, ...]


def complete_template(role: Role, seen: Sequence[Role]) -> str | None:
    """Returns a role's template if the agent sees the responses that it shows; None: it gets the task's.

    Args:
        role: The role.
        seen: The roles of the responses that the agent sees.
    """
    if (template := role.prompt) is None:
        return None
    shows_answer = bool({"reference", FEEDBACK_PLACEHOLDER} & placeholders(template))
    has_answer = any(other.produces_response for other in seen)
    is_complete = {name for name, _ in references(template)} <= {other.name for other in seen}
    return template if is_complete and (has_answer or not shows_answer) else None


def role_names(num_agents: int) -> tuple[str, ...]:
    """Returns the default roles of a chain in the order in which they respond: the environment's agents.

    Raises:
        ValueError: `num_agents` is out of range.
    """
    if not 1 <= num_agents <= MAX_AGENTS:
        raise ValueError(f"num_agents is {num_agents}, but must be from 1 to {MAX_AGENTS}.")
    if num_agents == 2:
        return ("pioneer", "observer")
    return ("pioneer", *(f"observer_{k}" for k in range(1, num_agents)))


def make_positions(
    roles: Sequence[Role], knowledge_transfer: bool = True, observed: ObservedResponses = "all"
) -> tuple[Position, ...]:
    """Returns the positions of a chain with these roles; for the settings see `ChainSettings`.

    Raises:
        ValueError: There are no roles or too many agents, names are repeated, the last role produces no response, or a
            prompt refers to a role that is not earlier.
    """
    if not roles:
        raise ValueError("roles is empty. Add a role, or leave roles out for a pioneer and observers.")
    if (total := sum(role.count * role.repeat for role in roles)) > MAX_AGENTS:
        raise ValueError(f"The roles have {total} agents, but a chain has at most {MAX_AGENTS}. Lower count or repeat.")
    positions: list[Position] = []
    for role in roles:
        start = len(positions)
        for k in range(role.count * role.repeat):
            agent = f"{role.name}_{k + 1}" if role.count * role.repeat > 1 else role.name
            stage = start if role.count > 1 else len(positions)
            seen = [position.role for position in positions[: stage if knowledge_transfer else 0]]
            template = complete_template(role, seen)
            answers = [index for index, other in enumerate(seen) if other.produces_response]
            reference = answers if observed == "all" else answers[-1:]
            shown_responses = tuple(
                ShownResponse(
                    index, "" if other.repeat > 1 and other in seen[index + 1 :] else other.name, index in reference
                )
                for index, other in enumerate(seen)
                if template is not None or index in reference
            )
            positions.append(Position(agent, role, stage, template, shown_responses))
        names = {position.role.name for position in positions[: len(positions) if role.repeat > 1 else start]}
        if missing := {name for name, _ in references(role.prompt or "")} - names:
            raise ValueError(
                f"The prompt of role {role.name} refers to {min(missing)}, which is not an earlier role. Earlier ones: "
                f"{', '.join(sorted(names)) or 'none'}."
            )
    agents = [position.agent for position in positions]
    if repeated := [agent for agent in agents if agents.count(agent) > 1]:
        raise ValueError(f"Several roles or agents are named {repeated[0]}. Rename one.")
    if not roles[-1].produces_response:
        raise ValueError(
            f"Role {roles[-1].name} is the last one, but produces no response, and nobody sees its text. Add a role "
            "after it, or remove it."
        )
    return tuple(positions)


@dataclass(frozen=True)
class Thinking:
    """The tags around the thought that a reasoning model writes before its answer.

    Attributes:
        start: The tag that begins the thought, such as `<think>`; one token of the model. Prompt templates may end
            with it.
        end: The tag that ends the thought, such as `</think>`; one token of the model.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": False}

    start: str
    end: str

    def __post_init__(self) -> None:
        if not self.start.strip() or not self.end.strip() or self.start == self.end:
            raise ValueError(
                f"thinking has the tags {self.start!r} and {self.end!r}, but needs two different ones, such as <think> "
                "and </think>."
            )


@dataclass(frozen=True)
class ChainSettings:
    """Settings of a chain, apart from its task and tokenizer. Training settings have the same defaults.

    Attributes:
        num_agents: Number of agents; 1 is the single-agent baseline, 2 is CORY. None: 2, or with `roles` all of theirs.
        roles: The roles; with `num_agents`, the chain has only the first positions. None: a pioneer and observers.
        knowledge_transfer: Whether an agent sees earlier responses. If False, each agent sees only the query.
        observed: Which earlier responses the third and later agents see: `all`, or only the `last`.
        partner_reward: α in r_i + α · Σ_{j≠i} r_j: 1 cooperative as in the paper, 0 independent, −1 competitive. The
            sum leaves out other drafts of agent i's role.
        max_prompt_tokens: Maximum prompt length in tokens. Longer prompts lose the end of their reference.
        max_response_tokens: Maximum response length in tokens.
        vocab_size: Upper bound of token ids (exclusive). Default: the tokenizer's largest id + 1. Models may pad their
            vocabulary beyond that.
        num_embeddings: Upper bound of token ids in prompts (exclusive). Default: `vocab_size`. Tokenizers may have
            tokens without an embedding; prompts must not contain them.
        stop_token_ids: Tokens that end a response in addition to the tokenizer's end-of-sequence token.
        stop_when: `solved`: the chain ends as soon as the feedback on a response is None. None: all agents respond.
        stop: Stop string, which ends a response too. The response's tokens include the one that completes the stop
            string; its text ends before the stop string.
        chat: Whether each prompt is a user message in the tokenizer's chat template; `auto`: if it has one.
        system_prompt: With `chat`, a system message before the user message.
        chat_date: With `chat`, the date that the template shows as today's, as YYYY-MM-DD. None: the real date.
        chat_template_kwargs: With `chat`, further arguments of the template, such as `{"enable_thinking": False}`.
        thinking: The tags around thoughts, which nobody sees. A thought that was cut off counts as no answer. None:
            responses contain no thoughts.
    """

    num_agents: int | None = None
    roles: Sequence[Role] | None = None
    knowledge_transfer: bool = True
    observed: ObservedResponses = "all"
    partner_reward: float = 0.0
    max_prompt_tokens: int = MAX_PROMPT_TOKENS
    max_response_tokens: int = 512
    vocab_size: int | None = None
    num_embeddings: int | None = None
    stop_token_ids: Sequence[int] = ()
    stop_when: StopWhen | None = None
    stop: str | None = None
    chat: Literal["auto"] | bool = "auto"
    system_prompt: str | None = None
    chat_date: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    thinking: Thinking | None = None

    def __post_init__(self) -> None:
        if self.max_prompt_tokens < 1 or self.max_response_tokens < 1:
            raise ValueError(
                f"max_prompt_tokens is {self.max_prompt_tokens} and max_response_tokens {self.max_response_tokens}, "
                "but both must be at least 1."
            )
        if self.observed not in get_args(ObservedResponses):
            raise ValueError(
                f"observed is {self.observed!r}, but must be one of: {', '.join(get_args(ObservedResponses))}."
            )
        if not math.isfinite(self.partner_reward):
            raise ValueError(f"partner_reward is {self.partner_reward}, but must be a finite number; the paper's is 1.")
        if self.stop_when not in (None, *get_args(StopWhen)):
            raise ValueError(f"stop_when is {self.stop_when!r}, but must be `solved` or None.")
        if self.stop is not None and self.thinking is not None:
            raise ValueError(f"stop={self.stop!r} conflicts with thinking: it would end a thought too. Remove one.")

    def make_positions(self) -> tuple[Position, ...]:
        """Returns the positions of the chain.

        Raises:
            ValueError: The roles are invalid, or `num_agents` is out of range.
        """
        if self.roles is None:
            names = role_names(2 if self.num_agents is None else self.num_agents)
            return make_positions([Role(name) for name in names], self.knowledge_transfer, self.observed)
        positions = make_positions(self.roles, self.knowledge_transfer, self.observed)
        if self.num_agents is not None and not 1 <= self.num_agents <= len(positions):
            raise ValueError(
                f"num_agents is {self.num_agents}, but must be from 1 to {len(positions)}, the number of agents of "
                "roles."
            )
        return positions[: self.num_agents]
