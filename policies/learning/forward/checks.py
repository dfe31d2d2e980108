"""Parts of `PolicyModel.check_forward`: test rows, what a model computes by its own code, and the differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from policies.learning.forward.prefix_tree import LONGEST_PACK, Layout, Paths
from policies.learning.rows import Rows, make_rows
from policies.models.model_check import ModelError

_FAILURES = (ValueError, TypeError, RuntimeError, LookupError, AttributeError)
"""Errors of a family's code that does not support what it is asked for."""
NOT_CAUSAL = (
    "later tokens change the log-probabilities of earlier ones by {}: it is not a causal language model. Set model to "
    "one that is."
)
OTHER_POSITIONS = (
    "log-probabilities differ by {} from those of its own forward pass, whose positions do not start at 0, as in "
    "RoBERTa. Set model to one of another family."
)
IGNORES_PADDING = (
    "log-probabilities change by {} when a row is batched with a longer one: its code ignores padding or positions, or "
    "depends on the longest row. Set model to one of another family."
)
OTHER_THAN_EAGER = (
    "log-probabilities with ATTENTION attention differ by {} from eager attention, its definition. Set "
    '"attn_implementation": "eager" in its config.json.'
)


def own_logprobs(lm: PreTrainedModel, row: Tensor, length: int, temperature: float) -> Tensor:
    """Log-probabilities of an unpadded row's tokens after the first, for which the model's code chooses positions.

    Args:
        row: tokens, int64 `[1, T]`.
        length: number of tokens that are forwarded, which predict as many, or of the whole row one fewer.
    """
    tokens, predicted = row[:, :length], row[0, 1 : 1 + length].unsqueeze(1)
    logits = lm(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits[0, -length:]
    logprobs = torch.log_softmax(logits[: len(predicted)].float() / temperature, dim=-1)
    return logprobs.gather(1, predicted).squeeze(1)


def padded_rows(vocabulary: int, max_length: int | None) -> Rows:
    """Two rows, the second with the longer prompt."""
    longer = 24 if max_length is None else max(min(24, max_length - 8), 4)
    return _make_rows(
        [_tokens(3, vocabulary), _tokens(longer, vocabulary)], [_tokens(8, vocabulary), _tokens(6, vocabulary)]
    )


def move_last_row(layout: Layout, positions: int) -> Layout:
    """Moves the last of several plain rows to the last of `positions`, as if much text came before it.

    A model that treats all rows of a batch as long ones then does so with the other rows.
    """
    depths = layout.depths.clone()
    depths[-1] += max(positions - 1 - int(depths[-1].max()), 0)
    return layout._replace(depths=depths)


def tree_difference(score: Callable[[Rows, Layout | None], Tensor], vocabulary: int, device: torch.device) -> float:
    """The mean difference of log-probabilities in a prefix tree from plain rows'; infinite if a tree fails.

    Args:
        score: computes the log-probabilities of rows in a layout.
    """
    fork = _tokens(3, vocabulary) + _tokens(4, vocabulary) + _tokens(5, vocabulary)  # continues the first response
    rows = _make_rows(
        [_tokens(3, vocabulary), _tokens(3, vocabulary), fork],
        [_tokens(4, vocabulary), _tokens(2, vocabulary) + _tokens(3, vocabulary), _tokens(4, vocabulary)],
    )
    paths = Paths(rows)
    packs = paths.packs(LONGEST_PACK, len(rows))
    tree_rows = rows.select(paths.index(packs)).to(device)
    plain = score(tree_rows, None)
    try:
        tree = score(tree_rows, paths.layout(packs).to(device))
    except torch.OutOfMemoryError:
        raise
    except _FAILURES:  # for a mask with four dimensions
        return math.inf
    return float((tree - plain).abs()[tree_rows.mask.bool()].mean())


def reject_difference(one: Tensor, other: Tensor, reason: str, *, limit: float, path: str) -> None:
    """Rejects a model if two computations of its log-probabilities differ.

    Args:
        reason: of the difference, for which `{}` stands, and what to do.
    """
    difference = float((one - other).abs().mean())
    if not difference <= limit:
        raise ModelError(f"`{path}`: " + reason.replace("{}", f"{difference:.2g} nats (allowed: {limit:g})"))


def _make_rows(prompts: list[list[int]], responses: list[list[int]]) -> Rows:
    logprobs = [[0.0] * len(response) for response in responses]
    return make_rows(prompts, responses, logprobs, [0.0] * len(prompts), [False] * len(prompts))


def _tokens(count: int, vocabulary: int) -> list[int]:
    """Arbitrary tokens."""
    return [(11 * count + 7 * index) % vocabulary for index in range(count)]
