"""The chain: one query answered by several agents, one after another (paper §2).

    chain = Chain(task, tokenizer, num_agents=2)
    episode = ChainEpisode(chain, task.train[0])
    while episode.role is not None:                     # "pioneer", then "observer"
        tokens = generate(episode.prompt_ids())
        episode.respond({"tokens": tokens, "length": len(tokens)})
    rewards = episode.collective_rewards(task_rewards)  # {"pioneer": ..., "observer": ...}

The episode logic exists here once; the PettingZoo environment and the batched runner are both thin around it. Responses
are kept as the tokens that came: decoded for the reward and for the next agent's prompt, but never tokenised again.
"""

import copy
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
from gymnasium import spaces

from cory_env.chat import ChatFormat, reject_conversations
from cory_env.control_tokens import ControlTokens
from cory_env.message import Message
from cory_env.tasks.task import Query, Task, literals, placeholders
from cory_env.tokenizer import tokens_holding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_PROMPT = 128
MAX_RESPONSE = 15  # the paper's longest IMDB response

Observed = Literal["all", "last", "best"]
"""Which earlier responses an agent sees: all of them, the last one, or the one with the best task reward."""


class PromptError(ValueError):
    """A model cannot be asked a prompt."""


class QueryTooLong(PromptError):
    """A query's prompt does not fit `max_prompt_tokens`, even without any reference."""


class NoEmbeddingError(PromptError):
    """A prompt holds a token that the model has no embedding for."""


def role_names(num_agents: int) -> tuple[str, ...]:
    """Returns the roles of a chain in the order they answer: the environment's agents.

    Raises:
        ValueError: `num_agents` is less than 1.
    """
    if num_agents < 1:
        raise ValueError(f"num_agents is {num_agents}, but a chain needs at least 1 agent.")
    if num_agents == 2:
        return ("pioneer", "observer")
    return ("pioneer", *(f"observer_{k}" for k in range(1, num_agents)))


@dataclass(frozen=True)
class ChainSettings:
    """What a chain is made of, beside its task and its tokenizer.

    Attributes:
        num_agents: How many agents answer; 1 is the single-agent baseline, 2 is CORY.
        knowledge_transfer: Whether an agent sees the responses before its own; without, each sees the bare query.
        observed: Which of them it sees, from the third agent on: `all`, the `last`, or the `best` by task reward (of
            equals the earliest).
        partner_reward: α in r_i + α · Σ_{j≠i} r_j: 1 cooperative as in the paper, 0 independent, −1 competitive.
        max_prompt_tokens: The longest prompt, in tokens; a longer one loses the end of its reference.
        max_response_tokens: The longest response, in tokens.
        vocab_size: Token ids are below this number; by default that after the tokenizer's largest id. Models may pad
            theirs.
        num_embeddings: Token ids of prompts are below this number; by default `vocab_size`. Tokenizers may have tokens
            beyond the embeddings, which no prompt may hold.
        stop_token_ids: Tokens that end a response beside the tokenizer's end-of-sequence token.
        stop: A text that ends a response as well: its last token is the first by which the text is complete, and its
            text is what stands before.
        chat: Whether each prompt is a user's message in the tokenizer's chat template.
        system_prompt: With `chat`, a system message before it.
        chat_date: With `chat`, the date that the template gets as today's, as YYYY-MM-DD; None: today's.
    """

    num_agents: int = 2
    knowledge_transfer: bool = True
    observed: Observed = "all"
    partner_reward: float = 1.0
    max_prompt_tokens: int = MAX_PROMPT
    max_response_tokens: int = MAX_RESPONSE
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
                "but both must be at least 1 "
                "token."
            )
        if self.observed not in get_args(Observed):
            raise ValueError(f"observed is {self.observed!r}, but must be one of: {', '.join(get_args(Observed))}.")
        if not math.isfinite(self.partner_reward):
            raise ValueError(f"partner_reward is {self.partner_reward}, but must be a finite number; the paper's is 1.")


class Chain:
    """What all episodes share: task, tokenizer, roles, limits and spaces. Holds no state of any episode.

    Attributes:
        at: By position, the chain by whose tokenizer that agent reads and writes: this one, if not said otherwise.
        ends: The tokens that end a response; `stop_token_ids` is the same, in order.
        stops: The stop text, or none, as `Detokenizer` takes them.
    """

    at: "tuple[Chain, ...]"

    def __init__(self, task: Task, tokenizer: "PreTrainedTokenizerBase", **settings: Any) -> None:
        """Describes a chain.

        Args:
            task: Queries and prompts.
            tokenizer: The tokenizer of the model that plays.
            **settings: Those of `ChainSettings`.

        Raises:
            ValueError: A setting is out of range, or there is no token that could end a response.
            ChatError: The chat template is missing or unfit, or a query is a conversation and `chat` is off.
        """
        s = ChainSettings(**settings)
        self.chat = ChatFormat(tokenizer, s.system_prompt, s.chat_date) if s.chat else None
        vocab = tokenizer.get_vocab()
        self._known = max(vocab.values()) + 1  # ids may have gaps
        self.vocab_size = s.vocab_size or self._known
        self.num_embeddings = s.num_embeddings or self.vocab_size
        holding = [] if s.stop is None else tokens_holding(tokenizer, s.stop)
        turn_end = None if self.chat is None else self.chat.turn_end([tokenizer.eos_token_id, *s.stop_token_ids])
        ends = [
            end
            for end in dict.fromkeys([tokenizer.eos_token_id, *s.stop_token_ids, turn_end, *holding])
            if end is not None and 0 <= end < self.vocab_size
        ]
        if not ends:
            raise ValueError(
                "The tokenizer has no end-of-sequence token, or the model no embedding for it, so no response could "
                "ever end. Set its eos_token."
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
        self.stop_token_ids = tuple(ends)
        self.ends = frozenset(ends)  # they may be hundreds
        self._hidden = self.ends.difference(holding)  # these have no text of the response in them
        templates = (task.prompt_template, task.observer_template, task.reference_separator)
        written = [literal for template in templates for literal in literals(template)]
        self._unembedded = {token: text for text, token in vocab.items() if token >= self.num_embeddings}
        refused = self._hidden.union(self._unembedded)
        self.control = ControlTokens(tokenizer, refused, [*written, self.chat.written] if self.chat else written)
        self._columns = {name for template in templates for name in placeholders(template)}  # that prompts hold
        pad: int = tokenizer.pad_token_id or 0
        self.pad_token_id = pad if pad < self.num_embeddings else 0
        self._anchor: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._anchor_text = self._decode(self._anchor)
        self.at = (self,) * len(self.roles)

    def with_readers(self, others: "Sequence[Chain]") -> Self:
        """Returns this chain with agents of different tokenizers: what one hands to the next is text.

        Ask the chains in its `at` to encode and decode: what it has of its own is still one tokenizer's.

        Args:
            others: By position, a chain like this one but for its tokenizer.
        """
        mixed = copy.copy(self)
        mixed.at = tuple(others)
        mixed.vocab_size = max(other.vocab_size for other in others)
        return mixed

    @property
    def max_references(self) -> int:
        """The most earlier responses that one prompt holds."""
        earlier = len(self.roles) - 1 if self.knowledge_transfer else 0
        return earlier if self.observed == "all" else min(earlier, 1)

    def observation_space(self) -> spaces.Dict:
        """Returns a new observation space, the same for each role. Length 0 is the view before an agent's turn."""
        tokens = spaces.Box(0, self.vocab_size - 1, (self.max_prompt_tokens,), np.int32)
        return spaces.Dict(tokens=tokens, length=spaces.Discrete(self.max_prompt_tokens + 1))

    def action_space(self) -> spaces.Dict:
        """Returns a new action space, the same for each role."""
        tokens = spaces.MultiDiscrete([self.vocab_size] * self.max_response_tokens)
        return spaces.Dict(tokens=tokens, length=spaces.Discrete(self.max_response_tokens, start=1))

    def encode(self, prompts: Sequence[tuple[str, Sequence[Message] | None]]) -> list[list[int]]:
        """Tokenises prompts, each a filled template and, with `chat`, the messages before it.

        Special tokens come from the chat template, where it is on, or else from the tokenizer's defaults (a BOS, for
        models that have one): never from both. What is put into a template has to be masked (`ControlTokens.mask`), or
        it counts as a part of it.

        Raises:
            ChatError: The chat template cannot render a prompt.
        """
        texts = [text if self.chat is None else self.chat.render(text, history or ()) for text, history in prompts]
        return self.control.encode(texts, add_special_tokens=self.chat is None)

    def encode_first(self, queries: Sequence[Query]) -> list[list[int]]:
        """Tokenises the pioneer's prompts.

        Raises:
            NoEmbeddingError: One holds a token that the model has no embedding for.
        """
        masked = [self._masked(query) for query in queries]
        return self._embedded(queries, self.encode([(self.task.prompt(query), query.history) for query in masked]))

    def encode_later(self, turns: Sequence[tuple[Query, Sequence[str]]]) -> list[list[int]]:
        """Tokenises the prompts of agents that follow responses, given as text.

        Raises:
            NoEmbeddingError: One holds a token that the model has no embedding for, whatever the responses are.
        """
        mask = self.control.mask
        masked = [(self._masked(query), list(map(mask, texts))) for query, texts in turns]
        prompts = self.encode([(self.task.observer_prompt(query, texts), query.history) for query, texts in masked])
        return [self._spell_out(*turn, prompt) for turn, prompt in zip(masked, prompts, strict=True)]

    def _masked(self, query: Query) -> Query:
        """Returns a query whose texts become no control tokens in a prompt."""
        mask = self.control.mask
        columns = dict(query.columns)
        for name, value in query.columns.items():
            text = str(value)
            if (isinstance(value, str) or name in self._columns) and (masked := mask(text)) != text:
                columns[name] = masked
        history = query.history
        if history is not None:
            history = tuple(Message(role=message["role"], content=mask(message["content"])) for message in history)
        return replace(query, text=mask(query.text), columns=columns, history=history)

    def _embedded(self, queries: Sequence[Query], prompts: list[list[int]]) -> list[list[int]]:
        """Returns the prompts if none holds a token without an embedding."""
        for query, prompt in zip(queries, prompts, strict=True) if self._unembedded else ():
            if token := next((token for token in prompt if token in self._unembedded), None):
                raise NoEmbeddingError(
                    f"The prompt of query {query.id} of task {self.task.name} holds the token "
                    f"{self._unembedded[token]!r} with id {token}, but `{self.tokenizer.name_or_path}` has "
                    f"{self.num_embeddings} embeddings. Change the prompt, use the tokenizer that the model was "
                    "trained with, or resize the model's embeddings."
                )
        return prompts

    def _spell_out(self, query: Query, texts: Sequence[str], prompt: list[int]) -> list[int]:
        """Spells tokens without an embedding by their characters if it is a response that brings them."""
        unembedded = self._unembedded.keys() & prompt
        if not unembedded:
            return prompt
        self._embedded([query], self.encode([(self.task.observer_prompt(query, [""] * len(texts)), query.history)]))
        spelled: dict[int, list[int]] = {}
        for token in unembedded:
            characters = self.tokenizer(list(self._unembedded[token]), add_special_tokens=False)["input_ids"]
            spelled[token] = [part for ids in characters for part in ids if part < self.num_embeddings]
        return [part for token in prompt for part in spelled.get(token, [token])]

    def cut(self, tokens: list[int]) -> tuple[list[int], bool]:
        """Cuts a response after what ends it: a token, or the one that completes the stop text.

        Returns:
            Its tokens, and whether it ends so; else its length was cut.
        """
        tokens = tokens[: next((length for length, token in enumerate(tokens, start=1) if token in self.ends), None)]
        ended = tokens[-1] in self.ends
        if self.stop is None or self.stop not in self.decode_whole(tokens if not ended else tokens[:-1]):
            return tokens, ended
        # The stop text spans several tokens, none of which holds all of it.
        stop = self.stop
        length = bisect_left(range(len(tokens)), True, key=lambda end: stop in self.decode_whole(tokens[:end]))
        return tokens[:length], True

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns a response as text, as rewards and later agents see it: `decode_whole` up to the stop text."""
        text = self.decode_whole(tokens)
        return text if self.stop is None else text.partition(self.stop)[0]

    def decode_whole(self, tokens: Sequence[int]) -> str:
        """Returns a response as text, without special tokens and with its leading space: prompt + text reads right.

        Some tokenizers drop the first space of whatever they decode, so a known token stands before the response and is
        taken off again.
        """
        tokens = [token for token in tokens if token not in self._hidden]  # not all of them need be special
        text = self._decode([*self._anchor, *tokens])
        return text.removeprefix(self._anchor_text) if text.startswith(self._anchor_text) else self._decode(tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        known = [token for token in tokens if token < self._known]  # some tokenizers raise where a model's ids go on
        text = self.tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # a list of texts comes back only for a batch
        return text

    def build_prompt(
        self, query: Query, responses: Sequence[Sequence[int]], wrote: "Sequence[Chain] | None" = None
    ) -> tuple[list[int], bool]:
        """Builds the prompt of an agent that sees `responses`.

        A prompt that would not fit `max_prompt_tokens` is cut: the query is kept whole, and the reference loses
        tokens from
        its end (the last response first) until the prompt fits. A response that has lost all of them is left out.

        Args:
            query: The query.
            responses: Earlier responses as tokens, in the chain's order; none of them for the pioneer.
            wrote: For each, the chain whose tokenizer has these tokens, if not this one.

        Returns:
            The prompt's tokens, 1 to `max_prompt_tokens` of them, and whether the reference was cut.

        Raises:
            QueryTooLong: The prompt does not fit even without any reference.
        """
        if not responses or not self.knowledge_transfer:
            prompt = self.encode_first([query])[0]
            if len(prompt) > self.max_prompt_tokens:
                raise self._too_long(query, len(prompt))
            return prompt, False
        readers, total = wrote or [self] * len(responses), sum(map(len, responses))

        def refer(keep: int) -> list[int]:
            """Returns the prompt with the first `keep` tokens of the responses."""
            texts = []
            for response, reader in zip(responses, readers, strict=True):
                if keep > 0:
                    texts.append(reader.decode(response[:keep]))
                keep -= len(response)
            return self.encode_later([(query, texts or [""])])[0]

        prompt = refer(total)
        if len(prompt) <= self.max_prompt_tokens:
            return prompt, False
        if len(bare := refer(0)) > self.max_prompt_tokens:
            raise self._too_long(query, len(bare))
        # Text is tokenised anew at each try, because tokens merge across seams.
        keep = bisect_left(range(1, total), True, key=lambda keep: len(refer(keep)) > self.max_prompt_tokens)
        return refer(keep), True

    def _too_long(self, query: Query, length: int) -> QueryTooLong:
        return QueryTooLong(
            f"Query {query.id} of task {self.task.name} needs a prompt of {length} tokens without any reference, but "
            f"max_prompt_tokens is {self.max_prompt_tokens}: {query.text[:80]!r}. Raise max_prompt_tokens to at least "
            f"{length}, or shorten "
            "or remove the query."
        )
