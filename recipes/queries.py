"""`imdb-queries`: review openings of 2 to 8 tokens, what the pioneer and the observer are asked to continue."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from recipes.cards import Figures
from recipes.corpus import Corpus, Review

SHORTEST, LONGEST = 2, 8
WORD_START = "Ġ"  # how a byte-level BPE writes the space that begins a word


def opening(text: str, tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> str | None:
    """Returns the first 2 to 8 tokens of `text` as text, or None where no fitting cut exists.

    The length is drawn among those after which a new word starts. Tokenising the result gives the same tokens.
    """
    tokens = tokenizer(text[:200])["input_ids"]
    pieces = tokenizer.convert_ids_to_tokens(tokens)
    cuts = [cut for cut in range(SHORTEST, LONGEST + 1) if cut < len(pieces) and pieces[cut].startswith(WORD_START)]
    if not cuts:
        return None
    kept = tokens[: rng.choice(cuts)]
    query = str(tokenizer.decode(kept))
    return query if tokenizer(query)["input_ids"] == kept else None


def openings(
    reviews: Sequence[Review], count: int, tokenizer: PreTrainedTokenizerBase, rng: random.Random, taken: set[str]
) -> Iterator[str]:
    """Yields up to `count` openings of `reviews` that are not in `taken`, adding each to it."""
    for review in reviews:
        query = opening(review.text, tokenizer, rng) if count else None
        if query is not None and query not in taken:
            taken.add(query)
            count -= 1
            yield query


def build(
    folder: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, train: int, test: int, seed: int
) -> Figures:
    """Writes `train.jsonl` (openings of training reviews) and `test.jsonl` (of held-out reviews), one query per line.

    Args:
        folder: Where to write.
        corpus: The reviews.
        tokenizer: The language model's.
        train: Number of training queries.
        test: Number of test queries.
        seed: Seed of the lengths.
    """
    rng = random.Random(seed)
    taken: set[str] = set()
    figures: Figures = {}
    for name, reviews, count in (("test", corpus.held_out, test), ("train", corpus.train, train)):
        queries = list(openings(reviews, count, tokenizer, rng, taken))
        lines = [json.dumps({"query": query}, ensure_ascii=False) for query in queries]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        lengths = Counter(len(tokenizer(query)["input_ids"]) for query in queries)
        figures[f"{name} queries"] = len(queries)
        figures[f"{name} queries by length in tokens"] = ", ".join(
            f"{size}: {n}" for size, n in sorted(lengths.items())
        )
    figures["examples"] = queries[:8]
    return figures
