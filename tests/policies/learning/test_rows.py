"""Padding rows, and splitting them into trimmed micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from policies.learning.forward.prefix_tree import Paths
from policies.learning.rows import Rows, TrainRows, make_rows
from tests.policies.learning.batches import make_batch

PROMPTS = [[11, 12, 13], [21], [31, 32, 33, 34, 35], [41, 42], [51]]
RESPONSES = [[1], [2, 3, 4], [5, 6], [7, 8], [9, 10, 11, 12]]


def ragged() -> Rows:
    """Five rows; tokens, log-probabilities and task rewards identify their row."""
    return make_rows(
        PROMPTS,
        RESPONSES,
        [[-0.5 * token for token in response] for response in RESPONSES],
        task_rewards=[0.5, 1.5, 2.5, 3.5, 4.5],
        ended=[True, False, True, False, True],
    )


def columns() -> TrainRows:
    """The rows with advantages and rewards that identify their row, and of as many reward functions as tokens."""
    rows = ragged()
    parts = torch.arange(20.0).view(5, 4).double()
    others = {"advantages": rows.responses * 10.0, "rewards": torch.arange(5.0), "task_reward_parts": parts}
    return make_batch(**rows.columns(), **others)


def test_prompts_are_padded_on_the_left_and_responses_on_the_right() -> None:
    rows = ragged()
    assert rows.prompts[:2].tolist() == [[0, 0, 11, 12, 13], [0, 0, 0, 0, 21]]
    assert rows.prompt_mask[:2].tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]
    assert rows.responses[:2].tolist() == [[1, 0, 0, 0], [2, 3, 4, 0]]
    assert rows.mask[:2].tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]
    assert rows.sampler_logprobs[:2].tolist() == [[-0.5, 0, 0, 0], [-1, -1.5, -2, 0]]
    assert rows.prompts.shape == rows.prompt_mask.shape == (5, 5)
    assert rows.responses.shape == rows.mask.shape == (5, 4)


def test_the_mask_counts_tokens_and_not_their_ids() -> None:
    rows = make_rows([[0, 5], [0]], [[0, 0], [7]], [[-1.0, -2.0], [-3.0]], [0.0, 0.0], [True, False])
    assert rows.prompt_mask.tolist() == [[1, 1], [0, 1]]
    assert rows.mask.tolist() == [[1, 1], [1, 0]]


def test_every_column_has_its_documented_type() -> None:
    rows = ragged()
    types = {name: column.dtype for name, column in columns().columns().items()}
    integers = {"prompts", "prompt_mask", "responses", "groups", "chains", "positions"}
    doubles = {"task_rewards", "task_reward_parts"}
    assert {name for name, dtype in types.items() if dtype == torch.int64} == integers
    assert {name for name, dtype in types.items() if dtype == torch.float64} == doubles
    assert {dtype for name, dtype in types.items() if name not in integers | doubles} == {torch.float32}
    assert rows.task_rewards.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert rows.ended.tolist() == [1, 0, 1, 0, 1]


def test_a_row_needs_one_log_probability_per_token() -> None:
    with pytest.raises(ValueError):
        make_rows([[1]], [[1, 2]], [[-1.0, -1.0, -1.0]], [0.0], [False])
    with pytest.raises(ValueError):
        make_rows([[1], [2]], [[1], [2]], [[-1.0]], [0.0, 0.0], [False, False])


def test_take_selects_the_same_rows_of_every_column() -> None:
    rows = columns().select(torch.tensor([3, 0]))
    assert rows.rewards.tolist() == [3, 0]
    assert rows.responses.tolist() == [[7, 8, 0, 0], [1, 0, 0, 0]]
    assert {len(column) for column in rows.columns().values()} == {2}


def micro_batches(rows: TrainRows, size: int, tokens: int | None = None) -> list[tuple[Tensor, TrainRows]]:
    paths = Paths(rows)
    indices = [paths.index(packs) for packs in paths.micro_batches(size, tokens, cost=None)[0]]
    return [(index, rows.trim(index)) for index in indices]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_micro_batches_hold_every_row_exactly_once(size: int) -> None:
    batches = list(micro_batches(columns(), size))
    indices = torch.cat([index for index, _ in batches])
    assert sorted(indices.tolist()) == [0, 1, 2, 3, 4]
    sizes = [len(index) for index, _ in batches]
    assert max(sizes) <= size and len(batches) == -(-5 // size)
    for index, micro in batches:
        assert {len(column) for column in micro.columns().values()} == {len(index)}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_micro_batches_are_trimmed_to_their_longest_prompt_and_response_and_lose_no_token(size: int) -> None:
    for index, micro in micro_batches(columns(), size):
        row_indices = index.tolist()
        prompt, response = (max(len(lists[i]) for i in row_indices) for lists in (PROMPTS, RESPONSES))
        widths = {name: column.shape[1] for name, column in micro.columns().items() if column.dim() == 2}
        assert {widths.pop(name) for name in ("prompts", "prompt_mask")} == {prompt}
        assert widths.pop("task_reward_parts") == 4 and {*widths.values()} == {response}
        for row, source in enumerate(row_indices):
            assert micro.prompts[row][micro.prompt_mask[row].bool()].tolist() == PROMPTS[source]
            valid = micro.mask[row].bool()
            assert micro.responses[row][valid].tolist() == RESPONSES[source]
            assert micro.advantages[row][valid].tolist() == [10.0 * token for token in RESPONSES[source]]


@pytest.mark.parametrize("tokens", [1, 6, 8, 12, 100])
def test_a_micro_batch_respects_the_token_limit_or_has_one_row(tokens: int) -> None:
    batches = list(micro_batches(columns(), 64, tokens))
    indices = torch.cat([index for index, _ in batches])
    assert sorted(indices.tolist()) == [0, 1, 2, 3, 4]
    lengths = [len(prompt) + len(response) - 1 for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    sizes = [len(index) * max(lengths[row] for row in index.tolist()) for index, _ in batches]
    assert all(size <= tokens or len(index) == 1 for size, (index, _) in zip(sizes, batches, strict=True))
    if tokens == 12:  # in order of length, without the last token: 3, 3, 6, 3, 4; three rows take 3 * 6
        assert [index.tolist() for index, _ in batches] == [[0, 3], [2, 1], [4]]


def test_a_micro_batch_respects_the_row_limit_whatever_its_tokens() -> None:
    assert [len(index) for index, _ in micro_batches(columns(), 2, 100)] == [2, 2, 1]


def test_the_index_of_a_micro_batch_maps_back_to_the_rows_it_came_from() -> None:
    rows = columns()
    names = ("responses", "advantages", "mask", "rewards", "task_reward_parts")
    rebuilt = {name: torch.zeros_like(rows.columns()[name]) for name in names}
    for index, micro in micro_batches(rows, 2):
        for name in names:
            part = micro.columns()[name]
            rebuilt[name][(index, slice(part.shape[1])) if part.dim() == 2 else index] = part
    for name in names:
        assert torch.equal(rebuilt[name], rows.columns()[name])


def test_rows_of_similar_length_share_a_micro_batch() -> None:
    order = torch.cat([index for index, _ in micro_batches(columns(), 2)]).tolist()
    lengths = [(len(RESPONSES[i]), len(PROMPTS[i])) for i in order]
    assert lengths == sorted(lengths) and lengths[0] != (1, 1)  # by response length, then by prompt length
