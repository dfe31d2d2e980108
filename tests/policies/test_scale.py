"""Different numbers of runners and learners: same rollouts, same weights, and all learners stay equal.

Each scenario runs in its own process and Ray session.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray

from launch.cluster.session import init_ray
from policies.cory import Cory, CoryConfig
from policies.generation.installed import vllm_installed
from tests.forked import fork_context
from tests.policies.conftest import TINY
from tests.policies.test_environments import ENV

TIMEOUT = 270.0  # seconds

Ranks = list[dict[str, dict[str, np.ndarray]]]
"""Weights by learner, policy id and parameter name."""


class Outcome(NamedTuple):
    """Results of one update."""

    responses: list[list[str]]
    metrics: dict[str, dict[str, float]]
    evaluate: dict[str, dict[str, float]]
    ranks: Ranks


def weights_of(algorithm: Cory) -> Ranks:
    policy_ids = algorithm.settings.policy_ids
    return algorithm.learners.call_all(
        lambda learner: {policy_id: learner.policies[policy_id].model.state() for policy_id in policy_ids}
    )


def build(**settings: Any) -> Cory:
    return CoryConfig().cory(**{**TINY, **settings}).build_algo()


def run_in_own_session(scenario: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a scenario in a new process with its own Ray session; kills the process if it hangs."""
    receiver, sender = Pipe()
    process = fork_context().Process(target=run_with_ray, args=(sender, scenario, *arguments))
    process.start()
    sender.close()
    try:
        assert receiver.poll(TIMEOUT), "the scenario hangs"
        return receiver.recv()
    finally:
        process.kill()
        process.join()


def run_with_ray(sender: Connection, scenario: Callable[..., Any], *arguments: Any) -> None:
    init_ray(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    sender.send(scenario(*arguments))
    ray.shutdown()


def train_one_update(shapes: Sequence[tuple[int, int]], settings: dict[str, Any]) -> list[Outcome]:
    """Trains one update with each (number of runners, number of learners)."""
    outcomes = []
    for runners, learners in shapes:
        algorithm = build(num_runners=runners, num_learners=learners, **settings)
        report = algorithm.train()["cory"]
        texts = [[response["text"] for response in sample["responses"]] for sample in report["samples"]]
        held_out = algorithm.evaluator.evaluate()["evaluation"]
        outcomes.append(Outcome(texts, report["policy"], held_out, weights_of(algorithm)))
        algorithm.stop()
    return outcomes


def max_difference(one: dict[str, dict[str, np.ndarray]], two: dict[str, dict[str, np.ndarray]]) -> float:
    assert one.keys() == two.keys()
    return max(float(np.abs(one[m][name] - two[m][name]).max()) for m in one for name in one[m])


def assert_same(outcomes: Sequence[Outcome], shapes: Sequence[tuple[int, int]]) -> None:
    first = outcomes[0]
    for outcome, (_, learners) in zip(outcomes, shapes, strict=True):
        assert outcome.responses == first.responses
        for policy_id, metrics in first.metrics.items():
            assert outcome.metrics[policy_id] == pytest.approx(metrics, rel=1e-3, abs=1e-5)
            assert outcome.evaluate[policy_id] == pytest.approx(first.evaluate[policy_id], rel=1e-3, abs=1e-5)
        assert len(outcome.ranks) == max(learners, 1)
        assert max_difference(outcome.ranks[0], first.ranks[0]) < 1e-5
        for rank in outcome.ranks[1:]:
            assert max_difference(rank, outcome.ranks[0]) == 0.0


@pytest.mark.slow  # `test_mesh` has a faster case for learners
@pytest.mark.parametrize("shapes", [[(0, 0), (0, 2)], [(0, 0), (2, 0), (2, 2)]])
def test_results_do_not_depend_on_the_number_of_runners_and_learners(shapes: list[tuple[int, int]]) -> None:
    settings = {"kl_target": 6.0, "reward_scaling": "normalize", "lr": 2e-5}
    assert_same(run_in_own_session(train_one_update, shapes, settings), shapes)


@pytest.mark.slow
def test_episodes_of_environments_do_not_depend_on_the_number_of_runners_and_learners() -> None:
    shapes = [(0, 0), (2, 2)]
    assert_same(run_in_own_session(train_one_update, shapes, {**ENV, "lr": 2e-5, "num_epochs": 1}), shapes)


def train_while_a_runner_dies(folder: Path) -> list[Outcome]:
    """Trains with an environment that kills its runner once, and with one that does not."""
    outcomes = []
    for once in ("once", "never"):
        if once == "never":
            (folder / once).touch()
        env = f"tests.text_games:Broken?way=kill_runner&once={folder / once}"
        outcomes += train_one_update([(2, 0)], {**ENV, "env": env, "lr": 2e-5})
    return outcomes


@pytest.mark.slow
def test_episodes_of_a_runner_that_dies_are_played_again(tmp_path: Path) -> None:
    outcomes = run_in_own_session(train_while_a_runner_dies, tmp_path)
    assert (tmp_path / "once").exists()
    assert_same(outcomes, [(2, 0)] * 2)


@pytest.mark.slow
def test_groups_are_not_split_over_learners() -> None:
    shapes = [(0, 0), (2, 2)]
    settings = {"advantage": "rloo", "num_generations": 4, "queries_per_update": 2, "micro_batch_size": 1, "lr": 2e-5}
    assert_same(run_in_own_session(train_one_update, shapes, settings), shapes)


def count_moments(algorithm: Cory) -> list[int]:
    """Returns by learner the number of parameters with Adam moments."""
    return algorithm.learners.call_all(
        lambda learner: sum(len(policy.optimizer.state) for policy in learner.policies.values())
    )


def exchange_with_reset(learners: int) -> list[list[int]]:
    """Counts the learners' moments after each of three updates. The second one ends with a role exchange."""
    algorithm = build(num_learners=learners, exchange_period=2, reset_on_exchange=True)
    counts = []
    for _ in range(3):
        algorithm.train()
        counts.append(count_moments(algorithm))
    return counts


@pytest.mark.slow
def test_reset_on_exchange_resets_all_learners() -> None:
    before, at, after = run_in_own_session(exchange_with_reset, 2)
    assert at == [0, 0] and before == after and before[0] == before[1] > 0


def train_and_average(learners: int) -> list[Ranks]:
    """Returns weights after an update with averaging, an update without, and an evaluation of the average."""
    algorithm = build(num_learners=learners, average_period=1, average_tau=0.5, eval_average=True)
    unaveraged = build(num_learners=learners)
    weights = []
    for cory in (algorithm, unaveraged):
        cory.train()
        weights.append(weights_of(cory))
    evaluation = algorithm.evaluator.evaluate()["evaluation"]
    assert evaluation["llm_mean"]["kl"] > 0
    weights.append(weights_of(algorithm))
    return weights


@pytest.mark.slow
def test_averaging_and_evaluating_the_average_keep_all_learners_equal() -> None:
    averaged, unaveraged, evaluated = run_in_own_session(train_and_average, 2)
    for before, after in zip(averaged, evaluated, strict=True):
        assert max_difference(before, after) == 0.0
    assert len(averaged) == 2 and max_difference(averaged[0], averaged[1]) == 0.0
    assert max_difference(averaged[0], unaveraged[0]) > 1e-6


@pytest.mark.slow
@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
def test_results_do_not_depend_on_the_number_of_vllm_runners() -> None:
    shapes = [(1, 0), (2, 2)]
    assert_same(run_in_own_session(train_one_update, shapes, {"backend": "vllm", "lr": 2e-5}), shapes)


def train_three_agents(learners: Sequence[int], folder: Path) -> list[list[Ranks]]:
    """Returns, for each number of learners, weights after one update, after two, restored, and with loaded policies.

    One query of eight is skipped, so the number of rows is not divisible by learners and mini-batches.
    """
    data = folder / "queries.jsonl"
    rows = [{"query": f"The film number {i} is", "broken": i == 3} for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = []
    for number in learners:
        algorithm = build(
            weights="lora",
            num_agents=3,
            num_learners=number,
            data=str(data),
            eval_data=str(data),
            reward="tests.policies.sample_rewards:nan_if_broken",
            on_reward_error="skip",
            exchange_period=1,
            minibatch_size=4,
        )
        assert algorithm.train()["cory"]["dropped_chains"] == 1
        states = [weights_of(algorithm)]
        algorithm.save_to_path(folder / f"{number} learners")
        algorithm.train()
        states.append(weights_of(algorithm))
        algorithm.restore_from_path(folder / f"{number} learners")
        states.append(weights_of(algorithm))
        algorithm.train()
        algorithm.load_policies(folder / f"{number} learners", 1)
        states.append(weights_of(algorithm))
        results.append(states)
        algorithm.stop()
    return results


@pytest.mark.slow
def test_learners_with_adapters_stay_equal_over_small_minibatches_three_agents_odd_rows_and_a_restore(
    tmp_path: Path,
) -> None:
    single, multiple = run_in_own_session(train_three_agents, (0, 2), tmp_path)
    for states in (single, multiple):
        assert max_difference(states[0][0], states[1][0]) > 1e-5
        assert max_difference(states[0][0], states[2][0]) == 0.0
        assert max_difference(states[0][0], states[3][0]) == 0.0
    for ranks in multiple:
        assert len(ranks) == 2 and max_difference(ranks[0], ranks[1]) == 0.0
    assert max_difference(single[0][0], multiple[0][0]) < 2e-5  # Adam's first steps follow the sign of tiny gradients
