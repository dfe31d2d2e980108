"""Parts of `PolicyModel.check_forward`: test rows, what a model computes by its own code, and the differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from policies.learning.forward.prefix_tree import LONGEST_PACK, Layout, Paths
from policies.learning.rows import Rows, make_rows, select_rows
from policies.models.model_check import ModelError

_NUM_GENERATED = 3
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
OTHER_IN_GENERATION = (
    "log-probabilities differ by {} from those of its own generation, token by token. Set model to one of another "
    "family."
)
OTHER_THAN_EAGER = (
    "log-probabilities with ATTENTION attention differ by {} from eager attention, its definition. Set "
    '"attn_implementation": "eager" in its config.json.'
)


class OwnLogprobs(NamedTuple):
    """Log-probabilities of tokens of one row, fp32; all the same if the model is causal and its cache is correct."""

    row: Tensor
    """`[T - 1]`, of the whole row."""
    beginning: Tensor
    """`[T - 3]`, of the row without its last three tokens, and of the first of these."""
    generated: Tensor
    """`[3]`, of the last three in generation with a cache; fewer after an end token, none if generation fails."""


class _ForcedTokens(LogitsProcessor):
    """Makes greedy search generate the tokens of a row."""

    def __init__(self, row: Tensor) -> None:
        self.row = row

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns logits `[1, V]` that are finite for the row's next token only."""
        token = self.row[:, input_ids.shape[1]].unsqueeze(1)
        return torch.full_like(scores, float("-inf")).scatter(1, token, 0.0)


def own_logprobs(lm: PreTrainedModel, row: Tensor, temperature: float) -> OwnLogprobs:
    """Computes log-probabilities of an unpadded row, for which the model's code chooses positions and masks.

    Args:
        row: tokens, int64 `[1, T]`.
    """
    start = row.shape[1] - _NUM_GENERATED

    def logprobs(logits: Tensor, first: int) -> Tensor:
        """Of the tokens from `first` on, by the logits `[N, V]` before each."""
        tokens = row[0, first : first + len(logits)].unsqueeze(1)
        return torch.log_softmax(logits.float() / temperature, dim=-1).gather(1, tokens).squeeze(1)

    def forward(tokens: Tensor) -> Tensor:
        out = lm(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
        logits: Tensor = out.logits[0, -tokens.shape[1] :]
        return logits

    return OwnLogprobs(
        logprobs(forward(row)[:-1], 1),
        logprobs(forward(row[:, :start]), 1),
        logprobs(_generation_logits(lm, row, start), start),
    )


def _generation_logits(lm: PreTrainedModel, row: Tensor, start: int) -> Tensor:
    """The logits `[N, V]` from which the row's tokens from `start` on are generated; N is 0 if generation fails."""
    config = GenerationConfig(
        max_new_tokens=row.shape[1] - start,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = row[:, :start]
    try:
        out = lm.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=config,
            logits_processor=LogitsProcessorList([_ForcedTokens(row)]),
        )
    except torch.OutOfMemoryError:
        raise
    except _FAILURES:  # it may still run in vLLM
        return torch.empty(0, 1, device=row.device)
    return torch.cat(out.logits)


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
    packs = paths.packs(LONGEST_PACK, len(rows["mask"]))
    tree_rows = {name: column.to(device) for name, column in select_rows(rows, paths.index(packs)).items()}
    plain = score(tree_rows, None)
    try:
        tree = score(tree_rows, paths.layout(packs).to(device))
    except torch.OutOfMemoryError:
        raise
    except _FAILURES:  # for a mask with four dimensions
        return math.inf
    return float((tree - plain).abs()[tree_rows["mask"].bool()].mean())


def reject_difference(one: Tensor, other: Tensor, reason: str, *, limit: float, path: str) -> None:
    """Rejects a model if two computations of its log-probabilities differ.

    Args:
        one: log-probabilities; none: they were not computed.
        reason: of the difference, for which `{}` stands, and what to do.
    """
    difference = float((one - other).abs().mean()) if len(one) else 0.0
    if not difference <= limit:
        raise ModelError(f"`{path}`: " + reason.replace("{}", f"{difference:.2g} nats (allowed: {limit:g})"))


def _make_rows(prompts: list[list[int]], responses: list[list[int]]) -> Rows:
    logprobs = [[0.0] * len(response) for response in responses]
    return make_rows(prompts, responses, logprobs, [0.0] * len(prompts), [False] * len(prompts))


def _tokens(count: int, vocabulary: int) -> list[int]:
    """Arbitrary tokens."""
    return [(11 * count + 7 * index) % vocabulary for index in range(count)]
