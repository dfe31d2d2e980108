"""The RLlib learner of two small policies, with rows of hand-chosen responses on the bundled task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns

from cory_env.episode import ChainEpisode
from policies.cory import CoryConfig
from policies.generation.generator import Response
from policies.learning.credit import assign_credit
from policies.learning.estimation import AdvantageEstimator
from policies.learning.rows import NonFiniteUpdate, Rows
from policies.learning.sharding import transformer_blocks
from policies.rllib.token_batch import rows_from_episodes
from policies.rllib.token_ppo_learner import TokenPPOLearner
from policies.rollout.episodes import to_rllib_episode
from policies.rollout.prompt_sampling import PromptRef
from policies.rollout.role_mapping import RoleMapping
from policies.sync_check import perturb
from tests.policies.conftest import TINY

BOTH = ("llm_1", "llm_2")
SETTINGS = {**TINY, "queries_per_update": 4, "minibatch_size": 4, "num_epochs": 1, "lr": 1e-3, "max_response_tokens": 8}
REVIEW = " a film that nobody who likes films should miss, made by people who care about what they do"
LENGTHS = [1, 8, 3, 5, 2, 7, 4]


@pytest.fixture(params=["full", "lora"])
def weights(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def build(**settings: Any) -> TokenPPOLearner:
    """A deterministic learner whose policies differ from each other and from the reference."""
    config = CoryConfig().cory(**{**SETTINGS, **settings})
    config.validate()
    s = config.settings
    chain = s.make_chain(s.make_task(), s.make_tokenizers())
    spaces = chain.observation_space(), chain.action_space()
    learner: TokenPPOLearner = config.build_learner(spaces=dict.fromkeys(s.policy_ids, spaces))
    for seed, policy in enumerate(learner.policies.values()):
        policy.model.load(perturb(policy.model.state(), seed))
    return learner


def make_row_batch(
    learner: TokenPPOLearner, policy_ids: Sequence[str] = BOTH, shift: int = 0, bonus: float = 0.0
) -> dict[str, Rows]:
    """The rows of one chain per query: the response at position p to query q is words of the review, its reward 2q - p.

    `shift` and `bonus` change the words and rewards of all positions but the first.
    """
    s = learner.settings
    chain = s.make_chain(s.make_task(), s.make_tokenizers(), policy_ids)
    mapping = RoleMapping(chain.agents, tuple(policy_ids))
    words = chain.encoders[0].tokenizer(REVIEW)["input_ids"]
    episodes = []
    for query in range(s.queries_per_update):
        episode, sampled = ChainEpisode(chain, chain.task.train[query]), []
        for position in range(len(policy_ids)):
            start = query + (3 + shift) * position
            tokens = words[start : start + LENGTHS[start % 7]]
            episode.respond({"tokens": tokens, "length": len(tokens)})
            sampled.append(Response(tokens, [-5.0] * len(tokens)))
        rewards = [2.0 * query - position + bool(position) * bonus for position in range(len(policy_ids))]
        episodes.append(to_rllib_episode(PromptRef(query), episode, sampled, rewards, mapping))
    return rows_from_episodes(episodes)


def update(learner: TokenPPOLearner, rows: dict[str, Rows], number: int = 0) -> dict[str, dict[str, float]]:
    """One update, as in the algorithm; returns the learner's metrics by policy id."""
    scored = {name: rows[name].with_scores(scores) for name, scores in learner.score(rows, keep=True).items()}
    estimators = {name: AdvantageEstimator(learner.settings.hyperparameters) for name in rows}
    credited = assign_credit(scored, learner.settings.credit_assignment, estimators)
    estimates = {name: estimators[name].estimate(scored[name], rewards)[0] for name, rewards in credited.items()}
    results = learner.learn(estimates, number, dict.fromkeys(rows, 0.0))
    return {name: {key: stat.peek() for key, stat in results[name].items()} for name in rows}


def state(learner: TokenPPOLearner, policy_id: str) -> dict[str, np.ndarray]:
    return learner.policies[policy_id].model.state()


def equal(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name], equal_nan=True) for name in one)


def steps(learner: TokenPPOLearner, policy_id: str) -> set[float]:
    """The numbers of optimizer steps of the policy's weights."""
    return {float(entry["step"]) for entry in learner.policies[policy_id].optimizer.state.values()}


def test_the_blocks_of_policies_and_reference_are_compiled_on_request() -> None:
    for requested in (False, True):
        learner = build(weights="full", backend="transformers", torch_compile=requested)
        models = [policy.model for policy in learner.policies.values()]
        lms = [lm for model in models for lm in (model.lm, model.reference())]
        blocks = [block for lm in lms for block in transformer_blocks(lm)]
        assert blocks and all((block._compiled_call_impl is not None) == requested for block in blocks)
        for block in blocks:  # other learners share the reference
            block._compiled_call_impl = None


def test_rows_of_one_policy_do_not_change_the_other(weights: str) -> None:
    learner = build(weights=weights)
    update(learner, make_row_batch(learner))
    one, two = state(learner, "llm_1"), state(learner, "llm_2")
    update(learner, make_row_batch(learner, policy_ids=["llm_1"]), number=1)
    assert not equal(state(learner, "llm_1"), one)
    assert equal(state(learner, "llm_2"), two)
    assert (steps(learner, "llm_1"), steps(learner, "llm_2")) == ({2.0}, {1.0})
    assert all(p.grad is None for policy in learner.policies.values() for p in policy.parameters)


def test_a_policy_s_update_does_not_depend_on_the_other_policy_s_rows(weights: str) -> None:
    learners = [build(weights=weights, partner_reward=0.0) for _ in range(2)]
    update(learners[0], make_row_batch(learners[0]))
    update(learners[1], make_row_batch(learners[1], shift=1, bonus=50.0))
    assert equal(state(learners[0], "llm_1"), state(learners[1], "llm_1"))
    assert not equal(state(learners[0], "llm_2"), state(learners[1], "llm_2"))


def test_a_learner_resumes_a_saved_state_exactly(weights: str, tmp_path: Path) -> None:
    settings = {"weights": weights, "minibatch_size": 2, "num_epochs": 2}
    first, second = build(**settings), build(**settings)
    update(first, make_row_batch(first))
    first.begin_save(str(tmp_path))
    for number in (1, 2):  # the second learner is ahead of the state that it restores
        update(second, make_row_batch(second, bonus=9.0), number)
    second.restore(str(tmp_path))
    assert update(first, make_row_batch(first), number=1) == update(second, make_row_batch(second), number=1)
    assert all(equal(state(first, policy_id), state(second, policy_id)) for policy_id in BOTH)
    clone = build(**settings, lr=1e-5)
    clone.restore(str(tmp_path))
    assert {group["lr"] for policy in clone.policies.values() for group in policy.optimizer.param_groups} == {1e-5}


def test_restoring_a_state_without_moments_clears_them(tmp_path: Path) -> None:
    learner = build()
    update(learner, make_row_batch(learner))
    before = state(learner, "llm_1")
    learner.begin_save(str(tmp_path / "used"))
    for policy in learner.policies.values():
        policy.reset_optimizer()
    assert steps(learner, "llm_1") == set() and equal(state(learner, "llm_1"), before)
    learner.begin_save(str(tmp_path / "empty"))
    learner.restore(str(tmp_path / "used"))
    assert steps(learner, "llm_1") == {1.0}
    learner.restore(str(tmp_path / "empty"))
    assert steps(learner, "llm_1") == set()


def test_the_error_for_a_non_finite_gradient_names_the_policy() -> None:
    learner = build()
    torch.nn.init.constant_(learner.policies["llm_2"].model.value_head.bias, float("nan"))
    before = state(learner, "llm_2")
    with pytest.raises(NonFiniteUpdate, match=r"gradient of llm_2 is not finite in update 4"):
        update(learner, make_row_batch(learner), number=3)
    assert equal(state(learner, "llm_2"), before)


def test_policies_have_different_mini_batches_but_the_same_hyperparameters() -> None:
    learner = build(seed=3, clip_ratio=0.3)
    assert [policy.policy_index for policy in learner.policies.values()] == [0, 1]
    assert {policy.hyperparameters for policy in learner.policies.values()} == {learner.settings.hyperparameters}
    assert (learner.settings.hyperparameters.seed, learner.settings.hyperparameters.clip_ratio) == (3, 0.3)


@pytest.mark.parametrize("weights", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_without_a_critic_there_is_no_value_head_in_memory_state_optimizer_or_metrics(weights: str) -> None:
    groups = {"weights": weights, "num_generations": 2, "queries_per_update": 2}
    learners = [build(**groups), build(**groups, advantage="rloo")]
    metrics = [update(learner, make_row_batch(learner))["llm_1"] for learner in learners]
    names = [set(state(learner, "llm_1")) for learner in learners]
    sizes = [sum(parameter.numel() for parameter in learner.module["llm_1"].parameters()) for learner in learners]
    moments = [len(learner.get_optimizer("llm_1").state) for learner in learners]
    hidden = learners[0].policies["llm_1"].model.lm.config.hidden_size
    assert names[0] - names[1] == {"value_head.weight", "value_head.bias"} and names[1] < names[0]
    assert sizes[0] - sizes[1] == hidden + 1 and moments[0] - moments[1] == 2
    assert set(metrics[0]) - set(metrics[1]) == {"value_loss"}


def test_with_overlong_mask_a_truncated_response_counts_in_its_groups_baseline_alone() -> None:
    settings = {"advantage": "rloo", "num_generations": 2, "minibatch_size": 8, "num_agents": 1, "kl_coef": 0.0}
    cut, complete = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.ones(4)

    def weights_after(overlong: str, ended: torch.Tensor, token: int = 0, reward: float = 0.0) -> dict[str, np.ndarray]:
        learner = build(**settings, overlong=overlong)
        rows = make_row_batch(learner, policy_ids=["llm_1"])
        rows["llm_1"] = replace(rows["llm_1"], ended=ended, groups=torch.tensor([0, 0, 1, 1]))
        rows["llm_1"].responses[1] += token
        rows["llm_1"].task_rewards[1] += reward
        update(learner, rows)
        return state(learner, "llm_1")

    masked = weights_after("mask", cut)
    assert equal(weights_after("mask", cut, token=1), masked)
    assert not equal(weights_after("mask", cut, reward=5.0), masked)
    assert not equal(weights_after("keep", cut), masked)
    assert equal(weights_after("keep", cut), weights_after("mask", complete))


@pytest.mark.parametrize(("left", "expected"), [(8, 4), (7, 4), (6, 3), (3, 2), (2, 1), (1, 1)])
def test_dropped_responses_take_their_share_of_the_optimizer_steps_with_them(left: int, expected: int) -> None:
    learner = build(overlong="mask", num_agents=1, queries_per_update=8, minibatch_size=2, num_epochs=2)
    rows = make_row_batch(learner, policy_ids=["llm_1"])
    rows["llm_1"].ended[:] = (torch.arange(8) < left).float()
    update(learner, rows)
    assert steps(learner, "llm_1") == {2.0 * expected}  # of 2 epochs


def test_if_all_responses_are_truncated_and_masked_no_weight_changes() -> None:
    learner = build(overlong="mask")
    before, rows = state(learner, "llm_1"), make_row_batch(learner)
    for columns in rows.values():
        columns.ended[:] = 0.0
    metrics = update(learner, rows)["llm_1"]
    assert equal(state(learner, "llm_1"), before) and steps(learner, "llm_1") == set() and metrics["grad_norm"] == 0.0


def test_the_rlmodule_s_outputs_are_those_of_the_model() -> None:
    learner = build()
    module, rows = learner.module["llm_1"], make_row_batch(learner)["llm_1"]
    torch.nn.init.normal_(module.policy.value_head.weight)
    logprobs, values, _ = module.policy(rows)
    out = module.forward_train(rows)
    assert torch.equal(out[Columns.ACTION_LOGP], logprobs) and torch.equal(out[Columns.VF_PREDS], values)
    assert torch.equal(module.forward_inference(rows)[Columns.ACTION_LOGP], logprobs)
