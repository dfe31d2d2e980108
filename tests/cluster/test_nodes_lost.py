"""A cluster loses the nodes of its runners one by one, or all nodes at once, and gets new ones: no update is lost."""

from __future__ import annotations

import shutil

import pytest

from benchmarks.machines import Machines, can_make_networks
from benchmarks.nodes import RUNNER, Nodes, named, wait_until
from tests.cluster.conftest import PATIENCE, Run, assert_as_undisturbed

LIMIT = ("generation_timeout=20", "reward_timeout=100")
"""Runners may stay away for 40 s; a rollout that is held may take longer."""


@pytest.mark.slow
def test_nodes_that_are_lost_and_replaced_cost_no_update(ray_session: None, run: Run) -> None:
    nodes = Nodes(run.folder)
    first, second = nodes.add(2), nodes.add(2)
    process = run.start(
        *run.words, "num_runners=2", "runner_threads=2", *LIMIT, "--max-failures", "1", RAY_ADDRESS=nodes.address
    )
    try:
        run.hold_after(2)
        assert len(named(RUNNER)) == 2
        nodes.lose(second)
        run.go_on()  # with one runner
        run.hold.touch()
        assert "died; its queries are dealt again." in run.said
        third = nodes.add(2)
        wait_until(lambda: len(named(RUNNER)) == 2, PATIENCE)
        run.go_on()
        run.hold.touch()
        nodes.lose(first)
        run.go_on()  # with the runner that came back
        run.hold.touch()
        nodes.lose(third)
        wait_until(lambda: "Failure 1 of at most 1: All runners are gone and none came back." in run.said, PATIENCE)
        nodes.add(4)
        run.hold.unlink()
        wait_until(lambda: process.poll() is not None, PATIENCE)
    finally:
        process.kill()
        nodes.close()
    assert process.returncode == 0, run.said
    assert_as_undisturbed(run)


@pytest.mark.slow
def test_a_cluster_that_is_lost_whole_costs_no_update_when_a_new_one_resumes_from_storage(
    ray_session: None, run: Run
) -> None:
    uri, cache = f"file://{run.folder}/run", run.folder / "cache"
    words = (*run.words, "num_runners=2", "runner_threads=1", *LIMIT, "--out", uri)
    nodes = Nodes(run.folder)
    nodes.add(2)
    process = run.start(*words, RAY_ADDRESS=nodes.address, XDG_CACHE_HOME=str(cache))
    try:
        run.hold_after(4)  # of which storage learns when it is saved
    finally:
        nodes.close()
        process.kill()
        process.wait()
    shutil.rmtree(cache)
    run.hold.unlink()
    nodes = Nodes(run.folder)
    nodes.add(2)
    process = run.start("--resume", uri, RAY_ADDRESS=nodes.address, XDG_CACHE_HOME=str(cache))
    try:
        wait_until(lambda: process.poll() is not None, PATIENCE)
    finally:
        process.kill()
        nodes.close()
    assert process.returncode == 0, run.said
    assert "(resuming after update 4)" in run.said
    assert not list((cache / "cory-rllib" / "runs").iterdir())
    assert_as_undisturbed(run)


@pytest.mark.slow
@pytest.mark.skipif(not can_make_networks(), reason="needs root and iproute2")
def test_a_machine_that_vanishes_from_the_network_costs_no_update(ray_session: None, run: Run) -> None:
    machines = Machines(run.folder)
    machines.add(2)
    second = machines.add(2)
    process = run.start(*run.words, "num_runners=2", "runner_threads=2", *LIMIT, RAY_ADDRESS=machines.address)
    try:
        run.hold_after(2)
        machines.cut(second)
        run.go_on()  # Ray notices after a minute
        run.hold.touch()
        assert "died; its queries are dealt again." in run.said
        machines.add(2)
        run.go_on()
        wait_until(lambda: process.poll() is not None, PATIENCE)
    finally:
        process.kill()
        machines.close()
    assert process.returncode == 0, run.said
    assert_as_undisturbed(run)
