"""Learning without a critic: what a learner makes of groups, and real trainings by each estimator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from torch import Tensor

from cory_env.episode import ChainEpisode
from policies.cory import Cory
from policies.cory_config import CoryConfig
from policies.generation.generator import Response
from policies.learning import token_ppo
from policies.rllib.token_ppo_learner import UPDATE, TokenPPOLearner
from policies.rollout.chain_runner import as_rllib_episode
from policies.rollout.dealing import deal
from policies.rollout.role_mapping import RoleMapping
from policies.self_test import perturb
from tests.policies.conftest import TINY, MakeCory
from tests.policies.test_cory import assert_same_learner, flat, learner_state

IN_REWARD, IN_LOSS = ("rloo", "reinforce"), ("grpo", "dr_grpo")
SCORES = [3.0, 1.0, 8.0, 5.0, 5.0, 2.0]
"""Of three chains each on two queries; the second agent gets the same."""
LENGTHS = [2, 5, 3, 1, 4, 6]


def settings_of(estimator: str, **others: Any) -> dict[str, Any]:
    """A learner's settings; `full` and `k1` are refused where the KL is in the loss."""
    kl = {"kl_estimator": "k3"} if estimator in IN_LOSS else {}
    shape = {"queries": 2, "num_generations": 3, "minibatch": 6, "epochs": 1, "grad_clip": None, "kl_coef": 0.5}
    return {**TINY, **shape, **kl, "advantage": estimator, **others}


def build(estimator: str, **others: Any) -> TokenPPOLearner:
    """A learner whose LLMs differ from the reference."""
    config = CoryConfig().cory(**settings_of(estimator, **others))
    config.validate()
    s = config.settings
    chain = s.make_chain(s.make_task(), s.make_tokenizer())
    spaces = chain.observation_space(), chain.action_space()
    learner: TokenPPOLearner = config.build_learner(spaces=dict.fromkeys(s.modules, spaces))
    for module_id in s.modules:
        module = learner.module[module_id].unwrapped()
        module.set_state(perturb(module.get_state(), seed=0))
    return learner


def play(learner: TokenPPOLearner, scores: list[float] | None = None) -> list[MultiAgentEpisode]:
    """Chains on queries 4 and 2, three each; agents are paid half of a chain's score each, so both train on all of
    it.
    """
    s = learner.settings
    chain = s.make_chain(s.make_task(), s.make_tokenizer())
    mapping = RoleMapping(s.roles, s.modules)
    episodes = []
    for place, score in enumerate(SCORES if scores is None else scores):
        episode, sampled = ChainEpisode(chain, chain.task.train[4 if place < 3 else 2]), []
        for position in range(2):
            tokens = [300 + 7 * place + position + step for step in range(LENGTHS[place])]
            episode.respond({"tokens": tokens, "length": len(tokens)})
            sampled.append(Response(tokens, [-5.0] * len(tokens)))
        episodes.append(as_rllib_episode(episode, sampled, [score / 2, score / 2], mapping))
    return episodes


def batch(learner: TokenPPOLearner, episodes: list[MultiAgentEpisode], module_id: str = "llm_2") -> dict[str, Tensor]:
    """One LLM's rows of the only mini-batch, in the order played."""
    learner.before_gradient_based_update(timesteps={UPDATE: 0})
    (only,) = learner._create_iterator_if_necessary(training_data=TrainingData(episodes=episodes))
    order = only[module_id]["responses"][:, 0].argsort()
    return {name: column[order] for name, column in only[module_id].items()}


def kl_to_come(rows: dict[str, Tensor], row: int) -> list[float]:
    """k1 of one response, summed from each token on."""
    kl = [float(a - b) for a, b in zip(rows["logprobs"][row], rows["reference_logprobs"][row], strict=True)]
    return [sum(kl[step:]) for step in range(LENGTHS[row])]


def leave_one_out(totals: list[float]) -> list[float]:
    return [total - (sum(totals) - total) / (len(totals) - 1) for total in totals]


def test_rloo_pays_each_whole_response_less_its_kl_and_compares_it_with_the_others_to_its_query() -> None:
    learner = build("rloo")
    rows = batch(learner, play(learner))
    totals = [score - 0.5 * kl_to_come(rows, row)[0] for row, score in enumerate(SCORES)]
    assert max(abs(total - score) for total, score in zip(totals, SCORES, strict=True)) > 1e-3
    expected = torch.tensor(leave_one_out(totals[:3]) + leave_one_out(totals[3:])).unsqueeze(1) * rows["mask"]
    torch.testing.assert_close(rows["advantages"], expected, rtol=1e-4, atol=1e-4)


def test_reinforce_pays_each_token_the_score_less_the_kl_to_come_and_whitens_over_the_batch() -> None:
    learner = build("reinforce", queries=6, num_generations=1)
    rows = batch(learner, play(learner))
    to_come = [score - 0.5 * kl for row, score in enumerate(SCORES) for kl in kl_to_come(rows, row)]
    expected = torch.tensor(to_come)
    expected = (expected - expected.mean()) / expected.std()
    torch.testing.assert_close(rows["advantages"][rows["mask"].bool()], expected, rtol=1e-4, atol=1e-4)
    assert (rows["advantages"] * (1 - rows["mask"]) == 0).all()


@pytest.mark.parametrize("estimator", IN_LOSS)
def test_grpo_compares_bare_scores_and_has_the_kl_in_its_loss(estimator: str) -> None:
    learner = build(estimator)
    rows = batch(learner, play(learner))
    deviations = (13**0.5, 3**0.5) if estimator == "grpo" else (1.0, 1.0)  # of 3, 1, 8 and of 5, 5, 2
    expected = [*(x / deviations[0] for x in (-1, -3, 4)), *(x / deviations[1] for x in (1, 1, -2))]
    torch.testing.assert_close(
        rows["advantages"], torch.tensor(expected).unsqueeze(1) * rows["mask"], rtol=1e-3, atol=1e-3
    )
    difference = (rows["reference_logprobs"] - rows["logprobs"]) * rows["mask"]
    kl = float((difference.exp() - difference - 1).sum() / rows["mask"].sum())
    surrogate = -float((rows["advantages"] * rows["mask"]).sum() / rows["mask"].sum())
    assert kl > 1e-4
    assert learner._uncompiled_update({"llm_2": rows})[1]["llm_2"] == pytest.approx(surrogate + 0.5 * kl, rel=1e-3)
    unlikely = {
        Columns.ACTION_LOGP: rows["logprobs"].masked_fill(rows["mask"] == 0, -1000.0)
    }  # where there is no token
    loss = learner.compute_loss_for_module(module_id="llm_2", config=None, batch=rows, fwd_out=unlikely)
    assert float(loss / rows["mask"].sum()) == pytest.approx(surrogate + 0.5 * kl, rel=1e-3)


@pytest.mark.parametrize("estimator", ["rloo", *IN_LOSS])
def test_a_chain_whose_reward_failed_leaves_a_smaller_group_and_one_left_alone_learns_nothing(estimator: str) -> None:
    learner = build(estimator, kl_coef=0.0)
    rows = batch(learner, play(learner, SCORES[:4]))  # the second query has one chain left
    scale = {"rloo": 3 / 2, "grpo": 13**-0.5, "dr_grpo": 1.0}[estimator]
    assert rows["advantages"][:, 0].tolist() == pytest.approx([-1 * scale, -3 * scale, 4 * scale, 0.0], rel=1e-3)
    metrics = learner.update(episodes=play(learner, SCORES[:4]), timesteps={UPDATE: 0})
    assert float(metrics["llm_1"]["policy_loss"].peek()) != 0.0


@pytest.mark.parametrize("weights", ["full", "lora"])
def test_without_a_critic_there_is_no_value_head_in_memory_state_optimizer_or_metrics(weights: str) -> None:
    learners = [build("gae", num_generations=3, weights=weights), build("rloo", weights=weights)]
    metrics = [learner.update(episodes=play(learner), timesteps={UPDATE: 0})["llm_1"] for learner in learners]
    names, held, stepped = [], [], []
    for learner in learners:
        names.append(set(learner.module["llm_1"].unwrapped().get_state()))
        held.append(sum(parameter.numel() for parameter in learner.module["llm_1"].parameters()))
        stepped.append(len(learner.get_optimizer("llm_1").state))
    hidden = learners[0].module["llm_1"].unwrapped().lm.config.hidden_size
    assert names[0] - names[1] == {"value_head.weight", "value_head.bias"} and names[1] < names[0]
    assert held[0] - held[1] == hidden + 1
    assert stepped[0] - stepped[1] == 2
    assert set(metrics[0]) - set(metrics[1]) == {"value_loss", "explained_variance"}


def test_each_query_is_dealt_as_often_as_asked_and_its_samples_are_told_apart() -> None:
    dealt, twice = deal(0, 0, 3, 4, samples=2), deal(0, 0, 8, 4, samples=2)
    assert [each.query for each in dealt] == [each.query for each in deal(0, 0, 3, 4) for _ in range(2)]
    assert [each.sample for each in dealt] == [0, 1] * 3
    assert len(set(twice)) == 16 and {each.sample for each in twice} == {0, 1, 2, 3}  # every query comes twice


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "agents"),
    [("rloo", 2), ("reinforce", 1), ("grpo", 1), ("dr_grpo", 1)],
)
def test_the_task_reward_rises(make_cory: MakeCory, estimator: str, agents: int) -> None:
    kl = {"kl_estimator": "k3"} if estimator in IN_LOSS else {}
    algorithm = make_cory(
        **kl,
        advantage=estimator,
        num_agents=agents,
        reward="tests.policies.sample_rewards:commas",
        queries=8,
        num_generations=4,
        minibatch=16,
        micro_batch=16,
        lr=1e-3,
        kl_coef=0.02,
        eval_every=5,
        eval_queries=32,
    )
    before = algorithm.evaluate_policies()["mean"]
    for _ in range(5):
        report = algorithm.train()["cory"]
    after = report["evaluation"]["mean"]
    assert after["task_reward"] > before["task_reward"] + 0.2
    assert len({sample["query"] for sample in report["samples"]}) == len(report["samples"]) == 4
    assert "value_loss" not in report["policy"]["llm_1"] and report["sampler_gap_max"] < 1e-3


def test_a_learner_that_starts_afresh_keeps_its_weights_alone_and_its_state_can_be_restored() -> None:
    learner = build("gae", kl_control="adaptive", score_scaling="normalize", kl_estimator="k1")
    learner.update(episodes=play(learner), timesteps={UPDATE: 0})
    assert 0.5 not in learner.kl_coefs.values() and all(m.count > 5 for m in learner.score_moments.values())
    used, kept = learner.get_state(), learner.module["llm_1"].unwrapped().get_state()
    learner.start_afresh()
    assert [len(optimizer.state) for optimizer in learner._optimizer_parameters] == [0, 0]
    assert set(learner.kl_coefs.values()) == {0.5}
    assert list(learner.score_moments.values()) == [token_ppo.ScoreMoments()] * 2
    for name, array in learner.module["llm_1"].unwrapped().get_state().items():
        np.testing.assert_array_equal(array, kept[name])
    empty = learner.get_state()
    learner.set_state(used)
    assert all(len(optimizer.state) > 0 for optimizer in learner._optimizer_parameters)
    learner.set_state(empty)
    assert [len(optimizer.state) for optimizer in learner._optimizer_parameters] == [0, 0]
    assert set(learner.kl_coefs.values()) == {0.5}


def adam_of(algorithm: Cory) -> list[str]:
    return [name for name in flat(learner_state(algorithm)["optimizer"]) if "exp_avg" in name]


def test_a_reset_at_an_exchange_empties_all_but_the_weights_and_lasts_through_a_checkpoint(
    make_cory: MakeCory, tmp_path: Path
) -> None:
    controlled = {"kl_control": "adaptive", "score_scaling": "normalize", "exchange_period": 2}
    algorithm = make_cory(**controlled, reset_on_exchange=True)
    algorithm.train()
    state = learner_state(algorithm)
    assert adam_of(algorithm) and all(coef != 0.3 for coef in state["kl_coefs"].values())
    assert all(moments["count"] > 7 for moments in state["score_moments"].values())
    weights = algorithm.weights("llm_1")
    assert algorithm.train()["cory"]["exchanged"]
    state = learner_state(algorithm)
    assert adam_of(algorithm) == [] and set(state["kl_coefs"].values()) == {0.3}
    assert {moments["count"] for moments in state["score_moments"].values()} == {token_ppo.ScoreMoments().count}
    assert any((algorithm.weights("llm_1")[name] != array).any() for name, array in weights.items())
    algorithm.save_to_path(tmp_path / "checkpoint")
    resumed = Cory.from_checkpoint(tmp_path / "checkpoint")
    try:
        for each in (algorithm, resumed):
            each.train()
        assert adam_of(resumed)
        assert_same_learner(learner_state(algorithm), learner_state(resumed))
        resumed.restore_from_path(str(tmp_path / "checkpoint"))  # into one that has moments
        assert adam_of(resumed) == []
    finally:
        resumed.stop()
