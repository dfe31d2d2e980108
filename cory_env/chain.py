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
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
from gymnasium import spaces

from cory_env.chat import ChatTemplate, reject_conversations
from cory_env.control_tokens import ControlTokens
from cory_env.message import Message
from cory_env.tasks.task import Query, Task, literals, placeholders
from cory_env.tokenizer import token_ids_containing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_MAX_PROMPT_TOKENS = 128
DEFAULT_MAX_RESPONSE_TOKENS = 15  # the longest IMDB response in the paper

ObservedResponses = Literal["all", "last", "best"]
"""Which earlier responses an agent sees: all, the last one, or the one with the best task reward."""


class PromptError(ValueError):
    """A prompt cannot be given to a model."""


class QueryTooLongError(PromptError):
    """A query's prompt exceeds `max_prompt_tokens` even without any reference."""


class NoEmbeddingError(PromptError):
    """A prompt contains a token that the model has no embedding for."""


def role_names(num_agents: int) -> tuple[str, ...]:
    """Returns the roles of a chain in the order in which they respond: the environment's agents.

    Raises:
        ValueError: `num_agents` is less than 1.
    """
    if num_agents < 1:
        raise ValueError(f"num_agents is {num_agents}, but must be at least 1.")
    if num_agents == 2:
        return ("pioneer", "observer")
    return ("pioneer", *(f"observer_{k}" for k in range(1, num_agents)))


@dataclass(frozen=True)
class ChainSettings:
    """Settings of a chain, apart from its task and tokenizer.

    Attributes:
        num_agents: Number of agents; 1 is the single-agent baseline, 2 is CORY.
        knowledge_transfer: Whether an agent sees earlier responses. If False, each agent sees only the query.
        observed: Which earlier responses the third and later agents see: `all`, the `last`, or the `best` by task
            reward (the earliest if there is a tie).
        partner_reward: α in r_i + α · Σ_{j≠i} r_j: 1 cooperative as in the paper, 0 independent, −1 competitive.
        max_prompt_tokens: Maximum prompt length in tokens. Longer prompts lose the end of their reference.
        max_response_tokens: Maximum response length in tokens.
        vocab_size: Upper bound of token ids (exclusive). Default: the tokenizer's largest id + 1. Models may pad their
            vocabulary beyond that.
        num_embeddings: Upper bound of token ids in prompts (exclusive). Default: `vocab_size`. Tokenizers may have
            tokens without an embedding; prompts must not contain them.
        stop_token_ids: Tokens that end a response in addition to the tokenizer's end-of-sequence token.
        stop: Stop string, which ends a response too. The response's tokens include the one that completes the stop
            string; its text ends before the stop string.
        chat: Whether each prompt is a user message in the tokenizer's chat template.
        system_prompt: With `chat`, a system message before the user message.
        chat_date: With `chat`, the date that the template shows as today's, as YYYY-MM-DD. None: the real date.
    """

    num_agents: int = 2
    knowledge_transfer: bool = True
    observed: ObservedResponses = "all"
    partner_reward: float = 1.0
    max_prompt_tokens: int = DEFAULT_MAX_PROMPT_TOKENS
    max_response_tokens: int = DEFAULT_MAX_RESPONSE_TOKENS
    vocab_size: int | None = None
    num_embeddings: int | None = None
    stop_token_ids: Sequence[int] = ()
    stop: str | None = None
    chat: bool = False
    system_prompt: str | None = None
    chat_date: str | None = None

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
        self.task = task
        self.tokenizer = tokenizer
        self.roles = role_names(s.num_agents)
        self.knowledge_transfer = s.knowledge_transfer
        self.observed = s.observed
        self.partner_reward = s.partner_reward
        self.max_prompt_tokens = s.max_prompt_tokens
        self.max_response_tokens = s.max_response_tokens
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

    def encode_observer_prompts(self, turns: Sequence[tuple[Query, Sequence[str]]]) -> list[list[int]]:
        """Tokenizes the prompts of agents that see earlier responses.

        Args:
            turns: A query and the text of the earlier responses, per prompt.

        Raises:
            NoEmbeddingError: A prompt contains a token without an embedding that does not come from a response.
        """
        mask = self.control.mask
        masked = [(self._mask_query(query), list(map(mask, texts))) for query, texts in turns]
        prompts = self.encode([(self.task.observer_prompt(query, texts), query.history) for query, texts in masked])
        return [self._spell_out(*turn, prompt) for turn, prompt in zip(masked, prompts, strict=True)]

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

    def _spell_out(self, query: Query, texts: Sequence[str], prompt: list[int]) -> list[int]:
        """Replaces tokens without an embedding by the tokens of their characters if they come from a response."""
        unembedded = self._unembedded.keys() & prompt
        if not unembedded:
            return prompt
        bare_prompt = self.encode([(self.task.observer_prompt(query, [""] * len(texts)), query.history)])
        self._reject_unembedded([query], bare_prompt)
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
        self, query: Query, responses: Sequence[Sequence[int]], response_chains: "Sequence[Chain] | None" = None
    ) -> tuple[list[int], bool]:
        """Builds the prompt of an agent that sees `responses`.

        If the prompt exceeds `max_prompt_tokens`, its reference is truncated: it loses tokens from its end (the last
        response first) until the prompt fits. The query is never truncated. A response without remaining tokens is left
        out.

        Args:
            query: The query.
            responses: Token ids of the earlier responses, in the chain's order; empty for the pioneer.
            response_chains: Per response, the chain that decodes its tokens; by default this chain.

        Returns:
            The prompt's 1 to `max_prompt_tokens` token ids, and whether the reference was truncated.

        Raises:
            QueryTooLongError: The prompt does not fit even without any reference.
        """
        if not responses or not self.knowledge_transfer:
            prompt = self.encode_pioneer_prompts([query])[0]
            if len(prompt) > self.max_prompt_tokens:
                raise self._too_long(query, len(prompt))
            return prompt, False
        chains, total = response_chains or [self] * len(responses), sum(map(len, responses))

        def encode_prefix(num_tokens: int) -> list[int]:
            """Returns the prompt with the first `num_tokens` tokens of the responses."""
            texts = []
            for response, chain in zip(responses, chains, strict=True):
                if num_tokens > 0:
                    texts.append(chain.decode(response[:num_tokens]))
                num_tokens -= len(response)
            return self.encode_observer_prompts([(query, texts or [""])])[0]

        prompt = encode_prefix(total)
        if len(prompt) <= self.max_prompt_tokens:
            return prompt, False
        if len(bare_prompt := encode_prefix(0)) > self.max_prompt_tokens:
            raise self._too_long(query, len(bare_prompt))
        # Each attempt tokenizes the text again, because tokens merge across boundaries.
        num_tokens = bisect_left(range(1, total), True, key=lambda n: len(encode_prefix(n)) > self.max_prompt_tokens)
        return encode_prefix(num_tokens), True

    def _too_long(self, query: Query, length: int) -> QueryTooLongError:
        return QueryTooLongError(
            f"Query {query.id} of task {self.task.name} needs a prompt of {length} tokens without any reference, but "
            f"max_prompt_tokens is {self.max_prompt_tokens}: {query.text[:80]!r}. Raise max_prompt_tokens to at least "
            f"{length}, or shorten or remove the query."
        )
