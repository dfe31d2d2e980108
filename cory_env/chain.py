"""The chain: one query answered by several agents, one after another (paper §2).

    chain = Chain(task, tokenizer, num_agents=2)
    episode = ChainEpisode(chain, task.train[0])
    while episode.role is not None:                     # "pioneer", then "observer"
        tokens = generate(episode.prompt_ids())
        episode.respond({"tokens": tokens, "length": len(tokens)})
    rewards = episode.collective_rewards(task_rewards)  # {"pioneer": ..., "observer": ...}

Both the PettingZoo environment and the batched runner are thin wrappers around this episode logic. Responses are stored
as the generated tokens: they are decoded for the reward and for the next agent's prompt, but never tokenized again.
"""

import copy
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from gymnasium import spaces

from cory_env.chain_settings import ChainSettings, complete_template
from cory_env.chat import ChatError, ChatTemplate, reject_conversations
from cory_env.control_tokens import ControlTokens
from cory_env.decoding import ResponseDecoder, ThinkingTags
from cory_env.message import Message
from cory_env.tasks.task import FEEDBACK_PLACEHOLDER, Query, Task, ending, literals, placeholders, references
from cory_env.tasks.turns import SeenResponse, prompt_text
from cory_env.tokenizer import token_ids_containing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptError(ValueError):
    """A prompt cannot be given to a model."""


class QueryTooLongError(PromptError):
    """A query's prompt exceeds `max_prompt_tokens` even without any reference."""


class NoEmbeddingError(PromptError):
    """A prompt contains a token that the model has no embedding for."""


class Chain(ResponseDecoder):
    """Everything that episodes share: task, tokenizer, roles, limits and spaces. Has no episode state.

    Attributes:
        positions: The positions, with the roles that the agents have there.
        roles: The names of the agents, by position.
        by_position: By position, the chain with the tokenizer of that agent; by default this chain.
        end_token_ids: Ids of the tokens that end a response; `stop_token_ids` holds the same ids in order.
        thinking: The tags of thoughts; None: responses contain no thoughts.
    """

    by_position: "tuple[Chain, ...]"

    def __init__(self, task: Task, tokenizer: "PreTrainedTokenizerBase", **settings: Any) -> None:
        """Makes a chain.

        Args:
            task: Queries and prompts.
            tokenizer: The tokenizer of the model that responds.
            **settings: The fields of `ChainSettings`.

        Raises:
            ValueError: A setting is out of range, or no token can end a response.
            ChatError: The chat template is missing or unsuitable, or a query is a conversation and `chat` is off.
            ThinkingError: A tag of `thinking` is not a token of the model.
        """
        s = ChainSettings(**settings)
        uses_chat = bool(tokenizer.chat_template) if s.chat == "auto" else s.chat
        self.chat = ChatTemplate(tokenizer, s.system_prompt, s.chat_date, s.chat_template_kwargs) if uses_chat else None
        vocab = tokenizer.get_vocab()
        self._tokenizer_vocab_size = max(vocab.values()) + 1  # ids may have gaps
        self.vocab_size = s.vocab_size or self._tokenizer_vocab_size
        self.num_embeddings = s.num_embeddings or self.vocab_size
        ids_with_stop = [] if s.stop is None else token_ids_containing(tokenizer, s.stop)
        turn_end = None if self.chat is None else self.chat.turn_end([tokenizer.eos_token_id, *s.stop_token_ids])
        end_ids = [
            token
            for token in dict.fromkeys([tokenizer.eos_token_id, *s.stop_token_ids, turn_end, *ids_with_stop])
            if token is not None and 0 <= token < self.vocab_size
        ]
        if not end_ids:
            raise ValueError(
                "No token can end a response: the tokenizer has no end-of-sequence token, or the model has no "
                "embedding for it. Set the tokenizer's eos_token."
            )
        if self.chat is None:
            reject_conversations(task)
        if s.stop_when and task.feedback is None:
            raise ValueError(f"stop_when={s.stop_when} requires feedback, but task {task.name} has none.")
        self.task = task
        self.tokenizer = tokenizer
        self.positions = s.make_positions()
        self.roles = tuple(position.agent for position in self.positions)
        self.knowledge_transfer = s.knowledge_transfer
        self.observed = s.observed
        self.partner_reward = s.partner_reward
        self.max_prompt_tokens = s.max_prompt_tokens
        self.response_limits = tuple(p.role.max_response_tokens or s.max_response_tokens for p in self.positions)
        self.max_response_tokens = max(self.response_limits)
        self.stops_when_solved = s.stop_when == "solved"
        self.stop = s.stop
        self.thinking = s.thinking
        self.tags = None if s.thinking is None else ThinkingTags(s.thinking, tokenizer, self.vocab_size)
        self.stop_token_ids = tuple(end_ids)
        self.end_token_ids = frozenset(end_ids)  # there may be hundreds
        self._hidden_ids = self.end_token_ids.difference(ids_with_stop)  # they contain no text of the response
        role_prompts = [position.role.prompt for position in self.positions if position.role.prompt is not None]
        templates = [task.prompt_template, task.observer_template, task.reference_separator, *role_prompts]
        template_texts = [literal for template in templates for literal in literals(template)]
        template_texts += [] if self.chat is None else [self.chat.template_text]
        self._unembedded = {token: text for text, token in vocab.items() if token >= self.num_embeddings}
        self.control = ControlTokens(tokenizer, self._hidden_ids.union(self._unembedded), template_texts)
        self._prompt_columns = {name for template in templates for name in placeholders(template)}
        if shared := self._prompt_columns.intersection(position.role.name for position in self.positions):
            raise ValueError(f"{min(shared)} is a role, and a column in a prompt. Rename the role.")
        pad: int = tokenizer.pad_token_id or 0
        self.pad_token_id = pad if pad < self.num_embeddings else 0
        self.by_position = (self,) * len(self.roles)

    def with_position_chains(self, others: "Sequence[Chain]") -> Self:
        """Returns this chain with a different tokenizer per agent. Agents pass text to one another.

        Encode and decode with the chains in its `by_position`: its own methods still use this chain's tokenizer.

        Args:
            others: By position, a chain that differs from this one only in its tokenizer.
        """
        mixed = copy.copy(self)
        mixed.by_position = tuple(others)
        mixed.vocab_size = max(other.vocab_size for other in others)
        return mixed

    def with_chat_template_kwargs(self, arguments: Mapping[str, Any]) -> Self:
        """Returns this chain with further arguments of the chat template, such as those of a client's request.

        Raises:
            ChatError: The chain has no chat template, or it does not read an argument.
        """
        if self.chat is None:
            raise ChatError("chat_template_kwargs require a chat template, but this chain has none (chat=false).")
        result = copy.copy(self)
        result.chat = self.chat.with_arguments(arguments)
        others = {
            id(chain): chain.with_chat_template_kwargs(arguments)
            for chain in dict.fromkeys(self.by_position)
            if chain is not self
        }
        result.by_position = tuple(others.get(id(chain), result) for chain in self.by_position)
        return result

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
        if self.task.feedback is None or not self.positions[position].sees:
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

    def encode(self, prompts: Sequence[tuple[str, Sequence[Message] | None]]) -> list[list[int]]:
        """Tokenizes prompts.

        Special tokens come either from the chat template (with `chat`) or from the tokenizer's defaults, such as a BOS
        token; never from both. Mask text before inserting it into a template (`ControlTokens.mask`); otherwise it
        counts as part of the template.

        Args:
            prompts: Filled templates, each with the messages before it (used with `chat`).

        Raises:
            ChatError: The chat template cannot render a prompt.
        """
        texts = [self._render(text, history) for text, history in prompts]
        return self.control.encode(texts, add_special_tokens=self.chat is None)

    def _render(self, text: str, history: Sequence[Message] | None) -> str:
        return text if self.chat is None else self.chat.render(text, history or ())

    def encode_pioneer_prompts(self, queries: Sequence[Query]) -> list[list[int]]:
        """Tokenizes the pioneer's prompts.

        Raises:
            NoEmbeddingError: A prompt contains a token that the model has no embedding for.
        """
        masked = [self._mask_query(query) for query in queries]
        prompts = self.encode([(self.task.prompt(query), query.history) for query in masked])
        self._reject_unembedded(queries, prompts)
        return prompts

    def encode_bare_prompts(self, queries: Sequence[Query]) -> list[list[int]]:
        """Tokenizes the bare queries: the prompts of an agent that answers alone.

        They are those of the first role whose responses are answers to the query, without earlier responses.

        Raises:
            NoEmbeddingError: See `encode_pioneer_prompts`.
        """
        roles = [position.role for position in self.positions]
        first = next((role for role in roles if role.produces_response), roles[0])
        return self.encode_prompts(queries, template=complete_template(first, ()))

    def encode_prompts(
        self,
        queries: Sequence[Query],
        responses: Sequence[SeenResponse] = (),
        feedback: str | None = None,
        template: str | None = None,
    ) -> list[list[int]]:
        """Tokenizes the prompts of an agent that sees the same earlier responses to each query, or none.

        Args:
            queries: The queries.
            responses: The earlier responses, in the chain's order.
            feedback: The feedback on the last one in `{reference}`; None if the prompt shows none.
            template: The template of the role's prompt; None: the task's.

        Raises:
            NoEmbeddingError: A prompt contains a token that the model has no embedding for, and that comes from the
                query or the template, not from a response or feedback.
        """
        if not responses and template is None:
            return self.encode_pioneer_prompts(queries)
        mask = self.control.mask
        masked = [self._mask_query(query) for query in queries]
        seen = [
            response._replace(text=mask(response.text), feedback=response.feedback and mask(response.feedback))
            for response in responses
        ]
        prompts = self._encode_masked(masked, seen, feedback and mask(feedback), template)
        unembedded = [self._unembedded.keys() & prompt for prompt in prompts]
        if not any(unembedded):
            return prompts
        bare = [response._replace(text="", feedback=response.feedback and "") for response in seen]
        self._reject_unembedded(queries, self._encode_masked(masked, bare, feedback and "", template))
        return [self._spell_out(prompt, tokens) for prompt, tokens in zip(prompts, unembedded, strict=True)]

    def _encode_masked(
        self, queries: Sequence[Query], responses: Sequence[SeenResponse], feedback: str | None, template: str | None
    ) -> list[list[int]]:
        texts = [(prompt_text(self.task, query, responses, feedback, template), query.history) for query in queries]
        return self.encode(texts)

    def _mask_query(self, query: Query) -> Query:
        """Returns the query with its texts masked, so that they do not become control tokens in a prompt."""
        mask = self.control.mask
        columns = dict(query.columns)
        for name, value in query.columns.items():
            text = str(value)
            if (isinstance(value, str) or name in self._prompt_columns) and (masked := mask(text)) != text:
                columns[name] = masked
        history = query.history
        if history is not None:
            history = tuple(Message(role=message["role"], content=mask(message["content"])) for message in history)
        return replace(query, text=mask(query.text), columns=columns, history=history)

    def _reject_unembedded(self, queries: Sequence[Query], prompts: list[list[int]]) -> None:
        """Raises NoEmbeddingError if a prompt contains a token without an embedding."""
        for query, prompt in zip(queries, prompts, strict=True) if self._unembedded else ():
            if token := next((token for token in prompt if token in self._unembedded), None):
                raise NoEmbeddingError(
                    f"The prompt of query {query.id} of task {self.task.name} contains the token "
                    f"{self._unembedded[token]!r} with id {token}, but `{self.tokenizer.name_or_path}` has only "
                    f"{self.num_embeddings} embeddings. Change the prompt, use the tokenizer that the model was "
                    "trained with, or resize the model's embeddings."
                )

    def _spell_out(self, prompt: list[int], unembedded: Collection[int]) -> list[int]:
        """Replaces tokens without an embedding by the tokens of their characters."""
        spelled: dict[int, list[int]] = {}
        for token in unembedded:
            characters = self.tokenizer(list(self._unembedded[token]), add_special_tokens=False)["input_ids"]
            spelled[token] = [part for ids in characters for part in ids if part < self.num_embeddings]
        return [part for token in prompt for part in spelled.get(token, [token])]

    def build_prompt(
        self, query: Query, responses: Sequence[SeenResponse], template: str | None = None
    ) -> tuple[list[int], bool]:
        """Builds the prompt of an agent that sees `responses`.

        If the prompt exceeds `max_prompt_tokens`, its reference is truncated: it loses tokens from its end (the last
        response first) until the prompt fits. If it does not fit without any response, the feedback loses characters
        from its end too. The query is never truncated. A response without remaining tokens is not in the reference.

        Args:
            query: The query.
            responses: The earlier responses with their tokens, in the chain's order; empty for the pioneer.
            template: The template of the role's prompt; None: the task's.

        Returns:
            The prompt's 1 to `max_prompt_tokens` token ids, and whether responses or feedback were truncated.

        Raises:
            QueryTooLongError: The prompt does not fit even without any response.
        """
        if not responses or not self.knowledge_transfer:
            (prompt,) = self.encode_prompts([query], template=template)
            if len(prompt) > self.max_prompt_tokens:
                raise self._too_long(query, len(prompt))
            return prompt, False
        num_characters = sum(len(response.feedback or "") for response in responses)
        total = num_characters + sum(len(response.tokens) for response in responses)
        last = max((k for k, response in enumerate(responses) if response.is_reference), default=None)

        def encode_prefix(length: int) -> list[int]:
            """Returns the prompt with the first `length` characters of feedback, then tokens of the responses."""
            seen: list[SeenResponse] = []
            characters, num_tokens = length, length - num_characters
            for response in responses:
                seen.append(response.cut(characters, num_tokens))
                characters -= len(response.feedback or "")
                num_tokens -= len(response.tokens)
            if not any(response.is_reference for response in seen) and last is not None:
                seen[last] = seen[last]._replace(is_reference=True)
            return self.encode_prompts([query], seen, None if last is None else seen[last].feedback, template)[0]

        prompt = encode_prefix(total)
        if len(prompt) <= self.max_prompt_tokens:
            return prompt, False
        if len(bare_prompt := encode_prefix(0)) > self.max_prompt_tokens:
            raise self._too_long(query, len(bare_prompt))
        # Each attempt tokenizes the text again, because tokens merge across boundaries.
        length = bisect_left(range(1, total), True, key=lambda n: len(encode_prefix(n)) > self.max_prompt_tokens)
        return encode_prefix(length), True

    def begins_thought(self, prompt: Sequence[int], query: Query, template: str | None, *, sees_response: bool) -> bool:
        """Returns whether a prompt begins the thought of its response: its template ends with the start tag.

        A tag at the end of the query, a response or feedback is only text, such as that of a response that was cut.

        Args:
            prompt, query, template: Result and arguments of `build_prompt`.
            sees_response: Whether that got responses.
        """
        if self.tags is None or not self.tags.at_end_of(prompt):
            return False
        if template is None:
            template = self.task.observer_template if sees_response else self.task.prompt_template
        text = self._render(f"x{ending(template)}", query.history)  # x: in place of the query, responses and feedback
        return text.rstrip().endswith(self.tags.start)

    def _too_long(self, query: Query, length: int) -> QueryTooLongError:
        return QueryTooLongError(
            f"Query {query.id} of task {self.task.name} needs a prompt of {length} tokens without any reference, but "
            f"max_prompt_tokens is {self.max_prompt_tokens}: {query.text[:80]!r}. Raise max_prompt_tokens to at least "
            f"{length}, or shorten or remove the query."
        )
