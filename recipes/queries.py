"""`imdb-queries`: review openings of 2 to 8 tokens, which the agents continue."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from recipes.cards import Figures
from recipes.corpus import Corpus, Review

MIN_TOKENS, MAX_TOKENS = 2, 8
WORD_START = "Ġ"  # the space that begins a word in byte-level BPE


def sample_opening(text: str, tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> str | None:
    """Returns the first 2 to 8 tokens of `text` as text, or None if there is no suitable length.

    The random length is one after which a new word starts. Tokenizing the result gives the same tokens.
    """
    tokens = tokenizer(text[:200])["input_ids"]
    pieces = tokenizer.convert_ids_to_tokens(tokens)
    lengths = [n for n in range(MIN_TOKENS, MAX_TOKENS + 1) if n < len(pieces) and pieces[n].startswith(WORD_START)]
    if not lengths:
        return None
    prefix = tokens[: rng.choice(lengths)]
    query = str(tokenizer.decode(prefix))
    return query if tokenizer(query)["input_ids"] == prefix else None


def sample_openings(
    reviews: Sequence[Review], count: int, tokenizer: PreTrainedTokenizerBase, rng: random.Random, used: set[str]
) -> Iterator[str]:
    """Yields up to `count` openings of `reviews` that are not in `used`, and adds them to it."""
    for review in reviews:
        query = sample_opening(review.text, tokenizer, rng) if count else None
        if query is not None and query not in used:
            used.add(query)
            count -= 1
            yield query


def build(
    folder: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, train: int, test: int, seed: int
) -> Figures:
    """Writes `train.jsonl` (openings of training reviews) and `test.jsonl` (of held-out reviews), one query per line.

    Args:
        folder: The output folder.
        corpus: The reviews.
        tokenizer: The language model's tokenizer.
        train: Number of training queries.
        test: Number of test queries.
        seed: Random seed of the lengths.

    Returns:
        The measured figures.
    """
    rng = random.Random(seed)
    used: set[str] = set()
    figures: Figures = {}
    for name, reviews, count in (("test", corpus.held_out, test), ("train", corpus.train, train)):
        queries = list(sample_openings(reviews, count, tokenizer, rng, used))
        lines = [json.dumps({"query": query}, ensure_ascii=False) for query in queries]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        lengths = Counter(len(tokenizer(query)["input_ids"]) for query in queries)
        figures[f"{name} queries"] = len(queries)
        figures[f"{name} queries by length in tokens"] = ", ".join(
            f"{size}: {n}" for size, n in sorted(lengths.items())
        )
    figures["examples"] = queries[:8]
    return figures
