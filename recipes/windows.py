"""Training windows of the language model: token sequences of equal length from reviews.

A window starts at the beginning of a review or sentence, like a rollout; so reviews are not packed across the whole
corpus. If a review ends inside a window, EOS and another review follow.
"""

import random
from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from recipes.corpus import Review, sentence_starts

OBSERVER_PROMPT = 'I can make this sentence "{reference}" more positive: {query}'
OPENING_SHARE = 0.4  # share of windows that start at a review's beginning; the others start at a random sentence
OBSERVER_SHARE = 0.08  # share of tokens in windows that start with an observer's prompt
_CHARACTERS_PER_TOKEN = 9  # upper estimate for these texts


class Windows:
    """Draws random batches of windows from reviews."""

    def __init__(self, reviews: Sequence[Review], tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        """Indexes the reviews.

        Args:
            reviews: Cleaned, labelled reviews.
            tokenizer: The language model's tokenizer; its EOS separates reviews.
            seed: Random seed of the windows.
        """
        self._texts = [review.text for review in reviews]
        self._starts = [sentence_starts(text) for text in self._texts]
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._negative = [review.text for review in reviews if review.label == 0]
        self._positive = [review.text for review in reviews if review.label == 1]
        self._positive_by_start: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for text in self._positive:
            words = text.split(" ", 3)
            for size in (1, 2, 3):
                self._positive_by_start[tuple(words[:size])].append(text)

    def draw(self, rows: int, length: int, observers: int = 0) -> torch.Tensor:
        """Draws a batch of windows.

        The last `observers` windows start with an observer's prompt. Their reference is the opening of a negative
        review, and the text after `more positive: ` is a positive review with the same first one to three words, if
        possible, because a reference also starts with the query.

        Args:
            rows: Number of windows.
            length: Tokens per window.
            observers: Number of windows with an observer's prompt.

        Returns:
            Token ids, int64 [rows, length].
        """
        texts = [self._review_text(length) for _ in range(rows - observers)]
        texts += [self._observer_text(length) for _ in range(observers)]
        return torch.tensor(self._tokenizer(texts, truncation=True, max_length=length)["input_ids"])

    def _review_text(self, length: int) -> str:
        index = self._rng.randrange(len(self._texts))
        start = 0 if self._rng.random() < OPENING_SHARE else self._rng.choice(self._starts[index])
        return self._fill(self._texts[index][start:], length)

    def _observer_text(self, length: int) -> str:
        negative = self._rng.choice(self._negative)
        words = negative.split(" ", 24)
        matches = [texts for size in (3, 2, 1) if (texts := self._positive_by_start.get(tuple(words[:size])))]
        positive = self._rng.choice(matches[0] if matches else self._positive)
        reference = " ".join(words[: self._rng.randint(3, 20)])
        return self._fill(OBSERVER_PROMPT.format(reference=reference, query=positive), length)

    def _fill(self, text: str, length: int) -> str:
        """Appends EOS and other reviews until `text` certainly has `length` tokens."""
        while len(text) < length * _CHARACTERS_PER_TOKEN:
            text += f"{self._tokenizer.eos_token}{self._rng.choice(self._texts)}"
        return text[: length * _CHARACTERS_PER_TOKEN]
