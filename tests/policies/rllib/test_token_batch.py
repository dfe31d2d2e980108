"""Episodes → rows."""

from __future__ import annotations

from typing import Any

from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from policies.generation.generator import Response
from policies.learning.rows import Rows
from policies.rllib.token_batch import rows_from_episodes
from policies.rollout.episodes import to_rllib_episode
from policies.rollout.prompt_sampling import PromptRef
from policies.rollout.role_mapping import RoleMapping, make_mapping
from tests.cory_env.test_thinking import make_chain as make_thinking_chain
from tests.cory_env.test_thinking import thinker
from tests.paper import make_settings


def make_chain(num_agents: int, **others: Any) -> tuple[Chain, RoleMapping]:
    """The bundled task's chain and its initial mapping."""
    settings = make_settings({"num_agents": num_agents, "backend": "transformers", "max_prompt_tokens": 128, **others})
    chain = settings.make_chain(settings.make_task(), settings.make_tokenizers())
    return chain, make_mapping(settings)


def make_episode(
    chain: Chain, mapping: RoleMapping, query: int, responses: list[list[int]], rewards: list[float], sample: int = 0
) -> tuple[list[list[int]], MultiAgentEpisode]:
    """The prompts and the episode of hand-chosen responses; token t has the log-probability -t."""
    episode = ChainEpisode(chain, chain.task.train[query])
    prompts = []
    for tokens in responses:
        prompts.append(episode.prompt_ids())
        episode.respond({"tokens": tokens, "length": len(tokens)})
    sampled = [Response(tokens, [-float(token) for token in tokens]) for tokens in responses]
    return prompts, to_rllib_episode(PromptRef(query, sample), episode, sampled, rewards, mapping)


def unpadded(rows: Rows, row: int) -> tuple[list[int], list[int]]:
    """A row's prompt and response without padding."""
    prompt = rows.prompts[row][rows.prompt_mask[row].bool()].tolist()
    return prompt, rows.responses[row][rows.mask[row].bool()].tolist()


def test_episodes_become_rows_of_the_policy_in_each_role() -> None:
    chain, mapping = make_chain(3)
    first, one = make_episode(
        chain, mapping, 0, [[5], [6, 7, 8, 9], [10, chain.encoders[0].stop_token_ids[0]]], [1.0, 2.0, 4.0]
    )
    second, other = make_episode(chain, mapping, 1, [[11, 12], [13], [14, 15, 16]], [8.0, 16.0, 32.0])
    batch = rows_from_episodes([one, other])
    assert list(batch) == ["llm_1", "llm_2", "llm_3"]
    assert unpadded(batch["llm_1"], 0) == (first[0], [5])
    assert unpadded(batch["llm_2"], 0) == (first[1], [6, 7, 8, 9])
    assert unpadded(batch["llm_3"], 1) == (second[2], [14, 15, 16])
    assert batch["llm_2"].sampler_logprobs.tolist() == [[-6, -7, -8, -9], [-13, 0, 0, 0]]
    assert [rows.chains.tolist() for rows in batch.values()] == [[0, 1]] * 3
    assert [rows.positions.tolist() for rows in batch.values()] == [[0, 0], [1, 1], [2, 2]]
    assert [rows.task_rewards.tolist() for rows in batch.values()] == [[1, 8], [2, 16], [4, 32]]
    assert [rows.ended.tolist() for rows in batch.values()] == [[0, 0], [0, 0], [1, 0]]


def test_a_row_ends_with_the_stop_text_and_later_tokens_are_not_trained_on() -> None:
    chain, mapping = make_chain(1, stop="\n\n")
    sampled = chain.encoders[0].tokenizer("so\n\nQ", add_special_tokens=False)["input_ids"]
    episodes = [
        make_episode(chain, mapping, query, [tokens], [1.0])[1] for query, tokens in enumerate((sampled, sampled[:-2]))
    ]
    rows = rows_from_episodes(episodes)["llm_1"]
    assert [unpadded(rows, row)[1] for row in (0, 1)] == [sampled[:-1], sampled[:-2]]
    assert rows.ended.tolist() == [1, 0] and rows.sampler_logprobs[0].tolist() == [-token for token in sampled[:-1]]


def test_rows_belong_to_the_policy_that_generated_them_even_after_a_rotation() -> None:
    chain, mapping = make_chain(3)
    episodes = []
    for sample, answers in enumerate(([[5], [6], [7]], [[8], [9], [10]], [[11], [12], [13]])):
        episodes.append(make_episode(chain, mapping, 0, answers, [1.0, 2.0, 3.0], sample)[1])
        mapping = mapping.rotated()
    batch = rows_from_episodes(episodes)
    # rotation r gives position p to policy (p + r) mod 3
    assert batch["llm_1"].responses.flatten().tolist() == [5, 10, 12]
    assert batch["llm_2"].responses.flatten().tolist() == [6, 8, 13]
    assert batch["llm_3"].responses.flatten().tolist() == [7, 9, 11]
    assert batch["llm_2"].task_rewards.tolist() == [2, 1, 3]
    assert batch["llm_2"].positions.tolist() == [1, 0, 2]


def test_policies_are_in_sorted_order_whatever_their_roles() -> None:
    chain, mapping = make_chain(3)
    _, episode = make_episode(chain, mapping.rotated(), 0, [[5], [6], [7]], [0.0, 0.0, 0.0])
    assert list(rows_from_episodes([episode])) == ["llm_1", "llm_2", "llm_3"]


def test_a_policy_without_episodes_has_no_rows() -> None:
    chain, _ = make_chain(1)
    _, episode = make_episode(chain, RoleMapping(("pioneer",), ("llm_2",)), 0, [[5, 6]], [1.0])
    assert list(rows_from_episodes([episode])) == ["llm_2"]
    assert rows_from_episodes([]) == {}


def test_thoughts_that_were_cut_off_are_a_column_of_models_that_think() -> None:
    chain, mapping = make_thinking_chain(num_agents=1), RoleMapping(("pioneer",), ("llm_1",))
    texts = ("<think> a</think> b", "<think> a b c", " b c d")
    responses = [thinker()(text, add_special_tokens=False)["input_ids"] for text in texts]
    episodes = [make_episode(chain, mapping, 0, [tokens], [1.0], sample=n)[1] for n, tokens in enumerate(responses)]
    assert rows_from_episodes(episodes)["llm_1"].columns()["thought_cut"].tolist() == [0.0, 1.0, 0.0]
    plain, mapping = make_chain(1)
    assert rows_from_episodes([make_episode(plain, mapping, 0, [[5]], [1.0])[1]])["llm_1"].thought_cut is None
