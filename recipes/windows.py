"""Training windows of the language model: token sequences of one length, cut from reviews.

Left out: packing across the whole corpus. A window starts at a review's opening or at a sentence, because a rollout's
first token does. A review that ends inside a window is followed by EOS and another opening.
"""

import random
from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from recipes.corpus import Review, sentence_starts

OBSERVER_PROMPT = 'I can make this sentence "{reference}" more positive: {query}'
OPENING_SHARE = 0.4  # of windows start at a review's opening, the others at a random sentence
OBSERVER_SHARE = 0.08  # of tokens are in windows that start with an observer's prompt
_CHARACTERS_PER_TOKEN = 9  # read ahead: more than any text here needs


class Windows:
    """Draws batches of windows from reviews, each from a random state of its own."""

    def __init__(self, reviews: Sequence[Review], tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        """Indexes the reviews.

        Args:
            reviews: Cleaned, labelled reviews.
            tokenizer: The language model's; its EOS separates reviews.
            seed: Seed of every draw.
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
        """Returns `rows` windows of `length` tokens, the last `observers` of which start with an observer's prompt.

        In these the reference is the opening of a negative review, and what follows `more positive: ` is a positive
        review that shares its first one to three words, as an observer's query is also where the reference starts.

        Returns:
            int64 [rows, length].
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
        matches = [found for size in (3, 2, 1) if (found := self._positive_by_start.get(tuple(words[:size])))]
        positive = self._rng.choice(matches[0] if matches else self._positive)
        reference = " ".join(words[: self._rng.randint(3, 20)])
        return self._fill(OBSERVER_PROMPT.format(reference=reference, query=positive), length)

    def _fill(self, text: str, length: int) -> str:
        """Appends EOS and other openings until `text` surely has `length` tokens."""
        while len(text) < length * _CHARACTERS_PER_TOKEN:
            text += f"{self._tokenizer.eos_token}{self._rng.choice(self._texts)}"
        return text[: length * _CHARACTERS_PER_TOKEN]
