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
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from gymnasium import spaces

from cory_env.chain_settings import ChainSettings, role_names
from cory_env.chat import ChatTemplate, reject_conversations
from cory_env.control_tokens import ControlTokens
from cory_env.message import Message
from cory_env.tasks.task import Query, Task, literals, placeholders
from cory_env.tokenizer import token_ids_containing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptError(ValueError):
    """A prompt cannot be given to a model."""


class QueryTooLongError(PromptError):
    """A query's prompt exceeds `max_prompt_tokens` even without any reference."""


class NoEmbeddingError(PromptError):
    """A prompt contains a token that the model has no embedding for."""


class Turn(NamedTuple):
    """What an agent sees that is not the first.

    Attributes:
        query: The query.
        responses: The texts of the earlier responses that it sees, in the chain's order.
        feedback: The feedback on the last of them; None if the prompt has no feedback.
    """

    query: Query
    responses: Sequence[str]
    feedback: str | None = None


class Chain:
    """Everything that episodes share: task, tokenizer, roles, limits and spaces. Has no episode state.

    Attributes:
        by_position: By position, the chain with the tokenizer of that agent; by default this chain.
        end_token_ids: Ids of the tokens that end a response; `stop_token_ids` holds the same ids in order.
        stops: The stop strings (none or one), in the form that `Detokenizer` takes.
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
        """
        s = ChainSettings(**settings)
        self.chat = ChatTemplate(tokenizer, s.system_prompt, s.chat_date) if s.chat else None
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
        if not s.chat:
            reject_conversations(task)
        if s.stop_when and task.feedback is None:
            raise ValueError(f"stop_when={s.stop_when} requires feedback, but task {task.name} has none.")
        self.task = task
        self.tokenizer = tokenizer
        self.roles = role_names(s.num_agents)
        self.knowledge_transfer = s.knowledge_transfer
        self.observed = s.observed
        self.partner_reward = s.partner_reward
        self.max_prompt_tokens = s.max_prompt_tokens
        self.max_response_tokens = s.max_response_tokens
        self.stops_when_solved = s.stop_when == "solved"
        self.stop = s.stop
        self.stops = () if s.stop is None else (s.stop,)
        self.stop_token_ids = tuple(end_ids)
        self.end_token_ids = frozenset(end_ids)  # there may be hundreds
        self._hidden_ids = self.end_token_ids.difference(ids_with_stop)  # they contain no text of the response
        templates = (task.prompt_template, task.observer_template, task.reference_separator)
        template_texts = [literal for template in templates for literal in literals(template)]
        if self.chat:
            template_texts.append(self.chat.template_text)
        self._unembedded = {token: text for text, token in vocab.items() if token >= self.num_embeddings}
        self.control = ControlTokens(tokenizer, self._hidden_ids.union(self._unembedded), template_texts)
        self._prompt_columns = {name for template in templates for name in placeholders(template)}
        pad: int = tokenizer.pad_token_id or 0
        self.pad_token_id = pad if pad < self.num_embeddings else 0
        self._anchor: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._anchor_text = self._decode(self._anchor)
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

    @property
    def uses_feedback(self) -> bool:
        """Whether prompts contain feedback, or the chain stops by it."""
        return self.stops_when_solved or (self.knowledge_transfer and self.task.shows_feedback)

    @property
    def max_references(self) -> int:
        """The maximum number of earlier responses in one prompt."""
        earlier = len(self.roles) - 1 if self.knowledge_transfer else 0
        return earlier if self.observed == "all" else min(earlier, 1)

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
        texts = [text if self.chat is None else self.chat.render(text, history or ()) for text, history in prompts]
        return self.control.encode(texts, add_special_tokens=self.chat is None)

    def encode_pioneer_prompts(self, queries: Sequence[Query]) -> list[list[int]]:
        """Tokenizes the pioneer's prompts.

        Raises:
            NoEmbeddingError: A prompt contains a token that the model has no embedding for.
        """
        masked = [self._mask_query(query) for query in queries]
        prompts = self.encode([(self.task.prompt(query), query.history) for query in masked])
        self._reject_unembedded(queries, prompts)
        return prompts

    def encode_observer_prompts(self, turns: Sequence[Turn]) -> list[list[int]]:
        """Tokenizes the prompts of agents that see earlier responses.

        Raises:
            NoEmbeddingError: See `_spell_out`.
        """
        mask = self.control.mask
        masked = [
            Turn(self._mask_query(turn.query), list(map(mask, turn.responses)), turn.feedback and mask(turn.feedback))
            for turn in turns
        ]
        prompts = self.encode([(self._observer_prompt(turn), turn.query.history) for turn in masked])
        return [self._spell_out(turn, prompt) for turn, prompt in zip(masked, prompts, strict=True)]

    def _observer_prompt(self, turn: Turn) -> str:
        """Returns the prompt as text. Tasks whose `observer_prompt` has no feedback need not accept the argument."""
        feedback = () if turn.feedback is None else (turn.feedback,)
        return self.task.observer_prompt(turn.query, turn.responses, *feedback)

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

    def _spell_out(self, turn: Turn, prompt: list[int]) -> list[int]:
        """Replaces tokens without an embedding by the tokens of their characters.

        Raises:
            NoEmbeddingError: Such a token comes from the query or the template, not from a response or feedback.
        """
        unembedded = self._unembedded.keys() & prompt
        if not unembedded:
            return prompt
        bare_turn = Turn(turn.query, [""] * len(turn.responses), None if turn.feedback is None else "")
        self._reject_unembedded([turn.query], self.encode([(self._observer_prompt(bare_turn), turn.query.history)]))
        spelled: dict[int, list[int]] = {}
        for token in unembedded:
            characters = self.tokenizer(list(self._unembedded[token]), add_special_tokens=False)["input_ids"]
            spelled[token] = [part for ids in characters for part in ids if part < self.num_embeddings]
        return [part for token in prompt for part in spelled.get(token, [token])]

    def truncate_response(self, tokens: list[int]) -> tuple[list[int], bool]:
        """Truncates a response after the token that ends it: an end token, or the one that completes the stop string.

        Returns:
            The response's tokens, and whether it is complete; if not, it reached the maximum length.
        """
        first_end = next((i for i, token in enumerate(tokens, start=1) if token in self.end_token_ids), None)
        tokens = tokens[:first_end]
        ended = tokens[-1] in self.end_token_ids
        if self.stop is None or self.stop not in self.decode_untruncated(tokens if not ended else tokens[:-1]):
            return tokens, ended
        # The stop string spans several tokens; no single token contains it.
        stop = self.stop
        length = bisect_left(range(len(tokens)), True, key=lambda end: stop in self.decode_untruncated(tokens[:end]))
        return tokens[:length], True

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns a response as rewards and later agents see it: `decode_untruncated` up to the stop string."""
        text = self.decode_untruncated(tokens)
        return text if self.stop is None else text.partition(self.stop)[0]

    def decode_untruncated(self, tokens: Sequence[int]) -> str:
        """Returns a response as text, without end tokens, with its leading space so that prompt + text reads right.

        Some tokenizers drop the first space of decoded text. So the response is decoded after a fixed anchor token, and
        the anchor's text is removed.
        """
        tokens = [token for token in tokens if token not in self._hidden_ids]  # some are not special tokens
        text = self._decode([*self._anchor, *tokens])
        return text.removeprefix(self._anchor_text) if text.startswith(self._anchor_text) else self._decode(tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        # Some tokenizers raise on the ids of a padded vocabulary.
        tokens = [token for token in tokens if token < self._tokenizer_vocab_size]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # a list of texts comes back only for a batch
        return text

    def build_prompt(
        self,
        query: Query,
        responses: Sequence[Sequence[int]],
        response_chains: "Sequence[Chain] | None" = None,
        feedback: str | None = None,
    ) -> tuple[list[int], bool]:
        """Builds the prompt of an agent that sees `responses`.

        If the prompt exceeds `max_prompt_tokens`, its reference is truncated: it loses tokens from its end (the last
        response first) until the prompt fits. If it does not fit without any reference, the feedback loses characters
        from its end too. The query is never truncated. A response without remaining tokens is left out.

        Args:
            query: The query.
            responses: Token ids of the earlier responses, in the chain's order; empty for the pioneer.
            response_chains: Per response, the chain that decodes its tokens; by default this chain.
            feedback: The feedback on the last of the responses; None without feedback.

        Returns:
            The prompt's 1 to `max_prompt_tokens` token ids, and whether reference or feedback were truncated.

        Raises:
            QueryTooLongError: The prompt does not fit even without any reference.
        """
        if not responses or not self.knowledge_transfer:
            prompt = self.encode_pioneer_prompts([query])[0]
            if len(prompt) > self.max_prompt_tokens:
                raise self._too_long(query, len(prompt))
            return prompt, False
        chains = response_chains or [self] * len(responses)
        num_characters = len(feedback or "")
        total = num_characters + sum(map(len, responses))

        def encode_prefix(length: int) -> list[int]:
            """Returns the prompt with the feedback's first `length` characters, then with tokens of the responses."""
            texts, num_tokens = [], length - num_characters
            for response, chain in zip(responses, chains, strict=True):
                if num_tokens > 0:
                    texts.append(chain.decode(response[:num_tokens]))
                num_tokens -= len(response)
            shown_feedback = None if feedback is None else feedback[:length]
            return self.encode_observer_prompts([Turn(query, texts or [""], shown_feedback)])[0]

        prompt = encode_prefix(total)
        if len(prompt) <= self.max_prompt_tokens:
            return prompt, False
        if len(bare_prompt := encode_prefix(0)) > self.max_prompt_tokens:
            raise self._too_long(query, len(bare_prompt))
        # Each attempt tokenizes the text again, because tokens merge across boundaries.
        length = bisect_left(range(1, total), True, key=lambda n: len(encode_prefix(n)) > self.max_prompt_tokens)
        return encode_prefix(length), True

    def _too_long(self, query: Query, length: int) -> QueryTooLongError:
        return QueryTooLongError(
            f"Query {query.id} of task {self.task.name} needs a prompt of {length} tokens without any reference, but "
            f"max_prompt_tokens is {self.max_prompt_tokens}: {query.text[:80]!r}. Raise max_prompt_tokens to at least "
            f"{length}, or shorten or remove the query."
        )
