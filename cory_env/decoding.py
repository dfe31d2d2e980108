"""Reads responses: where one ends, its text, and the thought that a reasoning model writes before its answer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cory_env.chain_settings import ChainSettings, Thinking
from cory_env.message import has_surrogate
from cory_env.tokenizer import token_ids_containing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ThinkingError(ValueError):
    """The tags of `thinking` do not suit a tokenizer."""


class ThinkingTags:
    """The tags of a thought as tokens. Decoding may drop them, so thoughts are found by token ids.

    Attributes:
        start, end: The tags' texts.
        start_id, end_id: Their token ids.
    """

    def __init__(self, thinking: Thinking, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        """Looks up the tags."""
        self.start, self.end = thinking.start, thinking.end
        vocab = tokenizer.get_vocab()
        for name, tag in (("start", self.start), ("end", self.end)):
            if vocab.get(tag, vocab_size) >= vocab_size:
                raise ThinkingError(
                    f"thinking.{name}={tag!r} is not a token of {tokenizer.name_or_path}. Set the tags that the model "
                    "was trained with, or set thinking=null."
                )
        self.start_id, self.end_id = vocab[self.start], vocab[self.end]
        self._tokenizer = tokenizer

    def at_end_of(self, prompt: Sequence[int]) -> bool:
        """Returns whether a prompt ends with the start tag, with nothing but space after it."""
        if self.start_id not in prompt:
            return False
        start = max(index for index, token in enumerate(prompt) if token == self.start_id)
        return not str(self._tokenizer.decode(list(prompt[start + 1 :]))).strip()

    def answer_start(self, response: Sequence[int], inside: bool) -> int | None:
        """Returns the index of the first token of the answer in a response.

        Args:
            inside: Whether the prompt begins the thought (`Prompt.begins_thought`).

        Returns:
            The index after the first end tag in a thought; 0 if there is no thought; None if the thought was cut off.
        """
        for index, token in enumerate(response):
            if token == self.end_id and inside:
                return index + 1
            inside = inside or token == self.start_id
        return None if inside else 0

    def thought(self, response: Sequence[int], inside: bool) -> list[int] | None:
        """Returns the tokens of the thought without its tags; None if there is none."""
        end = self.answer_start(response, inside)
        if end == 0:
            return None
        thought = list(response[:end])
        start = 0 if inside else thought.index(self.start_id)
        return [token for token in thought[start:] if token not in (self.start_id, self.end_id)]

    def split(self, tokens: Sequence[int]) -> Iterator[str | list[int]]:
        """Yields the parts of a response: its tags as text, and the tokens between them."""
        part: list[int] = []
        for token in tokens:
            if token in (self.start_id, self.end_id):
                yield from filter(None, [part])
                yield self.start if token == self.start_id else self.end
                part = []
            else:
                part.append(token)
        yield from filter(None, [part])


class ResponseDecoder:
    """Reads the responses of models with one tokenizer.

    Attributes:
        tokenizer: The tokenizer.
        vocab_size: Upper bound of token ids in responses (exclusive).
        stop_token_ids: Ids of the tokens that end a response; `end_token_ids` is the same as a set.
        stop: A text that ends a response, too; None: there is none.
        tags: The tags around thoughts; None: responses contain no thoughts.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, settings: ChainSettings, end_token_ids: Sequence[int | None]
    ) -> None:
        """Looks up the tokens that end a response: `end_token_ids`, and those that contain the stop string."""
        self.tokenizer = tokenizer
        self.stop = settings.stop
        self._tokenizer_vocab_size = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps
        self.vocab_size = settings.vocab_size or self._tokenizer_vocab_size
        ids_with_stop = [] if self.stop is None else token_ids_containing(tokenizer, self.stop)
        self.stop_token_ids = tuple(
            token
            for token in dict.fromkeys([*end_token_ids, *ids_with_stop])
            if token is not None and 0 <= token < self.vocab_size
        )
        if not self.stop_token_ids:
            raise ValueError(
                "No token can end a response: the tokenizer has no end-of-sequence token, or the model has no "
                "embedding for it. Set the tokenizer's eos_token."
            )
        self.end_token_ids = frozenset(self.stop_token_ids)  # there may be hundreds
        self._hidden_ids = self.end_token_ids.difference(ids_with_stop)  # they contain no text of the response
        self._anchor: list[int] = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        self._anchor_text = self._decode(self._anchor)
        thinking = settings.thinking
        self.tags = None if thinking is None else ThinkingTags(thinking, tokenizer, self.vocab_size)

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

    def without_end(self, response: Sequence[int]) -> Sequence[int]:
        """Returns a response without the token that ended it, if that contains no text."""
        return response[:-1] if response and response[-1] in self._hidden_ids else response

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns a response as rewards and later agents see it: `decode_untruncated` up to the stop string."""
        text = self.decode_untruncated(tokens)
        return text if self.stop is None else text.partition(self.stop)[0]

    def decode_untruncated(self, tokens: Sequence[int]) -> str:
        """Returns a response as text, without end tokens, with its leading space so that prompt + text reads right.

        The tags around a thought are part of the text, also if they are special tokens.
        """
        parts = [tokens] if self.tags is None else self.tags.split(tokens)
        return "".join(part if isinstance(part, str) else self._decode_part(part) for part in parts)

    def answer_start(self, response: Sequence[int], inside: bool) -> int | None:
        """Returns the index of the answer's first token; 0 without a thought, None if the thought was cut off."""
        return 0 if self.tags is None else self.tags.answer_start(response, inside)

    def thought_text(self, response: Sequence[int], inside: bool) -> str | None:
        """Returns the thought in a response, without its tags; None if there is none. Arguments as `answer_start`."""
        thought = None if self.tags is None else self.tags.thought(response, inside)
        return None if thought is None else self.decode_untruncated(thought)

    def _decode_part(self, tokens: Sequence[int]) -> str:
        """Decodes tokens without tags.

        Some tokenizers drop the first space of decoded text. So the tokens are decoded after a fixed anchor token, and
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
        if not has_surrogate(text):
            return text
        # A tokenizer written in Python may have tokens that are half of a pair: joined if the other half follows.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
