"""A real learner of two small LLMs, fed with episodes of hand-chosen responses on the bundled task."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.policy.sample_batch import MultiAgentBatch
from torch import Tensor
from torch.nn.utils import get_total_norm
from transformers import GPT2Config, GPT2LMHeadModel

from cory_env.episode import ChainEpisode
from cory_env.tokenizer import DEFAULT_TOKENIZER
from policies.cory_config import CoryConfig
from policies.generation.generator import Response
from policies.learning import token_ppo
from policies.rllib.token_batch import TokenBatch
from policies.rllib.token_ppo_learner import UPDATE, NonFiniteUpdate, TokenPPOLearner
from policies.rollout.chain_runner import as_rllib_episode
from policies.rollout.role_mapping import RoleMapping
from policies.self_test import perturb
from tests.policies.conftest import TINY

SETTINGS = {
    **TINY,
    "queries": 4,
    "minibatch": 4,
    "epochs": 1,
    "lr": 1e-3,
    "grad_clip": None,
    "max_response": 8,
    "kl_estimator": "full",
}
LENGTHS = [1, 8, 3, 5, 2, 7, 4]
REVIEW = " a film that nobody who likes films should miss, made by people who care about what they do"
Build = Callable[..., TokenPPOLearner]
Episodes = list[MultiAgentEpisode]
BOTH = ("llm_1", "llm_2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random GPT-2 of two layers with the bundled tokenizer."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=4096, n_embd=32, n_layer=2, n_head=2, initializer_range=0.1)
    GPT2LMHeadModel(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEFAULT_TOKENIZER / name, path)
    return str(path)


@pytest.fixture(params=["full", "lora"])
def build(model: str, request: pytest.FixtureRequest) -> Build:
    """Builds learners whose LLMs differ from each other and from the reference, the same ones every time."""

    def make(**settings: Any) -> TokenPPOLearner:
        config = CoryConfig().cory(**{**SETTINGS, "model": model, "weights": request.param, **settings})
        config.validate()
        s = config.settings
        chain = s.make_chain(s.make_task(), s.make_tokenizer())
        spaces = chain.observation_space(), chain.action_space()
        learner: TokenPPOLearner = config.build_learner(spaces=dict.fromkeys(s.modules, spaces))
        for seed, module_id in enumerate(s.modules):
            module = learner.module[module_id].unwrapped()
            module.set_state(perturb(module.get_state(), seed))
            torch.nn.init.normal_(module.value_head.weight, std=0.1, generator=torch.Generator().manual_seed(seed))
        return learner

    return make


def play(learner: TokenPPOLearner, modules: Sequence[str] = BOTH, shift: int = 0, bonus: float = 0.0) -> Episodes:
    """One episode per query: position p of `modules` answers query q with words of the review and earns 2 q - p.

    `shift` and `bonus` change the words and rewards of all positions but the first.
    """
    s = learner.settings
    chain = s.make_chain(s.make_task(), s.make_tokenizer(), num_agents=len(modules))
    mapping = RoleMapping(chain.roles, tuple(modules))
    words = chain.tokenizer(REVIEW)["input_ids"]
    episodes = []
    for query in range(s.queries):
        episode, sampled = ChainEpisode(chain, chain.task.train[query]), []
        for position in range(len(modules)):
            start = query + (3 + shift) * position
            tokens = words[start : start + LENGTHS[start % 7]]
            episode.respond({"tokens": tokens, "length": len(tokens)})
            sampled.append(Response(tokens, [-5.0] * len(tokens)))
        rewards = [2.0 * query - position + bool(position) * bonus for position in range(len(modules))]
        episodes.append(as_rllib_episode(episode, sampled, rewards, mapping))
    return episodes


def update(learner: TokenPPOLearner, episodes: Episodes, number: int = 0) -> dict[str, dict[str, float]]:
    """One update; returns its metrics per LLM."""
    results = learner.update(episodes=episodes, timesteps={UPDATE: number})
    return {mid: {name: stat.peek() for name, stat in results[mid].items()} for mid in BOTH}


def weights(learner: TokenPPOLearner, module_id: str) -> dict[str, np.ndarray]:
    return learner.module[module_id].unwrapped().get_state()


def equal(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name], equal_nan=True) for name in one)


def gradients(learner: TokenPPOLearner, module_id: str) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in learner.module[module_id].named_parameters() if p.grad is not None}


def adam(learner: TokenPPOLearner, module_id: str) -> list[dict[str, Tensor]]:
    """Adam's state of every parameter that it has stepped."""
    optimizer = learner.get_optimizer(module_id)
    return [dict(optimizer.state[p]) for p in learner.module[module_id].parameters() if p in optimizer.state]


def minibatches(learner: TokenPPOLearner, episodes: Episodes, number: int = 0) -> list[MultiAgentBatch]:
    """What `update` would train on."""
    learner.before_gradient_based_update(timesteps={UPDATE: number})
    return list(learner._create_iterator_if_necessary(training_data=TrainingData(episodes=episodes)))


def mean_loss(learner: TokenPPOLearner, module_id: str, rows: dict[str, Tensor]) -> Tensor:
    """The loss as a masked mean over all tokens, from one padded forward pass over all rows."""
    s, mask, new = learner.settings, rows["mask"], learner.module[module_id].forward_train(rows)
    policy, _ = token_ppo.policy_loss(new[Columns.ACTION_LOGP], rows["logprobs"], rows["advantages"], s.clip)
    value = token_ppo.value_loss(new[Columns.VF_PREDS], rows["values"], rows["returns"], s.value_clip)
    return ((policy + s.value_coef * value) * mask).sum() / mask.sum()


def scored_rows(learner: TokenPPOLearner, module_id: str, episodes: Episodes) -> Any:
    """One LLM's rows with advantages and returns, by the formulas alone and without micro-batches."""
    s, rows = learner.settings, TokenBatch()(rl_module=None, batch={}, episodes=episodes)[module_id]
    old, mask = learner.module[module_id].unwrapped().score(rows), rows["mask"]
    rewards = token_ppo.token_rewards(rows["rewards"], old["full_kl"], mask, s.kl_coef)
    advantages, returns = token_ppo.gae(rewards, old["values"], mask, s.gamma, s.lam)
    advantages = token_ppo.whiten(advantages, mask, token_ppo.masked_moments(advantages, mask))
    return {**rows, **old, "advantages": advantages, "returns": returns}


@pytest.mark.parametrize("micro_batch", [1, 3, 64])
def test_micro_batches_leave_loss_and_gradient_those_of_one_mean_over_tokens(build: Build, micro_batch: int) -> None:
    learner = build(micro_batch=micro_batch)
    episodes = play(learner)
    expected = {}
    for module_id in BOTH:
        loss = mean_loss(learner, module_id, scored_rows(learner, module_id, episodes))
        loss.backward()
        expected[module_id] = loss.item(), gradients(learner, module_id)
    reported = update(learner, episodes)
    for module_id, (total, whole) in expected.items():
        ours = gradients(learner, module_id)
        assert ours.keys() == whole.keys()
        largest = max(float(grad.abs().max()) for grad in whole.values())
        assert max(float((ours[name] - whole[name]).abs().max()) for name in whole) < 2e-6 * largest
        assert reported[module_id]["total_loss"] == pytest.approx(total, abs=1e-6)


def test_each_mini_batch_is_divided_by_its_own_tokens(build: Build) -> None:
    learner = build(minibatch=2, micro_batch=1)
    batches = minibatches(learner, play(learner))
    assert len({float(batch["llm_1"]["mask"].sum()) for batch in batches}) == 2
    for batch in batches:
        expected = {mid: mean_loss(learner, mid, rows).item() for mid, rows in batch.policy_batches.items()}
        assert learner._uncompiled_update(batch.policy_batches)[1] == pytest.approx(expected, abs=1e-6)


def test_rows_of_one_llm_leave_the_other_untouched(build: Build) -> None:
    learner = build()
    update(learner, play(learner))
    one, two = weights(learner, "llm_1"), weights(learner, "llm_2")
    update(learner, play(learner, modules=["llm_1"]), number=1)
    assert not equal(weights(learner, "llm_1"), one)
    assert equal(weights(learner, "llm_2"), two) and gradients(learner, "llm_2") == {}
    assert {float(state["step"]) for state in adam(learner, "llm_2")} == {1.0}


def test_an_llm_learns_the_same_whatever_the_other_one_is_taught(build: Build) -> None:
    learners = [build(partner_reward=0.0), build(partner_reward=0.0)]
    update(learners[0], play(learners[0]))
    update(learners[1], play(learners[1], shift=1, bonus=50.0))
    assert equal(weights(learners[0], "llm_1"), weights(learners[1], "llm_1"))
    assert not equal(weights(learners[0], "llm_2"), weights(learners[1], "llm_2"))


def test_adam_takes_a_step_per_mini_batch_and_keeps_its_moments_from_update_to_update(build: Build) -> None:
    learner = build()
    update(learner, play(learner))
    first = [state["exp_avg"].clone() for state in adam(learner, "llm_1")]
    update(learner, play(learner), number=1)
    grads = gradients(learner, "llm_1").values()
    for moment, state, grad in zip(first, adam(learner, "llm_1"), grads, strict=True):
        torch.testing.assert_close(state["exp_avg"], 0.9 * moment + 0.1 * grad)
        assert float(state["step"]) == 2
    learner = build(epochs=3, minibatch=2)
    update(learner, play(learner))
    assert {float(state["step"]) for state in adam(learner, "llm_2")} == {6.0}


def test_gradients_are_clipped_per_llm_and_the_norm_before_is_reported(build: Build) -> None:
    free, clipped = build(), build(grad_clip=0.05)
    metrics = update(free, play(free)), update(clipped, play(clipped))
    for module_id in BOTH:
        before, after = (float(get_total_norm(gradients(x, module_id).values())) for x in (free, clipped))
        assert [values[module_id]["grad_norm"] for values in metrics] == pytest.approx([before, before], rel=1e-4)
        assert after == pytest.approx(0.05, rel=1e-3) and before > 0.1


def test_each_llm_is_measured_and_trained_on_what_it_generated_after_an_exchange(build: Build) -> None:
    learner = build()
    episodes = play(learner, modules=["llm_2", "llm_1"])  # as of a mapping that has rotated since
    metrics = update(learner, episodes)
    # task rewards of the pioneer: 0, 2, 4, 6; of the observer: -1, 1, 3, 5
    assert {mid: metrics[mid]["task_reward"] for mid in metrics} == {"llm_1": 2.0, "llm_2": 3.0}
    rows = minibatches(learner, episodes)[0]["llm_2"]
    real = [response[mask.bool()].tolist() for response, mask in zip(rows["responses"], rows["mask"], strict=True)]
    assert sorted(real) == sorted(e.agent_episodes["pioneer"].actions[0]["tokens"] for e in episodes)


@pytest.mark.parametrize("control", ["adaptive", "fixed"])
def test_the_kl_coefficient_follows_the_measured_kl_only_where_it_is_adaptive(build: Build, control: str) -> None:
    learner = build(kl_control=control, kl_coef=0.3, kl_target=0.6, kl_horizon=40)
    for number in range(2):
        before = dict(learner.kl_coefs)
        for module_id, measured in update(learner, play(learner), number).items():
            assert measured["kl"] > 0 and measured["kl_coef"] == before[module_id]
            adapted = token_ppo.adapt_kl_coef(before[module_id], measured["kl"], 0.6, batch=4, horizon=40)
            assert adapted != pytest.approx(before[module_id])
            expected = adapted if control == "adaptive" else 0.3
            assert learner.kl_coefs[module_id] == pytest.approx(expected, rel=1e-6)


def test_a_restored_learner_goes_on_exactly_as_the_first_would_have(build: Build) -> None:
    settings = {"kl_control": "adaptive", "kl_horizon": 40, "score_scaling": "normalize", "minibatch": 2, "epochs": 2}
    first, second = build(**settings), build(**settings)
    update(first, play(first))
    state = pickle.loads(pickle.dumps(first.get_state()))
    for number in (1, 2):  # the second learner is ahead when the older state comes
        update(second, play(second, bonus=9.0), number)
    second.set_state(state)
    assert second.kl_coefs == first.kl_coefs != {"llm_1": 0.3, "llm_2": 0.3}
    assert update(first, play(first), number=1) == update(second, play(second), number=1)
    assert first.kl_coefs == second.kl_coefs and first.score_moments == second.score_moments
    assert all(equal(weights(first, module_id), weights(second, module_id)) for module_id in BOTH)


def test_a_gradient_that_is_not_finite_stops_before_any_weight_changes_and_names_the_llm(build: Build) -> None:
    learner = build()
    update(learner, play(learner))
    torch.nn.init.constant_(learner.module["llm_2"].value_head.bias, float("nan"))
    kept = {module_id: weights(learner, module_id) for module_id in BOTH}
    with pytest.raises(NonFiniteUpdate, match=r"gradient of llm_2 is not finite in update 2") as caught:
        update(learner, play(learner), number=1)
    error = pickle.loads(pickle.dumps(caught.value))  # as it comes from a learner's process
    assert str(error) == str(caught.value) and "values, advantages, returns" in str(error)
    assert sorted(error.rows["task_rewards"].tolist()) == [-1.0, 1.0, 3.0, 5.0]
    for module_id, array in kept.items():
        assert equal(weights(learner, module_id), array)
        assert {float(state["step"]) for state in adam(learner, module_id)} == {1.0}


def test_mini_batches_depend_on_seed_and_update_alone_and_hold_every_row_once_per_epoch(build: Build) -> None:
    def dealt(learner: TokenPPOLearner, number: int) -> list[list[float]]:  # task rewards name the rows
        return [batch["llm_1"]["task_rewards"].tolist() for batch in minibatches(learner, play(learner), number)]

    one, same, other = (build(queries=6, minibatch=2, epochs=2, seed=seed) for seed in (1, 1, 2))
    batches = dealt(one, 3)
    for epoch in (batches[:3], batches[3:]):
        assert [len(rows) for rows in epoch] == [2, 2, 2]
        assert sorted(reward for rows in epoch for reward in rows) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert batches[:3] != batches[3:]
    np.random.seed(7)
    torch.manual_seed(7)
    assert dealt(one, 3) == dealt(same, 3) == batches != dealt(one, 4)
    assert dealt(other, 3) != batches


def test_score_scaling_changes_what_is_trained_on_and_not_what_is_reported(build: Build) -> None:
    none, scale, normalize = (build(kl_coef=0.0, lam=1.0, score_scaling=x) for x in ("none", "scale", "normalize"))
    batches = [minibatches(learner, play(learner))[0]["llm_1"] for learner in (none, normalize)]
    summed = torch.tensor([-1.0, 3.0, 7.0, 11.0])  # 2 q + (2 q - 1): deviation sqrt(80 / 3), mean 5
    for rows, expected in zip(batches, (summed, (summed - 5) / (80 / 3) ** 0.5), strict=True):
        torch.testing.assert_close(rows["returns"][rows["task_rewards"].argsort(), 0], expected, rtol=1e-5, atol=1e-5)
    metrics = [update(learner, play(learner)) for learner in (none, scale, normalize)]
    for name in ("task_reward", "score_mean", "combined_reward", "kl"):
        assert len({values["llm_1"][name] for values in metrics}) == 1
    assert len({values["llm_1"]["value_loss"] for values in metrics}) == 3


def test_measuring_under_other_weights_trains_nothing_and_puts_the_present_weights_back(build: Build) -> None:
    learner = build(eval_kl_coef=0.5)
    episodes, kept = play(learner), weights(learner, "llm_1")
    rows = scored_rows(learner, "llm_1", episodes)
    if learner.settings.weights == "lora":  # without an adapter
        reference = {name.removeprefix("lm."): np.zeros_like(array) for name, array in kept.items()}
    else:
        reference = {name: p.numpy() for name, p in learner.module["llm_1"].unwrapped().reference().named_parameters()}
    scored = learner.score_under("llm_1", reference, rows)
    torch.testing.assert_close(scored, rows["reference_logprobs"] * rows["mask"], rtol=0, atol=1e-5)
    measured = learner.measure_episodes(episodes)["llm_1"]
    kl = (rows["full_kl"] * rows["mask"]).sum(1).mean().item()
    expected = {"task_reward": 3.0, "kl": kl, "combined_reward": 3.0 - 0.5 * kl}
    assert {name: measured[name].mean() for name in expected} == pytest.approx(expected, rel=1e-5)
    assert measured["task_reward"].tolist() == [0.0, 2.0, 4.0, 6.0]  # in the order of the episodes
    assert equal(weights(learner, "llm_1"), kept) and adam(learner, "llm_1") == []


def test_mini_batches_that_skipped_queries_leave_empty_are_passed_over(build: Build) -> None:
    learner = build(minibatch=1)
    metrics = update(learner, play(learner)[:2])  # the rewards of the other two queries failed
    assert {float(state["step"]) for state in adam(learner, "llm_1")} == {2.0}
    assert all(np.isfinite(values["policy_loss"]) for values in metrics.values())
