"""Padding, trimming into micro-batches, and episodes → rows."""

from __future__ import annotations

import pytest
import torch
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from torch import Tensor

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from policies.generation.generator import Response
from policies.learning.rows import Rows, make_rows, micro_batches, take
from policies.rllib.token_batch import TokenBatch
from policies.rollout.chain_runner import as_rllib_episode
from policies.rollout.role_mapping import RoleMapping
from policies.settings.settings import make_settings

PROMPTS = [[11, 12, 13], [21], [31, 32, 33, 34, 35], [41, 42], [51]]
RESPONSES = [[1], [2, 3, 4], [5, 6], [7, 8], [9, 10, 11, 12]]


def ragged() -> Rows:
    """Five rows; token, log-probability and reward say which row they belong to."""
    return make_rows(
        PROMPTS,
        RESPONSES,
        [[-0.5 * token for token in response] for response in RESPONSES],
        rewards=[0.0, 1.0, 2.0, 3.0, 4.0],
        task_rewards=[0.5, 1.5, 2.5, 3.5, 4.5],
        ended=[True, False, True, False, True],
    )


def columns() -> dict[str, Tensor]:
    """The rows, and two columns of the learner's: `[B, R]` and `[B]`."""
    rows: dict[str, Tensor] = dict(ragged())  # type: ignore[arg-type]
    return {**rows, "advantages": rows["responses"] * 10.0, "weight": torch.arange(5.0)}


def test_prompts_are_padded_on_the_left_and_responses_on_the_right() -> None:
    rows = ragged()
    assert rows["prompts"][:2].tolist() == [[0, 0, 11, 12, 13], [0, 0, 0, 0, 21]]
    assert rows["prompt_mask"][:2].tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]
    assert rows["responses"][:2].tolist() == [[1, 0, 0, 0], [2, 3, 4, 0]]
    assert rows["mask"][:2].tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]
    assert rows["sampler_logprobs"][:2].tolist() == [[-0.5, 0, 0, 0], [-1, -1.5, -2, 0]]
    assert rows["prompts"].shape == rows["prompt_mask"].shape == (5, 5)
    assert rows["responses"].shape == rows["mask"].shape == (5, 4)


def test_the_mask_counts_tokens_and_not_their_ids() -> None:
    rows = make_rows([[0, 5], [0]], [[0, 0], [7]], [[-1.0, -2.0], [-3.0]], [0.0, 0.0], [0.0, 0.0], [True, False])
    assert rows["prompt_mask"].tolist() == [[1, 1], [0, 1]]
    assert rows["mask"].tolist() == [[1, 1], [1, 0]]


def test_every_column_has_its_documented_type() -> None:
    rows = ragged()
    types = {name: column.dtype for name, column in columns().items()}
    integers = {"prompts", "prompt_mask", "responses", "queries"}
    assert {name for name, dtype in types.items() if dtype == torch.int64} == integers
    assert {dtype for name, dtype in types.items() if name not in integers} == {torch.float32}
    assert rows["rewards"].tolist() == [0, 1, 2, 3, 4]
    assert rows["task_rewards"].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert rows["ended"].tolist() == [1, 0, 1, 0, 1]


def test_a_row_needs_one_log_probability_per_token() -> None:
    with pytest.raises(ValueError):
        make_rows([[1]], [[1, 2]], [[-1.0, -1.0, -1.0]], [0.0], [0.0], [False])
    with pytest.raises(ValueError):
        make_rows([[1], [2]], [[1], [2]], [[-1.0]], [0.0, 0.0], [0.0, 0.0], [False, False])


def test_take_chooses_the_same_rows_of_every_column() -> None:
    taken = take(columns(), torch.tensor([3, 0]))
    assert taken["weight"].tolist() == [3, 0]
    assert taken["responses"].tolist() == [[7, 8, 0, 0], [1, 0, 0, 0]]
    assert {len(column) for column in taken.values()} == {2}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_micro_batches_hold_every_row_exactly_once(size: int) -> None:
    batches = list(micro_batches(columns(), size))
    seen = torch.cat([index for index, _ in batches])
    assert sorted(seen.tolist()) == [0, 1, 2, 3, 4]
    sizes = [len(index) for index, _ in batches]
    assert max(sizes) <= size and len(batches) == -(-5 // size)
    for index, micro in batches:
        assert {len(column) for column in micro.values()} == {len(index)}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_micro_batches_are_trimmed_to_their_longest_prompt_and_response_and_lose_no_token(size: int) -> None:
    for index, micro in micro_batches(columns(), size):
        places = index.tolist()
        prompt, response = (max(len(lists[i]) for i in places) for lists in (PROMPTS, RESPONSES))
        assert {micro[name].shape[1] for name in ("prompts", "prompt_mask")} == {prompt}
        by_token = ("responses", "mask", "sampler_logprobs", "advantages")
        assert {micro[name].shape[1] for name in by_token} == {response}
        for row, place in enumerate(places):
            assert micro["prompts"][row][micro["prompt_mask"][row].bool()].tolist() == PROMPTS[place]
            real = micro["mask"][row].bool()
            assert micro["responses"][row][real].tolist() == RESPONSES[place]
            assert micro["advantages"][row][real].tolist() == [10.0 * token for token in RESPONSES[place]]


def test_the_index_of_a_micro_batch_maps_back_to_the_rows_it_came_from() -> None:
    whole = columns()
    back = {name: torch.zeros_like(column) for name, column in whole.items()}
    for index, micro in micro_batches(whole, 2):
        for name in ("responses", "advantages", "mask"):
            back[name][index, : micro[name].shape[1]] = micro[name]
        back["weight"][index] = micro["weight"]
    for name in ("responses", "advantages", "mask", "weight"):
        assert torch.equal(back[name], whole[name])


def test_rows_of_similar_length_share_a_micro_batch() -> None:
    order = torch.cat([index for index, _ in micro_batches(columns(), 2)]).tolist()
    assert [len(PROMPTS[i]) for i in order] == [1, 1, 2, 3, 5]
    assert [len(RESPONSES[i]) for i in order[:2]] == [3, 4]


def chain_of(num_agents: int) -> tuple[Chain, RoleMapping]:
    """The bundled task's chain and its first mapping."""
    settings = make_settings({"num_agents": num_agents, "backend": "transformers", "max_prompt": 128})
    chain = settings.make_chain(settings.make_task(), settings.make_tokenizer())
    return chain, RoleMapping(settings.roles, settings.modules)


def play(
    chain: Chain, mapping: RoleMapping, query: int, responses: list[list[int]], rewards: list[float]
) -> tuple[list[list[int]], MultiAgentEpisode]:
    """One episode with hand-chosen responses, token t at log-probability -t; and the prompts it showed."""
    episode = ChainEpisode(chain, chain.task.train[query])
    prompts = []
    for tokens in responses:
        prompts.append(episode.prompt_ids())
        episode.respond({"tokens": tokens, "length": len(tokens)})
    sampled = [Response(tokens, [-float(token) for token in tokens]) for tokens in responses]
    return prompts, as_rllib_episode(episode, sampled, rewards, mapping)


def batch_of(*episodes: MultiAgentEpisode) -> dict[str, Rows]:
    return TokenBatch()(rl_module=None, batch={}, episodes=episodes)


def real(rows: Rows, row: int) -> tuple[list[int], list[int]]:
    """A row's prompt and response without padding."""
    prompt = rows["prompts"][row][rows["prompt_mask"][row].bool()].tolist()
    return prompt, rows["responses"][row][rows["mask"][row].bool()].tolist()


def test_episodes_become_rows_of_the_llm_that_played_each_role() -> None:
    chain, mapping = chain_of(3)
    first, one = play(chain, mapping, 0, [[5], [6, 7, 8, 9], [10, chain.stop_token_ids[0]]], [1.0, 2.0, 4.0])
    second, other = play(chain, mapping, 1, [[11, 12], [13], [14, 15, 16]], [8.0, 16.0, 32.0])
    batch = batch_of(one, other)
    assert list(batch) == ["llm_1", "llm_2", "llm_3"]
    assert real(batch["llm_1"], 0) == (first[0], [5])
    assert real(batch["llm_2"], 0) == (first[1], [6, 7, 8, 9])
    assert real(batch["llm_3"], 1) == (second[2], [14, 15, 16])
    assert batch["llm_2"]["sampler_logprobs"].tolist() == [[-6, -7, -8, -9], [-13, 0, 0, 0]]
    assert [rows["rewards"].tolist() for rows in batch.values()] == [[7, 56]] * 3  # the sums of the task rewards
    assert [rows["task_rewards"].tolist() for rows in batch.values()] == [[1, 8], [2, 16], [4, 32]]
    assert [rows["ended"].tolist() for rows in batch.values()] == [[0, 0], [0, 0], [1, 0]]


def test_rows_belong_to_the_llm_that_generated_them_after_the_roles_rotated_too() -> None:
    chain, mapping = chain_of(3)
    episodes = []
    for answers in ([[5], [6], [7]], [[8], [9], [10]], [[11], [12], [13]]):
        episodes.append(play(chain, mapping, 0, answers, [1.0, 2.0, 3.0])[1])
        mapping = mapping.rotated()
    batch = batch_of(*episodes)
    # rotation r gives position p to LLM (p + r) mod 3
    assert batch["llm_1"]["responses"].flatten().tolist() == [5, 10, 12]
    assert batch["llm_2"]["responses"].flatten().tolist() == [6, 8, 13]
    assert batch["llm_3"]["responses"].flatten().tolist() == [7, 9, 11]
    assert batch["llm_2"]["task_rewards"].tolist() == [2, 1, 3]


def test_llms_come_in_sorted_order_whoever_plays_first() -> None:
    chain, mapping = chain_of(3)
    _, episode = play(chain, mapping.rotated(), 0, [[5], [6], [7]], [0.0, 0.0, 0.0])
    assert list(batch_of(episode)) == ["llm_1", "llm_2", "llm_3"]


def test_an_llm_without_episodes_gets_no_rows() -> None:
    chain, _ = chain_of(1)
    _, episode = play(chain, RoleMapping(("pioneer",), ("llm_2",)), 0, [[5, 6]], [1.0])
    assert list(batch_of(episode)) == ["llm_2"]
    assert batch_of() == {}
