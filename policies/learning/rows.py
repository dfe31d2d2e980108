"""Rows of padded token tensors, and how they are dealt into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from policies.models.language_model import left_padded

Rows = dict[str, Tensor]
"""Columns of one LLM's rows, by name. `B` responses, `P` prompt tokens, padded on the left, `R` response tokens, padded
on the right.

As they were played (`make_rows`):
    prompts           int64 [B, P]
    prompt_mask       int64 [B, P], 0 on padding
    responses         int64 [B, R]
    mask              fp32 [B, R], 1 on response tokens
    sampler_logprobs  fp32 [B, R], as the generation backend reported them
    task_rewards      fp64 [B], the response's own raw reward
    ended             fp32 [B], 1 where the response ends with a stop token, 0 where its length was cut
    groups            int64 [B], equal for responses that are compared with one another
    chains            int64 [B], which of the chains played the response is from; of several the first
    forks             int64 [B], the first of the chains that go on from the same response of the pioneer
    positions         int64 [B], its place in that chain, 0 the pioneer's
    earlier_rewards   fp32 [B, n - 1], task rewards of the responses before it in its chain of n, then zeros

Scored, under the weights that are to learn (`PolicyLearner.score`):
    logprobs, reference_logprobs, entropy, full_kl, with a critic values: fp32 [B, R]

Paid (`credit.pay`):
    rewards           fp32 [B], what the response trains on, before score scaling

Estimated (`Estimation.estimate`):
    kl, advantages, with a critic returns: fp32 [B, R]
"""


OF_CHAIN = ("earlier_rewards",)
"""Columns of `[B, n - 1]`, whose second dimension is no token's."""


def make_rows(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    task_rewards: Sequence[float],
    ended: Sequence[bool],
    groups: Sequence[int] | None = None,
    chains: Sequence[int] | None = None,
    forks: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    earlier_rewards: Sequence[Sequence[float]] | None = None,
) -> Rows:
    """Pads ragged lists into tensors, prompts on the left and responses on the right.

    By default each response is a chain of its own, and compared with none.
    """
    prompt_tokens, prompt_mask = left_padded(prompts)
    width = max(len(response) for response in responses)
    tokens = np.zeros((len(responses), width), dtype=np.int64)
    mask = np.zeros(tokens.shape, dtype=np.float32)
    sampled = np.zeros(tokens.shape, dtype=np.float32)
    for row, (response, logprob) in enumerate(zip(responses, logprobs, strict=True)):
        tokens[row, : len(response)] = response
        sampled[row, : len(response)] = logprob
        mask[row, : len(response)] = 1.0
    numbered = range(len(responses))
    return Rows(
        prompts=prompt_tokens,
        prompt_mask=prompt_mask,
        responses=torch.from_numpy(tokens),
        mask=torch.from_numpy(mask),
        sampler_logprobs=torch.from_numpy(sampled),
        task_rewards=torch.as_tensor(task_rewards, dtype=torch.float64),
        ended=torch.as_tensor(ended, dtype=torch.float32),
        groups=torch.as_tensor(numbered if groups is None else groups, dtype=torch.int64),
        chains=torch.as_tensor(numbered if chains is None else chains, dtype=torch.int64),
        forks=torch.as_tensor(numbered if forks is None else forks, dtype=torch.int64),
        positions=torch.as_tensor([0] * len(responses) if positions is None else positions, dtype=torch.int64),
        earlier_rewards=torch.as_tensor([[]] * len(responses) if earlier_rewards is None else earlier_rewards).float(),
    )


def take(rows: Rows, index: Tensor) -> Rows:
    """The chosen rows of every column."""
    return {name: column[index] for name, column in rows.items()}


def at_position(rows: Rows, position: int) -> Rows:
    """The rows of one position of their chains, in the same order."""
    return take(rows, (rows["positions"] == position).nonzero().squeeze(1))


def by_length(rows: Rows) -> Tensor:
    """The places of the rows, shortest responses first, of equals the shortest prompts; int64 `[B]`.

    Responses first, as each of their tokens, padding too, costs logits over the whole vocabulary.
    """
    prompt_lengths, response_lengths = rows["prompt_mask"].sum(1), rows["mask"].sum(1)
    order = np.lexsort((prompt_lengths.cpu().numpy(), response_lengths.cpu().numpy()))
    return torch.from_numpy(order).to(prompt_lengths.device)


def places(rows: Rows, size: int, tokens: int | None = None) -> list[Tensor]:
    """The places of the rows of each micro-batch, which are of similar length.

    Args:
        rows: columns of `Rows` and any other `[B]` or `[B, R]` columns.
        size: most rows per micro-batch.
        tokens: most tokens of it once it is `trimmed`, padding counted; a longer row is a micro-batch of its own.
    """
    order = by_length(rows)
    lengths = torch.stack([rows["prompt_mask"].sum(1), rows["mask"].sum(1).long()])[:, order].tolist()
    return [order[start:end] for start, end in _spans(lengths, size, tokens)]


def trimmed(rows: Rows, index: Tensor) -> Rows:
    """The chosen rows of every column, without what is padding in all of them."""
    prompt, response = (int(rows[mask][index].sum(1).max()) for mask in ("prompt_mask", "mask"))
    return {
        name: column[index, -prompt:]
        if name.startswith("prompt")
        else column[index, :response]
        if column.dim() > 1 and name not in OF_CHAIN
        else column[index]
        for name, column in rows.items()
    }


def _spans(lengths: Sequence[Sequence[int]], size: int, tokens: int | None) -> Iterator[tuple[int, int]]:
    """Yields where micro-batches begin and end, among rows with prompts and responses of such lengths."""
    start, longest = 0, (0, 0)
    for place, (prompt, response) in enumerate(zip(*lengths, strict=True)):
        wider = max(longest[0], prompt), max(longest[1], response)
        count = place - start
        if count and (count == size or (tokens is not None and (count + 1) * sum(wider) > tokens)):
            yield start, place
            start, wider = place, (prompt, response)
        longest = wider
    if lengths[0]:
        yield start, len(lengths[0])


class NonFiniteUpdate(RuntimeError):
    """A gradient is NaN or infinite; the weights are as they were before this optimizer step.

    Attributes:
        name: the LLM's.
        update: the update, counted from 1.
        rows: all that the LLM was to learn from in this update, `[B]` and `[B, R]` columns by name, on the CPU.
    """

    def __init__(self, name: str, update: int, rows: Rows) -> None:
        """Keeps what a process on another machine needs to tell."""
        super().__init__(name, update, rows)
        self.name, self.update, self.rows = name, update, rows

    def __str__(self) -> str:
        broken = [name for name, column in self.rows.items() if not bool(column.isfinite().all())]
        where = f"so are {', '.join(broken)} in its batch" if broken else "its batch is finite"
        return (
            f"The gradient of {self.name} is not finite in update {self.update} ({where}). The step was refused: "
            "its weights are as they were before it. A smaller lr, a larger kl_coef or dtype=fp32 usually helps."
        )
