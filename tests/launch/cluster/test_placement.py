"""Placing processes on nodes, and messages about missing resources."""

from typing import Any

import pytest

from launch.cluster.placement import Node, Shortfall, check_placement, make_node, pack
from launch.console.errors import CommandError
from policies.cory import Cory, CoryConfig
from policies.settings.memory import Memory
from policies.settings.processes import Process, processes
from tests.paper import make_settings

SMALL = Memory("cpu", {"libraries": 1e9}, 0.0)


def node(name: str, cpus: float = 4, gpus: int = 0, memory: float = 8e9) -> Node:
    return Node(name, cpus, [1.0] * gpus, memory)


def fill_nodes(kinds: list[Process], *nodes: Node) -> tuple[dict[str, list[str]], list[Shortfall]]:
    filled, shortfalls = pack(kinds, nodes, {kind.name: [SMALL] for kind in kinds})
    return {node.name: node.processes for node in filled}, shortfalls


def make_nodes(*resources: dict[str, float]) -> list[Node]:
    return [make_node(f"10.0.0.{number}", resource) for number, resource in enumerate(resources, 1)]


def test_processes_are_placed_on_nodes_with_their_resources() -> None:
    kinds = [
        Process("runner", 2, 2, 0),
        Process("learner", 1, 0, 1),
        Process("driver", 1, 1, 0),
    ]
    placed, shortfalls = fill_nodes(kinds, node("a", cpus=1), node("b", cpus=0, gpus=1), node("c"))
    assert shortfalls == []
    assert placed == {"a": ["1 driver"], "b": ["1 learner"], "c": ["2 runners"]}


@pytest.mark.parametrize(
    ("kind", "nodes", "left", "reason"),
    [
        (Process("runner", 1, 1, 2), [node("a", gpus=1), node("b", gpus=1)], 1, "a has 1 GPUs left"),
        (Process("runner", 3, 1, 0.6), [node("a", gpus=2)], 1, "a has 0.8 GPUs left"),
        (Process("runner", 1, 8, 0), [node("a"), node("b")], 1, "b has 4 CPUs left"),
        (Process("runner", 1, 8, 1), [node("a")], 1, "a has 4 CPUs and 0 GPUs left"),
        (
            Process("runner", 2, 1, 0),
            [node("a", memory=1.5e9)],
            1,
            "a has 0.5 GB of memory left, but a runner needs 1.0 GB",
        ),
    ],
)
def test_missing_resources_are_reported(kind: Process, nodes: list[Node], left: int, reason: str) -> None:
    _, (shortfall,) = fill_nodes([kind], *nodes)
    assert shortfall.num_unplaced == left and reason in shortfall.reasons


def test_fractions_of_a_resource_add_up() -> None:
    fifths = [Process("runner", 5, 0.2, 0.2)]
    check_placement(fifths, make_nodes({"CPU": 1, "GPU": 1}))
    with pytest.raises(CommandError, match="1 of 6 runners"):
        check_placement([Process("runner", 6, 0.2, 0.2)], make_nodes({"CPU": 1, "GPU": 1}))


@pytest.mark.parametrize(
    ("values", "nodes", "message"),
    [
        (
            {"num_runners": 4, "runner_threads": 2},
            [{"CPU": 3}] * 3,
            r"^Ray has no room for 1 of 4 runners: node 10\.0\.0\.1 has 1 CPUs left; .*10\.0\.0\.3 has 1 CPUs left\. "
            r"Request fewer processes or fewer resources per process",
        ),
        (
            {"num_runners": 2, "num_learners": 2},
            [{"CPU": 3}],
            r"1 of 2 learners: .* has 0 CPUs left\. Request fewer",
        ),
        (
            {"num_runners": 9},
            [{"CPU": 1}] * 6,
            r"3 of 9 runners: .*10\.0\.0\.4 has 0 CPUs left; and 2 more nodes\. Request",
        ),
        (
            {"runner_threads": 2, "gpus_per_runner": 1},
            [{"CPU": 8}, {"CPU": 1, "GPU": 2}],
            r"\.1 has 0 GPUs left; node 10\.0\.0\.2 has 1 CPUs left\. Request",
        ),
        (
            {"num_learners": 1, "gpus_per_learner": 2, "runner_threads": 16},
            [{"CPU": 8, "GPU": 1}],
            r"1 of 1 learner: .* has 1 GPUs left; no room for 1 of 1 runner: .* has 8 CPUs left\. Request",
        ),
        (
            {"gpus_per_learner": 2},
            [{"CPU": 8, "GPU": 1}] * 2,
            "1 of 1 driver: .* has 1 GPUs left",
        ),
        ({}, [], r"1 of 1 runner: the cluster has no nodes"),
    ],
)
def test_a_run_that_does_not_fit_is_rejected_with_the_missing_resources(
    values: dict[str, object], nodes: list[dict[str, float]], message: str
) -> None:
    kinds = processes(make_settings({"num_runners": 1, **values}))
    with pytest.raises(CommandError, match=message):
        check_placement(kinds, make_nodes(*nodes))
    check_placement(kinds, make_nodes(*nodes, {"CPU": 32, "GPU": 2}))


@pytest.mark.parametrize(
    "values",
    [
        {"num_runners": 0, "backend": "transformers", "gpus_per_learner": 1},
        {"num_runners": 0, "gpus_per_runner": 0.5, "gpus_per_learner": 0.25},
        {"num_runners": 0, "gpus_per_runner": 0.5, "num_learners": 1},
        {"num_runners": 3, "runner_threads": 2, "gpus_per_runner": 0.5, "num_learners": 2},
        {"gpus_per_runner": 2, "tensor_parallel_size": 2, "num_learners": 1, "gpus_per_learner": 1},
    ],
)
def test_placed_processes_match_the_bundles_of_a_tune_trial_and_a_run_s_driver_requests_no_cpu(
    values: dict[str, Any],
) -> None:
    settings = make_settings({"queries_per_update": 4, "minibatch_size": 4, **values})
    trial = processes(settings, trial=True)
    request = Cory.default_resource_request(CoryConfig().cory(**settings.model_dump()))
    bundles = [
        {key: amount for key, amount in {"CPU": kind.cpus, "GPU": kind.gpus}.items() if amount}
        for kind in trial
        for _ in range(kind.count)
    ]
    assert request.strategy == "PACK"
    assert request.bundles == bundles
    assert processes(settings)[0] == Process("driver", 1, 0, trial[0].gpus)
    assert processes(settings)[1:] == trial[1:]
