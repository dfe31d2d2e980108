"""Rows of agents that act several times: credit, comparisons, mini-batches, and the gradient of one masked row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from policies.learning.advantages import dr_grpo, rloo
from policies.learning.credit import assign_credit, turn_rewards
from policies.learning.estimation import AdvantageEstimator
from policies.learning.metrics import compute_response_metrics
from policies.learning.rows import MAX_TURNS, Rows, make_rows
from tests.paper import paper_credit, paper_hyperparameters
from tests.policies.learning.test_policy_learner import VOCAB, make_learner, path  # noqa: F401 - a fixture

NUM_SEEDS, NUM_SAMPLES = 5, 3


def make_episodes(
    random: np.random.Generator, agents: int = 2, max_turns: int = 4, tokens: int = 3
) -> tuple[Rows, list[tuple[int, int, int, int]]]:
    """Rows of episodes with different numbers of turns, and (seed, episode, agent, turn) of each."""
    keys = []
    for episode in range(NUM_SEEDS * NUM_SAMPLES):
        for agent in range(agents):
            keys += [
                (episode // NUM_SAMPLES, episode, agent, turn) for turn in range(random.integers(1, max_turns + 1))
            ]
    responses = [random.integers(1, 9, random.integers(1, tokens + 1)).tolist() for _ in keys]
    rows = make_rows(
        [random.integers(1, 9, 4).tolist() for _ in keys],
        responses,
        [[-1.0] * len(response) for response in responses],
        random.integers(0, 5, len(keys)).tolist(),
        [True] * len(keys),
        groups=[(seed * agents + agent) * MAX_TURNS + turn for seed, _, agent, turn in keys],
        chains=[episode for _, episode, _, _ in keys],
        positions=[agent for _, _, agent, _ in keys],
        turns=[turn for *_, turn in keys],
        partner_rewards=random.integers(-3, 3, len(keys)).tolist(),
    )
    return rows, keys


@pytest.mark.parametrize(("gamma", "alpha"), [(1.0, 0.0), (0.5, 0.0), (0.9, -1.0), (0.0, 1.0)])
def test_a_response_is_credited_with_what_its_agent_gets_from_then_on(gamma: float, alpha: float) -> None:
    rows, keys = make_episodes(np.random.default_rng(1))
    order = torch.from_numpy(np.random.default_rng(2).permutation(len(keys)))
    credit = paper_credit(partner_reward=alpha, chain_gamma=gamma)
    estimator = AdvantageEstimator(paper_hyperparameters(advantage="rloo"))
    credited = torch.zeros(len(keys))
    assert rows.partner_rewards is not None
    credited[order] = assign_credit({"llm_1": rows.select(order)}, credit, {"llm_1": estimator})["llm_1"]
    for row, (_, episode, agent, turn) in enumerate(keys):
        expected = 0.0
        for other, (_, other_episode, other_agent, other_turn) in enumerate(keys):
            if (other_episode, other_agent) == (episode, agent) and other_turn >= turn:
                reward = float(rows.task_rewards[other]) + alpha * float(rows.partner_rewards[other])
                expected += gamma ** (other_turn - turn) * reward
        assert credited[row] == pytest.approx(expected)


@pytest.mark.parametrize(("estimator", "is_leave_one_out"), [(rloo, True), (dr_grpo, False)])
def test_baselines_come_from_other_episodes_only(
    estimator: Callable[[Tensor, Tensor], Tensor], is_leave_one_out: bool
) -> None:
    rows, keys = make_episodes(np.random.default_rng(3))
    totals = torch.from_numpy(np.random.default_rng(4).normal(size=len(keys)))
    members, groups, lookup = rows.comparisons()
    advantages = estimator(totals[members], groups)[lookup]
    num_fallbacks = 0
    for row, (seed, episode, agent, turn) in enumerate(keys):
        others = [k for k, key in enumerate(keys) if key[0] == seed and key[1] != episode and key[2:] == (agent, turn)]
        if not others:
            num_fallbacks += 1
            others = [k for k, key in enumerate(keys) if key[0] == seed and key[1] != episode and key[2] == agent]
        baseline = totals[others if is_leave_one_out else [row, *others]].mean()
        assert advantages[row] == pytest.approx(float(totals[row] - baseline), abs=1e-6)
    assert 0 < num_fallbacks < len(keys)


def test_a_response_without_any_other_has_no_advantage_and_is_counted() -> None:
    rows, _ = make_episodes(np.random.default_rng(5))
    rows = rows.select(rows.chains % NUM_SAMPLES == 0)  # one episode per seed
    scored = rows.with_scores(_scores(rows))
    estimator = AdvantageEstimator(paper_hyperparameters(advantage="rloo"))
    estimates, metrics = estimator.estimate(scored, torch.arange(len(rows), dtype=torch.float32))
    assert metrics["frac_alone"] == metrics["frac_zero_std"] == 1.0
    assert not estimates.advantages.any()


def test_metrics_are_of_whole_episodes() -> None:
    rows, keys = make_episodes(np.random.default_rng(6))
    metrics = compute_response_metrics(rows.with_scores(_scores(rows)), 0.0)
    agents = sorted({key[1:3] for key in keys})
    for index, agent in enumerate(agents):
        own = [row for row, key in enumerate(keys) if key[1:3] == agent]
        assert metrics["task_reward"][index] == rows.task_rewards[own].sum()
        assert metrics["response_length"][index] == rows.mask[own].sum()
        assert metrics["repetition"][index] <= 1.0
    assert len(metrics["task_reward"]) == len(agents)


def test_mini_batches_hold_whole_episodes(path: str) -> None:  # noqa: F811
    rows, _ = make_episodes(np.random.default_rng(7))
    learner = make_learner(path, "full", steps=4)
    parts = [*learner._minibatches(rows, update=3, epoch=1)]
    assert [*map(torch.Tensor.tolist, parts)] == [*map(torch.Tensor.tolist, learner._minibatches(rows, 3, 1))]
    assert sorted(torch.cat(parts).tolist()) == list(range(len(rows)))
    episodes = [set(rows.chains[part].tolist()) for part in parts]
    assert [*map(len, episodes)] == [4, 4, 4, 3]
    assert len(set.union(*episodes)) == NUM_SEEDS * NUM_SAMPLES
    assert parts[0].tolist() != next(iter(learner._minibatches(rows, update=4, epoch=1))).tolist()


def _scores(rows: Rows) -> Any:
    from policies.learning.rows import frozen_scores

    return frozen_scores(rows)


# One masked row.


def make_turns(lengths: list[tuple[int, int]], random: np.random.Generator) -> tuple[Rows, list[int], list[bool]]:
    """One episode of one agent: as rows, and as one row of tokens with a mask of those that the agent generated."""
    tokens: list[int] = []
    generated: list[bool] = []
    prompts, responses = [], []
    for observation, response in lengths:
        tokens += random.integers(1, VOCAB, observation).tolist()
        generated += [False] * observation
        prompts.append([*tokens])
        responses.append(random.integers(1, VOCAB, response).tolist())
        tokens += responses[-1]
        generated += [True] * response
    count = len(lengths)
    rows = make_rows(
        prompts,
        responses,
        [[-3.0] * len(response) for response in responses],
        random.normal(size=count).tolist(),
        [True] * count,
        groups=list(range(count)),
        chains=[0] * count,
        turns=list(range(count)),
        partner_rewards=[0.0] * count,
    )
    return rows, tokens, generated


LENGTHS = [(5, 3), (2, 4), (3, 1), (1, 5), (4, 2)]


@pytest.mark.parametrize("shares", [True, False])
def test_gae_over_turns_has_the_loss_and_gradient_of_one_masked_row(path: str, shares: bool) -> None:  # noqa: F811
    gamma, lam, kl_coef, value_coef = 0.9, 0.8, 0.2, 0.1
    rows, tokens, generated = make_turns(LENGTHS, np.random.default_rng(8))
    values: dict[str, Any] = {
        "gamma": gamma,
        "lam": lam,
        "kl_coef": kl_coef,
        "value_coef": value_coef,
        "kl_estimator": "k1",
    }
    learner = make_learner(path, "full", advantage="gae", **values)
    learner.check_forward(shares)
    assert (learner.model.cost is not None) == shares
    scored = rows.with_scores(learner.score(rows))
    credit = paper_credit(chain_gamma=gamma, chain_lam=lam)
    estimator = AdvantageEstimator(learner.hyperparameters)
    rewards = turn_rewards(scored, credit, estimator).float()
    estimates, _ = estimator.estimate(scored, rewards)
    loss, gradient = _loss_and_gradient(learner, scored.with_estimates(estimates))

    # The same in plain PyTorch: GAE over the tokens that the agent generated, one after another.
    model, head, reference = learner.model.lm, learner.model.value_head, make_learner_reference(path)
    logits, hidden, reference_logits = forward(model, tokens), None, forward(reference, tokens)
    hidden = model.transformer(torch.tensor([tokens])).last_hidden_state[0]
    index = torch.tensor([position for position, own in enumerate(generated) if own])
    targets = torch.tensor(tokens)[index]
    logprobs = logits[index - 1].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    reference_logprobs = reference_logits[index - 1].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    token_values = (hidden[index - 1] @ head.weight.T + head.bias)[:, 0]
    token_rewards = -kl_coef * (logprobs - reference_logprobs).detach()
    ends = np.cumsum([response for _, response in LENGTHS]) - 1
    token_rewards[ends] += rows.task_rewards.float()
    advantage, advantages = 0.0, []
    old_values = token_values.detach()
    for position in reversed(range(len(index))):
        following = old_values[position + 1] if position + 1 < len(index) else 0.0
        error = token_rewards[position] + gamma * following - old_values[position]
        advantage = error + gamma * lam * advantage
        advantages.append(advantage)
    raw = torch.stack(advantages[::-1])
    returns = raw + old_values
    whitened = (raw - raw.mean()) / (raw.var() + 1e-8).sqrt()
    expected = -(whitened * (logprobs - logprobs.detach()).exp()).mean()
    expected = expected + value_coef * (0.5 * (token_values - returns) ** 2).mean()
    learner.optimizer.zero_grad(set_to_none=True)
    expected.backward()
    assert loss == pytest.approx(float(expected), abs=1e-5)
    torch.testing.assert_close(gradient, flat_gradient(learner), atol=1e-5, rtol=1e-4)


def _loss_and_gradient(learner: Any, rows: Any) -> tuple[float, Tensor]:
    totals = torch.zeros(len(learner._sum_names), dtype=torch.float64)
    weight = learner._accumulate(rows, 0.0, totals)
    return float(totals[learner._sum_names.index("loss")]) / weight, flat_gradient(learner)


def flat_gradient(learner: Any) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in learner.parameters])


def forward(model: Any, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0]


def make_learner_reference(path: str) -> Any:  # noqa: F811
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path).requires_grad_(False).eval()


# A problem of two steps whose gradient is known.

FIRST, SECOND = np.array([0.5, 0.0, 1.0]), np.array([[0.0, 2.0, 1.0], [0.0, 0.0, 0.0], [3.0, -1.0, 0.5]])
"""Rewards of the first action, and of the second after each first one. After action 1 the episode ends."""


def exact_gradient(logits: Tensor) -> Tensor:
    """The gradient of the expected sum of rewards, by enumeration. `logits`: [4, 3], of step 1 and of step 2 after each
    first action.
    """
    logits = logits.clone().requires_grad_()
    probabilities = logits.softmax(1)
    value = torch.zeros((), dtype=torch.float64)
    for first in range(3):
        following = 0.0 if first == 1 else (probabilities[1 + first] * torch.tensor(SECOND[first])).sum()
        value = value + probabilities[0, first] * (FIRST[first] + following)
    value.backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize(("estimator", "scale"), [(rloo, 1.0), (dr_grpo, 2.0)])
def test_the_estimated_gradient_of_two_steps_is_the_exact_one(
    estimator: Callable[[Tensor, Tensor], Tensor], scale: float
) -> None:
    random, count = np.random.default_rng(9), 20_000  # seeds, of two episodes each
    logits = torch.tensor(random.normal(size=(4, 3)))
    probabilities = logits.softmax(1).numpy()
    cumulative = probabilities.cumsum(1)
    firsts = (random.random((2 * count, 1)) > cumulative[0]).sum(1).clip(max=2)
    seconds = (random.random((2 * count, 1)) > cumulative[1 + firsts]).sum(1).clip(max=2)
    has_second = firsts != 1
    episodes = np.arange(2 * count)
    chains = np.concatenate([episodes, episodes[has_second]])
    turns = np.concatenate([np.zeros(2 * count, int), np.ones(has_second.sum(), int)])
    actions = np.concatenate([firsts, seconds[has_second]])
    contexts = np.concatenate([np.zeros(2 * count, int), 1 + firsts[has_second]])
    rewards = np.concatenate([FIRST[firsts], SECOND[firsts, seconds][has_second]])
    ones = torch.ones(len(chains), 1)
    rows = replace(
        make_rows([[1]], [[1]], [[0.0]], [0.0], [True], turns=[0], partner_rewards=[0.0]),
        mask=ones,
        responses=ones.long(),
        chains=torch.from_numpy(chains),
        positions=torch.zeros(len(chains), dtype=torch.int64),
        turns=torch.from_numpy(turns),
        groups=torch.from_numpy(chains // 2 * MAX_TURNS + turns),
        task_rewards=torch.from_numpy(rewards),
        partner_rewards=torch.zeros(len(chains), dtype=torch.float64),
    )
    totals = turn_rewards(rows, paper_credit(), None)
    members, groups, lookup = rows.comparisons()
    advantages = estimator(totals[members], groups)[lookup].double().numpy() * scale
    scores = np.eye(3)[actions] - probabilities[contexts]
    terms = np.zeros((2 * count, 4, 3))
    np.add.at(terms, (chains, contexts), advantages[:, None] * scores)
    error = terms.std(0) / np.sqrt(2 * count)
    difference = terms.mean(0) - exact_gradient(logits).numpy()
    assert (np.abs(difference) <= 4.5 * error + 1e-12).all()
    assert error.max() < 0.02 * np.abs(exact_gradient(logits)).max()


def play_two_steps(model: Any, random: np.random.Generator, seeds: int = 16, samples: int = 4) -> Rows:
    """Episodes of another problem of two steps, whose first step tempts.

    Action 0 gets 1 at once and nothing later; after action 2, which gets nothing, action 0 gets 3. Action 1 ends the
    episode. An action is a token's remainder by 3.
    """
    count = seeds * samples

    def sample(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            probabilities = model(torch.tensor(prompts)).logits[:, -1].double().softmax(1).numpy()
        tokens = (probabilities.cumsum(1) < random.random((len(prompts), 1))).sum(1).clip(max=VOCAB - 1)
        return tokens, np.log(probabilities[np.arange(len(prompts)), tokens])

    firsts, first_logprobs = sample([[10]] * count)
    episodes = np.flatnonzero(firsts % 3 != 1)
    prompts = [[10, int(firsts[episode]), 11] for episode in episodes]
    seconds, second_logprobs = sample(prompts)
    chains = [*range(count), *episodes.tolist()]
    turns = [0] * count + [1] * len(episodes)
    return make_rows(
        [[10]] * count + prompts,
        [[int(token)] for token in (*firsts, *seconds)],
        [[float(logprob)] for logprob in (*first_logprobs, *second_logprobs)],
        [*(firsts % 3 == 0).astype(float), *(3.0 * ((firsts[episodes] % 3 == 2) & (seconds % 3 == 0)))],
        [True] * len(chains),
        groups=[chain // samples * MAX_TURNS + turn for chain, turn in zip(chains, turns, strict=True)],
        chains=chains,
        turns=turns,
        partner_rewards=[0.0] * len(chains),
    )


@pytest.mark.parametrize(
    ("advantage", "chain_gamma", "expected"),
    [("rloo", 1.0, 3.0), ("grpo", 1.0, 3.0), ("gae", 1.0, 3.0), ("rloo", 0.0, 1.0)],
)
def test_training_finds_the_optimum_of_two_steps_and_without_later_rewards_the_first_best(
    path: str,  # noqa: F811
    advantage: str,
    chain_gamma: float,
    expected: float,
) -> None:
    random = np.random.default_rng(10)
    others: dict[str, Any] = {"gamma": 1.0, "lam": 1.0, "value_coef": 0.1} if advantage == "gae" else {}
    learner = make_learner(path, "full", advantage=advantage, kl_coef=0.0, lr=3e-3, steps=2, **others)
    estimator = AdvantageEstimator(learner.hyperparameters)
    credit = paper_credit(chain_gamma=chain_gamma)
    for update in range(40):
        rows = play_two_steps(learner.model.lm, random)
        scored = rows.with_scores(learner.score(rows))
        rewards = assign_credit({"llm_1": scored}, credit, {"llm_1": estimator})["llm_1"]
        estimates, _ = estimator.estimate(scored, rewards)
        learner.update(scored.with_estimates(estimates), update)
    rows = play_two_steps(learner.model.lm, random, seeds=100)
    assert float(rows.task_rewards.sum()) / 400 == pytest.approx(expected, abs=0.15)
