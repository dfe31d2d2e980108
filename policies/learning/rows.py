"""Batches of one policy's responses: padded token tensors with one row per response."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

MAX_TURNS = 2**16
"""Upper bound of the number of turns of an agent, in the numbers of groups."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Tensors with one row per response."""

    def columns(self) -> dict[str, Tensor]:
        """The tensors by name, without absent ones."""
        return {name: column for name, column in vars(self).items() if column is not None}

    def select(self, index: Tensor) -> Self:
        """Selects rows by their indices, int64, or by a condition, bool `[B]`."""
        return self._map(lambda _, column: column[index])

    def to(self, device: torch.device) -> Self:
        """Copies the tensors to a device; see `send`."""
        return self._map(lambda _, column: send(column, device))

    def _map(self, function: Callable[[str, Tensor], Tensor]) -> Self:
        return replace(self, **{name: function(name, column) for name, column in self.columns().items()})


@dataclass(frozen=True, eq=False)
class Scores(Columns):
    """Scores of responses with the weights before the update, zero outside the mask (`PolicyLearner.score`)."""

    logprobs: Tensor  # fp32 [B, R]; the sampler's if the policy did not score them
    entropy: Tensor | None = None  # fp32 [B, R]; None: the policy did not score them
    reference_logprobs: Tensor | None = None  # fp32 [B, R]; None: scored without the reference
    full_kl: Tensor | None = None  # fp32 [B, R], to the reference over the whole vocabulary; None: unknown
    values: Tensor | None = None  # fp32 [B, R], the critic's before each token; None: no critic


@dataclass(frozen=True, eq=False, kw_only=True)
class Estimates(Columns):
    """What responses train on (`AdvantageEstimator.estimate`)."""

    rewards: Tensor  # fp32 [B], after credit assignment, before `reward_scaling`
    kl: Tensor  # fp32 [B, R]
    advantages: Tensor  # fp32 [B, R]
    returns: Tensor | None = None  # fp32 [B, R], the critic's targets; None: no critic


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows(Columns):
    """`B` responses of one policy, from rollouts; `P` prompt tokens, `R` response tokens."""

    prompts: Tensor  # int64 [B, P], padded on the left
    prompt_mask: Tensor  # int64 [B, P], 0 on padding
    responses: Tensor  # int64 [B, R], padded on the right
    mask: Tensor  # fp32 [B, R], 1 on response tokens
    sampler_logprobs: Tensor  # fp32 [B, R], as reported by the generation backend
    task_rewards: Tensor  # fp64 [B], the response's own reward, unscaled; NaN without a reward
    ended: Tensor  # fp32 [B], 1 if the response ends with a stop token, 0 if it was cut at the maximal length
    groups: Tensor  # int64 [B], equal for responses that are compared with one another
    chains: Tensor  # int64 [B], index of the response's chain
    positions: Tensor  # int64 [B], position in the chain, 0 for the pioneer
    task_reward_parts: Tensor | None = None  # fp64 [B, K], the rewards by K > 1 functions, NaN without a reward
    thought_cut: Tensor | None = None  # fp32 [B], with `thinking` 1 if the response ends within its thought, else 0
    turns: Tensor | None = None  # int64 [B], how often the agent responded before in its episode; None in chains
    partner_rewards: Tensor | None = None  # fp64 [B], what others got until the agent's next turn; None in chains

    def __len__(self) -> int:
        return len(self.mask)

    def comparisons(self) -> tuple[Tensor, Tensor, Tensor]:
        """The groups of responses that are compared with one another.

        They are `groups`. In an environment, a response that is alone in its group, because no other episode of its
        seed has so many turns, is compared with those of its agent in all turns of these episodes.

        Returns:
            The rows of all groups, `[N]`; their groups' numbers, `[N]`; and for each row, where it stands among them,
            `[B]`.
        """
        rows = torch.arange(len(self))
        if self.turns is None:
            return rows, self.groups, rows
        groups, chains = self.groups.numpy(), self.chains.numpy()
        _, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
        agents = groups - self.turns.numpy()  # equal for the turns of an agent in the episodes of a seed
        order = np.argsort(agents, kind="stable")
        members, numbers, lookup = [np.arange(len(self))], [groups], np.arange(len(self))
        size, number = len(self), int(groups.max())
        for row in np.flatnonzero(counts[inverse] == 1):
            same = order[slice(*np.searchsorted(agents, [agents[row], agents[row] + 1], sorter=order))]
            others = same[chains[same] != chains[row]]
            number += 1
            members.append(np.append(row, others))
            numbers.append(np.full(len(others) + 1, number))
            lookup[row], size = size, size + len(others) + 1
        return (
            torch.from_numpy(np.concatenate(members)),
            torch.from_numpy(np.concatenate(numbers)),
            torch.from_numpy(lookup),
        )

    def split_by_episode(self, count: int, random: np.random.Generator) -> Iterator[Tensor]:
        """Yields `count` random parts of the rows, with whole episodes, those of a seed side by side."""
        assert self.turns is not None
        episodes, first, inverse = np.unique(self.chains.numpy(), return_index=True, return_inverse=True)
        seeds = np.unique((self.groups - self.turns).numpy()[first], return_inverse=True)[1]
        order = random.permutation(len(episodes))
        order = order[np.argsort(random.permutation(len(episodes))[seeds[order]], kind="stable")]
        for part in np.array_split(order, count):
            yield torch.from_numpy(np.flatnonzero(np.isin(inverse, part)))

    def at_position(self, position: int) -> Self:
        """Selects the rows at one position of their chains."""
        return self.select(self.positions == position)

    def trim(self, index: Tensor) -> Self:
        """Selects rows by index, and drops token positions that are padding in all of them."""
        prompt, response = (int(mask[index].sum(1).max()) for mask in (self.prompt_mask, self.mask))

        def trim_column(name: str, column: Tensor) -> Tensor:
            if name in ("prompts", "prompt_mask"):
                return column[index, -prompt:]
            by_token = column.dim() == 2 and name != "task_reward_parts"
            return column[index, :response] if by_token else column[index]

        return self._map(trim_column)

    def with_scores(self, scores: Scores) -> ScoredRows:
        """These rows with scores."""
        return ScoredRows(**(vars(self) | vars(scores)))


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoredRows(Scores, Rows):
    """Rows with their scores."""

    def with_estimates(self, estimates: Estimates) -> TrainRows:
        """These rows with estimates."""
        return TrainRows(**(vars(self) | vars(estimates)))


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainRows(Estimates, ScoredRows):
    """Rows with everything that an update needs."""


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
    turns: Sequence[int | None] = (),
    partner_rewards: Sequence[float | None] = (),
) -> Rows:
    """Pads ragged lists into tensors; see `Rows`. By default every response is a chain and a group of its own.

    Args:
        logprobs: log-probability of each response token, by the sampler.
        task_reward_parts: without any numbers, there is no such column.
        thought_cut, turns, partner_rewards: with None, there is no such column.
    """
    if [*map(len, responses)] != [*map(len, logprobs)]:
        raise ValueError("Every response token needs one log-probability.")
    prompt_tokens, prompt_mask = left_padded(prompts)
    tokens, mask = _padded(responses, torch.int64)
    indices = range(len(responses))
    optional = {}
    if any(map(len, task_reward_parts)):
        parts = [torch.tensor(part, dtype=torch.float64) for part in task_reward_parts]
        optional["task_reward_parts"] = pad_sequence(parts, batch_first=True, padding_value=torch.nan)
    if thought_cut and None not in thought_cut:
        optional["thought_cut"] = torch.as_tensor(thought_cut, dtype=torch.float32)
    if turns and None not in turns:
        optional["turns"] = torch.as_tensor(turns, dtype=torch.int64)
        optional["partner_rewards"] = torch.as_tensor(partner_rewards, dtype=torch.float64)
    return Rows(
        prompts=prompt_tokens,
        prompt_mask=prompt_mask,
        responses=tokens,
        mask=mask.float(),
        sampler_logprobs=_padded(logprobs, torch.float32)[0],
        task_rewards=torch.as_tensor(task_rewards, dtype=torch.float64),
        ended=torch.as_tensor(ended, dtype=torch.float32),
        groups=torch.as_tensor(indices if groups is None else groups, dtype=torch.int64),
        chains=torch.as_tensor(indices if chains is None else chains, dtype=torch.int64),
        positions=torch.as_tensor([0] * len(responses) if positions is None else positions, dtype=torch.int64),
        **optional,
    )


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Pads prompts on the left with token 0.

    Returns:
        `(tokens, mask)`, both int64 `[B, P]`; the mask is 0 on padding.
    """
    return _padded(prompts, torch.int64, "left")


def _padded(
    rows: Sequence[Sequence[float]], dtype: torch.dtype, side: Literal["left", "right"] = "right"
) -> tuple[Tensor, Tensor]:
    values = [torch.tensor(row, dtype=dtype) for row in rows]
    ones = [torch.ones_like(row) for row in values]
    padded, mask = (pad_sequence(part, batch_first=True, padding_side=side) for part in (values, ones))
    return padded, mask


def frozen_scores(rows: Rows, reference: bool = True) -> Scores:
    """The scores of a frozen model's rows: its sampler's log-probabilities, and no KL, as it is its own reference.

    Args:
        reference: whether other models' rows are scored by a reference.
    """
    zeros, logprobs = torch.zeros_like(rows.mask), rows.sampler_logprobs
    return Scores(logprobs, zeros, logprobs, zeros) if reference else Scores(logprobs, zeros)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device; the host does not wait for a copy to a GPU."""
    to_gpu = device.type == "cuda"
    return (tensor.pin_memory() if to_gpu and not tensor.is_cuda else tensor).to(device, non_blocking=to_gpu)


class NonFiniteUpdate(RuntimeError):
    """A gradient is NaN or infinite; the optimizer step was skipped.

    Attributes:
        name: policy id.
        update: number of the update, from 1.
        rows: all rows of the policy in this update, on the CPU.
    """

    def __init__(self, name: str, update: int, rows: TrainRows) -> None:
        """Stores the arguments, so that the error can be pickled between processes."""
        super().__init__(name, update, rows)
        self.name, self.update, self.rows = name, update, rows

    def __str__(self) -> str:
        names = [name for name, column in self.rows.columns().items() if not bool(column.isfinite().all())]
        cause = f"not finite in its batch: {', '.join(names)}" if names else "its batch is finite"
        return (
            f"The gradient of {self.name} is not finite in update {self.update} ({cause}). The optimizer step was "
            "skipped. Try a smaller lr, or dtype=fp32."
        )
