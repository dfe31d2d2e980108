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
    and whatever a run's seed is. A cut may fall inside a word, as the paper's do; one inside a character loses it.

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
        opening = str(tokenizer.decode(ids[: lengths.randint(shortest, longest)], clean_up_tokenization_spaces=False))
        cut.append(replace(query, text=opening.rstrip("\N{REPLACEMENT CHARACTER}")))
    return cut
