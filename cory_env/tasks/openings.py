"""Cuts long texts to their first few tokens, as the paper makes queries of film reviews."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cory_env.tasks.task import Query

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_READ_AHEAD = 32  # characters per token: more than any text here needs, so that a long text is not tokenised whole


def cut_queries(
    queries: Sequence[Query], tokenizer: "PreTrainedTokenizerBase", shortest: int, longest: int
) -> list[Query]:
    """Returns the queries, each cut to its first `shortest` to `longest` tokens.

    The lengths are drawn anew from the same seed at each call, so a data set gives the same queries in every process
    and whatever a run's seed is. A cut may fall inside a word, as the paper's do; one inside a character loses it,
    but the first character is kept whole.

    Args:
        queries: In the data's order.
        tokenizer: The tokenizer of the model that plays, in whose tokens lengths are counted.
        shortest: At least 1. A text that is shorter stays whole.
        longest: At least `shortest`.
    """
    lengths = random.Random(0)
    texts = [query.text.lstrip()[: longest * _READ_AHEAD] for query in queries]
    tokens = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    cut = []
    for query, ids in zip(queries, tokens, strict=True):
        length = lengths.randint(shortest, longest)
        while not (opening := _opening(tokenizer, ids[:length])).strip() and length < len(ids):
            length += 1  # so far only a part of its first character
        cut.append(replace(query, text=opening))
    return cut


def _opening(tokenizer: "PreTrainedTokenizerBase", tokens: list[int]) -> str:
    text = str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
    return text.rstrip("\N{REPLACEMENT CHARACTER}")
