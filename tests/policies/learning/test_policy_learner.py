"""One policy's learner on rows of hand-chosen responses, without Ray, RLlib or other policies."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm
from transformers import GPT2Config, GPT2LMHeadModel

from policies.learning import losses, token_ppo
from policies.learning.estimation import AdvantageEstimator
from policies.learning.policy_learner import PolicyLearner
from policies.learning.policy_model import PolicyModel
from policies.learning.rows import NonFiniteUpdate, Rows, TrainRows, make_rows
from policies.models.lora import Lora
from policies.rollout.prompt_sampling import sample_prompts
from policies.sync_check import perturb
from tests.forked import run_ranks
from tests.paper import paper_hyperparameters
from tests.policies.learning.batches import make_batch

VOCAB = 64
PROMPT_LENGTHS, LENGTHS = [3, 9, 1, 6, 2, 5], [1, 8, 3, 5, 2, 7]
REWARDS = [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
"""Different for every row, so that tests can identify it."""
Build = Callable[..., PolicyLearner]


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random GPT-2 of two layers."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return str(folder)


def make_learner(
    path: str, weights: str, policy_index: int = 0, group: dist.ProcessGroup | None = None, seed: int = 0, **others: Any
) -> PolicyLearner:
    """A deterministic learner whose policy differs from the reference."""
    hyper = paper_hyperparameters(**{"lr": 1e-3, "num_epochs": 1, "grad_clip": None, "kl_estimator": "full", **others})
    model = PolicyModel(path, dtype="fp32", critic=hyper.critic, lora=Lora(4, 8.0) if weights == "lora" else None)
    model.load(perturb(model.state(), seed))
    if hyper.critic:
        torch.nn.init.normal_(model.value_head.weight, std=0.1, generator=torch.Generator().manual_seed(seed))
    return PolicyLearner(model, hyper, name="llm_2", policy_index=policy_index, group=group)


@pytest.fixture(params=["full", "lora"])
def build(path: str, request: pytest.FixtureRequest) -> Build:
    return lambda **others: make_learner(path, request.param, **others)


def make_row_batch(count: int = 6) -> Rows:
    """Rows of different lengths."""
    random = np.random.default_rng(0)
    prompts, responses = (
        [random.integers(1, VOCAB, length).tolist() for length in lengths[:count]]
        for lengths in (PROMPT_LENGTHS, LENGTHS)
    )
    for row, other in ((1, 0), (3, 0), (5, 3)):  # shared prefixes: of a prompt, and of a whole prompt
        if row < count:
            shared = min(PROMPT_LENGTHS[row], PROMPT_LENGTHS[other])
            prompts[row][:shared] = prompts[other][:shared]
    logprobs = [[-4.0] * length for length in LENGTHS[:count]]
    return make_rows(prompts, responses, logprobs, REWARDS[:count], [False] * count)


def ready(learner: PolicyLearner, rows: Rows | None = None) -> TrainRows:
    """Rows with scores and advantages, ready for an update; their task rewards are their rewards."""
    rows = make_row_batch() if rows is None else rows
    scored = rows.with_scores(learner.score(rows))
    estimates, _ = AdvantageEstimator(learner.hyperparameters).estimate(scored, rows.task_rewards.float())
    return scored.with_estimates(estimates)


def gradients(learner: PolicyLearner) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in learner.model.trainable() if p.grad is not None}


def moments(learner: PolicyLearner) -> list[dict[str, Tensor]]:
    """Adam's state of every parameter that it has stepped."""
    return [dict(learner.optimizer.state[p]) for p in learner.parameters if p in learner.optimizer.state]


def equal(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name], equal_nan=True) for name in one)


def mean_loss(learner: PolicyLearner, rows: TrainRows) -> Tensor:
    """The loss as a masked mean over all tokens, from one padded forward pass over all rows."""
    h, mask = learner.hyperparameters, rows.mask
    logprobs, values, _ = learner.model(rows)
    assert rows.values is not None and rows.returns is not None
    policy_loss, _ = losses.ppo(logprobs, rows.logprobs, rows.advantages, *h.clip_range)
    value_loss = token_ppo.value_loss(values, rows.values, rows.returns, h.value_clip)
    return ((policy_loss + h.value_coef * value_loss) * mask).sum() / mask.sum()


def minibatches(learner: PolicyLearner, update: int, count: int = 6) -> list[list[int]]:
    """The row indices of an update's mini-batches."""
    epochs, rows = range(learner.hyperparameters.num_epochs), make_row_batch(count)
    return [part.tolist() for epoch in epochs for part in learner._minibatches(rows, update, epoch)]


def test_the_learning_rate_warms_up_and_then_follows_the_schedule() -> None:
    def rates(**others: Any) -> list[float]:
        h = paper_hyperparameters(lr=8.0, num_updates=6, **others)
        return [round(h.lr_at(update), 6) for update in range(6)]

    assert rates() == [8.0] * 6
    assert rates(warmup_updates=3) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert rates(lr_schedule="linear", warmup_updates=2) == [2.666667, 5.333333, 8.0, 6.0, 4.0, 2.0]
    assert rates(lr_schedule="cosine") == [8.0, 7.464102, 6.0, 4.0, 2.0, 0.535898]


def test_an_update_uses_its_learning_rate_also_for_weight_decay(path: str) -> None:
    """With zero advantages, only weight decay changes the weights; with a learning rate of 0, nothing does."""
    learner = make_learner(path, "full", lr_schedule="linear", num_updates=2, advantage="rloo", weight_decay=0.5)
    before = learner.model.state()
    rows = ready(learner)
    rows = replace(rows, advantages=torch.zeros_like(rows.mask))
    assert learner.update(rows, update=1)["lr"] == pytest.approx(5e-4)
    for name, array in learner.model.state().items():
        np.testing.assert_allclose(array, before[name] * (1 - 5e-4 * 0.5), rtol=1e-6)
    halfway = learner.model.state()
    assert learner.update(rows, update=2)["lr"] == 0.0
    assert equal(learner.model.state(), halfway)


def test_tokens_are_weighted_by_truncated_importance_sampling(path: str) -> None:
    learner = make_learner(path, "full", importance_sampling_clip_max=2.0)
    rows = replace(ready(learner), advantages=make_row_batch().mask)
    same = replace(rows, sampler_logprobs=rows.logprobs)
    half = replace(rows, sampler_logprobs=rows.logprobs + np.log(2.0))
    rare = replace(rows, sampler_logprobs=rows.logprobs - np.log(5.0))
    plain, halved, capped = (learner.loss(case)[1] for case in (same, half, rare))
    assert halved["policy_loss"] == pytest.approx(plain["policy_loss"] / 2)
    assert capped["policy_loss"] == pytest.approx(plain["policy_loss"] * 2)
    assert plain["value_loss"] == halved["value_loss"] == capped["value_loss"]


def test_an_update_without_rows_changes_nothing(path: str) -> None:
    learner = make_learner(path, "full")
    before, rows = learner.model.state(), ready(learner)
    metrics = learner.update(rows.select(torch.tensor([], dtype=torch.int64)), 0)
    assert equal(learner.model.state(), before) and metrics["loss"] == metrics["grad_norm"] == 0.0


def test_scores_equal_those_of_one_padded_forward_pass_and_are_zero_outside_the_mask(build: Build) -> None:
    learner, rows = build(micro_batch_size=2), make_row_batch()
    scores, expected = learner.score(rows).columns(), learner.model.score(rows).columns()
    assert scores.keys() == expected.keys()
    for name, column in scores.items():
        torch.testing.assert_close(column, expected[name] * rows.mask, rtol=0, atol=1e-5)
        assert (column * (1 - rows.mask) == 0).all()


@pytest.mark.parametrize(("micro_batch_size", "tokens"), [(1, None), (3, None), (64, None), (64, 16)])
def test_micro_batches_do_not_change_the_loss_and_gradient_of_the_mean_over_tokens(
    build: Build, micro_batch_size: int, tokens: int | None
) -> None:
    learner = build(micro_batch_size=micro_batch_size, micro_batch_tokens=tokens)
    rows = ready(learner)
    loss = mean_loss(learner, rows)
    loss.backward()
    expected = gradients(learner)
    metrics = learner.update(rows, 0)
    ours = gradients(learner)
    assert ours.keys() == expected.keys()
    max_grad = max(float(grad.abs().max()) for grad in expected.values())
    assert max(float((ours[name] - expected[name]).abs().max()) for name in expected) < 2e-6 * max_grad
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    total = metrics["policy_loss"] + learner.hyperparameters.value_coef * metrics["value_loss"]
    assert total == pytest.approx(metrics["loss"], abs=1e-6)


def test_each_mini_batch_is_divided_by_its_own_tokens(build: Build) -> None:
    learner = build(steps=3, micro_batch_size=1, lr=1e-12)  # so that weights hardly change
    rows = ready(learner)
    parts = [rows.select(torch.tensor(part)) for part in minibatches(learner, 0)]
    tokens = [float(part.mask.sum()) for part in parts]
    assert len(set(tokens)) > 1
    means = [mean_loss(learner, part).item() for part in parts]
    weighted = sum(mean * count for mean, count in zip(means, tokens, strict=True)) / sum(tokens)
    assert learner.update(rows, 0)["loss"] == pytest.approx(weighted, abs=1e-5)
    mean_loss(learner, parts[-1]).backward()  # adds to the gradients that the last mini-batch left
    for name, twice in gradients(learner).items():
        learner.optimizer.zero_grad()
        mean_loss(learner, parts[-1]).backward()
        torch.testing.assert_close(twice, 2 * gradients(learner)[name], rtol=1e-3, atol=1e-6)


def test_adam_takes_a_step_per_mini_batch_and_keeps_its_moments_from_update_to_update(build: Build) -> None:
    learner = build()
    learner.update(ready(learner), 0)
    first = [state["exp_avg"].clone() for state in moments(learner)]
    learner.update(ready(learner), 1)
    for moment, state, grad in zip(first, moments(learner), gradients(learner).values(), strict=True):
        torch.testing.assert_close(state["exp_avg"], 0.9 * moment + 0.1 * grad)
        assert float(state["step"]) == 2
    learner = build(num_epochs=3, steps=2)
    learner.update(ready(learner), 0)
    assert {float(state["step"]) for state in moments(learner)} == {6.0}
    learner.reset_optimizer()
    assert moments(learner) == []


def test_gradients_are_clipped_and_the_norm_before_clipping_is_reported(build: Build) -> None:
    free, clipped = build(), build(grad_clip=0.05)
    metrics = [learner.update(ready(learner), 0) for learner in (free, clipped)]
    before, after = (float(get_total_norm(gradients(learner).values())) for learner in (free, clipped))
    assert [values["grad_norm"] for values in metrics] == pytest.approx([before, before], rel=1e-4)
    assert after == pytest.approx(0.05, rel=1e-3) and before > 0.1


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo"])
def test_the_kl_can_be_in_the_loss(path: str, advantage: str) -> None:
    learner = make_learner(path, "full", advantage=advantage, kl_estimator="k3")
    rows = ready(learner, replace(make_row_batch(), groups=torch.tensor([0, 0, 0, 1, 1, 1])))
    assert rows.reference_logprobs is not None
    surrogate = -float((rows.advantages * rows.mask).sum() / rows.mask.sum())
    difference = (rows.reference_logprobs - rows.logprobs) * rows.mask
    kl = float((difference.exp() - difference - 1).sum() / rows.mask.sum())
    assert kl > 1e-4
    metrics = learner.update(rows, 0, kl_coef=0.5)
    assert metrics["loss"] == pytest.approx(surrogate + 0.5 * kl, rel=1e-3)
    assert "value_loss" not in metrics
    padded = replace(rows, reference_logprobs=rows.reference_logprobs - 1000.0 * (1 - rows.mask))
    assert torch.isfinite(learner.loss(padded, kl_coef=0.5)[0])  # padding must not overflow


def test_a_learner_resumes_a_saved_state_exactly(build: Build, tmp_path: Path) -> None:
    first, second = build(steps=2, num_epochs=2), build(steps=2, num_epochs=2)
    first.update(ready(first), 0)
    folders = str(tmp_path / "weights"), str(tmp_path / "moments")
    first.save(*folders)
    for number in (1, 2):  # the second learner is ahead of the state that it restores
        second.update(ready(second), number)
    second.restore(*folders)
    assert first.update(ready(first), 1) == second.update(ready(second), 1)
    assert equal(first.model.state(), second.model.state())
    slower = build(lr=5e-4)
    slower.restore(*folders)
    assert {group["lr"] for group in slower.optimizer.param_groups} == {5e-4}


def test_restoring_a_state_from_before_the_first_step_clears_the_moments(build: Build, tmp_path: Path) -> None:
    first, second = build(), build()
    folders = str(tmp_path / "weights"), str(tmp_path / "moments")
    first.save(*folders)
    second.update(ready(second), 0)
    before = moments(second)
    second.restore(folders[0], None)
    assert equal(second.model.state(), first.model.state()) and moments(second) == before != []
    second.restore(*folders)
    assert moments(second) == []
    with pytest.raises(KeyError, match="has no lm"):
        second.restore(folders[1], None)


def test_a_non_finite_gradient_changes_no_weight_and_the_error_names_the_policy(build: Build) -> None:
    learner = build()
    learner.update(ready(learner), 0)
    torch.nn.init.constant_(learner.model.value_head.bias, float("nan"))
    before = learner.model.state()
    with pytest.raises(NonFiniteUpdate, match=r"gradient of llm_2 is not finite in update 2") as raised:
        learner.update(ready(learner), 1)
    error = pickle.loads(pickle.dumps(raised.value))  # as when a remote learner raises it
    assert str(error) == str(raised.value) and "values, advantages, returns" in str(error)
    assert error.rows.task_rewards.tolist() == REWARDS
    assert equal(learner.model.state(), before)
    assert {float(state["step"]) for state in moments(learner)} == {1.0}


def test_mini_batches_depend_only_on_seed_update_and_policy_and_have_every_row_once_per_epoch(path: str) -> None:
    def draw(update: int, **others: Any) -> list[list[int]]:
        return minibatches(make_learner(path, "lora", steps=3, num_epochs=2, **others), update)

    batches = draw(3)
    for epoch in (batches[:3], batches[3:]):
        assert [len(indices) for indices in epoch] == [2, 2, 2]
        assert sorted(index for indices in epoch for index in indices) == [0, 1, 2, 3, 4, 5]
    assert batches[:3] != batches[3:]
    np.random.seed(7)
    torch.manual_seed(7)
    assert draw(3) == batches != draw(4)
    assert draw(3, policy_index=1) != batches


def test_mini_batches_do_not_depend_on_the_order_of_the_queries_although_they_share_its_random_stream(
    path: str,
) -> None:
    learner, size, updates = make_learner(path, "lora", steps=2), 32, 2000
    seed = learner.hyperparameters.seed
    streams = [np.random.default_rng(entropy).permutation(size) for entropy in ([seed, 3], [seed, 3, 0, 0])]
    assert np.array_equal(streams[0], streams[1])
    correlations = []
    for update in range(updates):
        queries = np.array(
            [ref.query for ref in sample_prompts(seed, update, size, size)]
        )  # epoch `update` of the data
        first, _ = learner._minibatches(make_batch(prompts=torch.from_numpy(queries).unsqueeze(1)), update, 0)
        in_first = np.isin(np.arange(size), first.numpy())
        correlations.append([np.corrcoef(in_first, other)[0, 1] for other in (queries, np.arange(size))])
    means = np.mean(correlations, 0)
    assert (np.abs(means) < 4 / np.sqrt(size * updates)).all(), means  # four standard errors, 0.016


def test_empty_mini_batches_are_skipped(build: Build) -> None:
    learner = build(steps=6)
    metrics = learner.update(ready(learner, make_row_batch(count=2)), 0)  # the other queries' rewards failed
    assert {float(state["step"]) for state in moments(learner)} == {2.0}
    assert all(np.isfinite(value) for value in metrics.values())


def test_scoring_with_other_weights_restores_the_current_weights(build: Build) -> None:
    learner = build()
    rows, before = make_row_batch(), learner.model.state()
    scored = learner.score(rows)
    weights = dict(learner.stream_weights())
    if any("lora_" in name for name in weights):  # without an adapter
        reference = {name: np.zeros_like(array) for name, array in weights.items()}
    else:
        reference = {name: p.numpy() for name, p in learner.model.reference().named_parameters()}
    under = learner.score_under(reference, rows)
    torch.testing.assert_close(under.logprobs, scored.reference_logprobs, rtol=0, atol=1e-5)
    assert (scored.logprobs - under.logprobs).abs().max() > 1e-3
    assert equal(learner.model.state(), before) and moments(learner) == []


def test_weights_are_streamed_by_hugging_face_names_without_the_value_head(path: str) -> None:
    learner = make_learner(path, "full")
    weights = dict(learner.stream_weights())
    assert weights.keys() == {name for name, _ in learner.model.lm.named_parameters()}
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}


# Several processes that train one policy.


def rank(number: int, ranks: int, path: str, weights: str, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=ranks)
    learner = make_learner(path, weights, group=dist.group.WORLD, seed=number, steps=2, num_epochs=2, lr=1e-4)
    learner.check_forward()
    metrics = []
    for update, count in enumerate((6, 6, 1)):  # with a single row, all ranks but one get none
        metrics.append(learner.update(ready(learner, make_row_batch(count)), update))
    torch.save((metrics, learner.model.state(), learner.score(make_row_batch())), f"{out}/{number}")
    dist.destroy_process_group()


@pytest.mark.parametrize("weights", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_ranks_share_the_work_and_compute_the_same_as_a_single_process(path: str, weights: str, tmp_path: Path) -> None:
    run_ranks(rank, 3, 3, path, weights, str(tmp_path / "store"), str(tmp_path))
    single = make_learner(path, weights, steps=2, num_epochs=2, lr=1e-4)  # ranks start from the weights of rank 0
    metrics = [single.update(ready(single, make_row_batch(count)), update) for update, count in enumerate((6, 6, 1))]
    results = [torch.load(tmp_path / str(number), weights_only=False) for number in range(3)]
    # Scores, not weights: the gradient of GPT-2's key biases is pure rounding error, which Adam amplifies.
    expected = single.score(make_row_batch())
    for rank_metrics, state, scores in results:
        assert equal(state, results[0][1])
        for ours, theirs in zip(rank_metrics, metrics, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
        for name, column in scores.columns().items():
            torch.testing.assert_close(column, expected.columns()[name], rtol=0, atol=2e-5)


def test_learning_needs_neither_ray_nor_vllm_nor_an_environment() -> None:
    folder = Path(sys.modules[PolicyLearner.__module__].__file__ or "").parent
    files = [file.relative_to(folder).with_suffix("") for file in folder.rglob("*.py") if file.stem != "__init__"]
    modules = [".".join(("policies.learning", *file.parts)) for file in files]
    assert "policies.learning.forward.prefix_tree" in modules
    code = (
        "import sys\nfor name in ('ray', 'vllm', 'pettingzoo', 'gymnasium', 'pydantic'): sys.modules[name] = None\n"
        f"for name in {modules}: __import__(name)\n"
        "assert not any(name.split('.')[0] in ('cory_env', 'launch') for name in sys.modules)"
    )
    assert len(modules) > 5
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder.parents[1])
