"""Rows of padded token tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Rows = dict[str, Tensor]
"""Columns of one policy's rows, by name. `B` responses; `P` prompt tokens, padded on the left; `R` response tokens,
padded on the right.

From rollouts (`make_rows`):
    prompts           int64 [B, P]
    prompt_mask       int64 [B, P], 0 on padding
    responses         int64 [B, R]
    mask              fp32 [B, R], 1 on response tokens
    sampler_logprobs  fp32 [B, R], as reported by the generation backend
    task_rewards      fp64 [B], the response's own reward, unscaled
    ended             fp32 [B], 1 if the response ends with a stop token, 0 if it was cut at the maximal length
    groups            int64 [B], equal for responses that are compared with one another
    chains            int64 [B], index of the response's chain
    positions         int64 [B], position in the chain, 0 for the pioneer
    task_reward_parts fp64 [B, K], with K > 1 reward functions the value of each, NaN without a reward
    thought_cut       fp32 [B], with `thinking` 1 if the response ends within its thought, else 0

Scored with the weights before the update (`PolicyLearner.score`):
    logprobs, reference_logprobs, entropy, full_kl, with a critic values: fp32 [B, R]

Credited (`credit.assign_credit`):
    rewards           fp32 [B], the reward that the response trains on, before `reward_scaling`
    reward_parts      fp32 [B, K], with `gdpo` the same for each reward function

Estimated (`AdvantageEstimator.estimate`):
    kl, advantages, with a critic returns: fp32 [B, R]
"""

CHAIN_COLUMNS = ("task_reward_parts", "reward_parts")
"""Columns whose second dimension is reward functions, not tokens."""


def make_rows(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    task_rewards: Sequence[float],
    ended: Sequence[bool],
    groups: Sequence[int] | None = None,
    chains: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    task_reward_parts: Sequence[Sequence[float]] = (),
    thought_cut: Sequence[bool | None] = (),
) -> Rows:
    """Pads ragged lists into tensors, prompts on the left and responses on the right.

    Args:
        prompts: token ids of each row's prompt.
        responses: token ids of each row's response.
        logprobs: log-probability of each response token, by the sampler.
        task_rewards: one per row.
        ended: whether the response ends with a stop token.
        groups, chains, positions: see `Rows`. By default every response is a chain and a group of its own.
        task_reward_parts: see `Rows`; without any numbers, there is no such column.
        thought_cut: whether the response ends within its thought; with None, there is no such column.
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
    indices = range(len(responses))
    optional = {}
    if count := max(map(len, task_reward_parts), default=0):
        values = [[*part, *[float("nan")] * (count - len(part))] for part in task_reward_parts]
        optional["task_reward_parts"] = torch.as_tensor(values, dtype=torch.float64)
    if thought_cut and None not in thought_cut:
        optional["thought_cut"] = torch.as_tensor(thought_cut, dtype=torch.float32)
    return Rows(
        prompts=prompt_tokens,
        prompt_mask=prompt_mask,
        responses=torch.from_numpy(tokens),
        mask=torch.from_numpy(mask),
        sampler_logprobs=torch.from_numpy(sampled),
        task_rewards=torch.as_tensor(task_rewards, dtype=torch.float64),
        ended=torch.as_tensor(ended, dtype=torch.float32),
        groups=torch.as_tensor(indices if groups is None else groups, dtype=torch.int64),
        chains=torch.as_tensor(indices if chains is None else chains, dtype=torch.int64),
        positions=torch.as_tensor([0] * len(responses) if positions is None else positions, dtype=torch.int64),
        **optional,
    )


def frozen_scores(rows: Rows, reference: bool = True) -> Rows:
    """Returns the scores of a frozen model's rows: its sampler's log-probabilities, and no KL, as it is its reference.

    Args:
        rows: from rollouts.
        reference: whether other models' rows are scored by a reference.
    """
    zeros = torch.zeros_like(rows["mask"])
    logprobs = rows["sampler_logprobs"]
    scores = {"logprobs": logprobs, "entropy": zeros}
    return scores | ({"reference_logprobs": logprobs, "full_kl": zeros} if reference else {})


def select_rows(rows: Rows, index: Tensor) -> Rows:
    """Selects rows by index from every column."""
    return {name: column[index] for name, column in rows.items()}


def select_position(rows: Rows, position: int) -> Rows:
    """Selects the rows at one position of their chains, in the same order."""
    return select_rows(rows, (rows["positions"] == position).nonzero().squeeze(1))


def trim_padding(rows: Rows, index: Tensor) -> Rows:
    """Selects rows by index from every column, and drops positions that are padding in all rows."""
    prompt, response = (int(rows[mask][index].sum(1).max()) for mask in ("prompt_mask", "mask"))
    return {
        name: column[index, -prompt:]
        if name.startswith("prompt")
        else column[index, :response]
        if column.dim() > 1 and name not in CHAIN_COLUMNS
        else column[index]
        for name, column in rows.items()
    }


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor from the host to a device; the host does not wait for it."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class NonFiniteUpdate(RuntimeError):
    """A gradient is NaN or infinite; the optimizer step was skipped.

    Attributes:
        name: policy id.
        update: number of the update, from 1.
        rows: all rows of the policy in this update, on the CPU.
    """

    def __init__(self, name: str, update: int, rows: Rows) -> None:
        """Stores the arguments, so that the error can be pickled between processes."""
        super().__init__(name, update, rows)
        self.name, self.update, self.rows = name, update, rows

    def __str__(self) -> str:
        names = [name for name, column in self.rows.items() if not bool(column.isfinite().all())]
        cause = f"not finite in its batch: {', '.join(names)}" if names else "its batch is finite"
        return (
            f"The gradient of {self.name} is not finite in update {self.update} ({cause}). The optimizer step was "
            "skipped. Try a smaller lr, or dtype=fp32."
        )


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Pads prompts on the left with token 0.

    Returns:
        `(tokens, mask)`, both int64 `[B, P]`; the mask is 0 on padding.
    """
    width = max(len(prompt) for prompt in prompts)
    tokens = np.zeros((len(prompts), width), dtype=np.int64)
    mask = np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return torch.from_numpy(tokens), torch.from_numpy(mask)
