"""Losing and replacing nodes of a cluster, one by one or all at once, loses no update."""

from __future__ import annotations

import shutil

import pytest

from benchmarks.machines import Machines, can_make_networks
from benchmarks.nodes import RUNNER, Nodes, named, wait_until
from tests.cluster.conftest import WAIT_SECONDS, Run, assert_as_undisturbed

LIMIT = ("generation_timeout=20", "reward_timeout=100")
"""Runners may be missing for 40 s; a held rollout may take longer."""


@pytest.mark.slow
def test_losing_and_replacing_nodes_loses_no_update(ray_session: None, run: Run) -> None:
    nodes = Nodes(run.folder)
    first, second = nodes.add(2), nodes.add(2)
    process = run.start(
        *run.words, "num_runners=2", "runner_threads=2", *LIMIT, "--max-failures", "1", RAY_ADDRESS=nodes.address
    )
    try:
        run.hold_after(2)
        assert len(named(RUNNER)) == 2
        nodes.lose(second)
        run.resume()  # with one runner
        run.hold.touch()
        assert "died. Its queries are assigned again." in run.output_text
        third = nodes.add(2)
        wait_until(lambda: len(named(RUNNER)) == 2, WAIT_SECONDS)
        run.resume()
        run.hold.touch()
        nodes.lose(first)
        run.resume()  # with the runner that came back
        run.hold.touch()
        nodes.lose(third)
        wait_until(
            lambda: "Failure 1 of at most 1: All runners died and none restarted." in run.output_text, WAIT_SECONDS
        )
        nodes.add(4)
        run.hold.unlink()
        wait_until(lambda: process.poll() is not None, WAIT_SECONDS)
    finally:
        process.kill()
        nodes.close()
    assert process.returncode == 0, run.output_text
    assert_as_undisturbed(run)


@pytest.mark.slow
def test_losing_a_cluster_loses_no_update_if_a_new_one_resumes_from_storage(ray_session: None, run: Run) -> None:
    uri, cache = f"file://{run.folder}/run", run.folder / "cache"
    words = (*run.words, "num_runners=2", "runner_threads=1", *LIMIT, "--out", uri)
    nodes = Nodes(run.folder)
    nodes.add(2)
    process = run.start(*words, RAY_ADDRESS=nodes.address, XDG_CACHE_HOME=str(cache))
    try:
        run.hold_after(4)  # storage has it when it is saved
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
        wait_until(lambda: process.poll() is not None, WAIT_SECONDS)
    finally:
        process.kill()
        nodes.close()
    assert process.returncode == 0, run.output_text
    assert "(resuming after update 4)" in run.output_text
    assert not list((cache / "cory-rllib" / "runs").iterdir())
    assert_as_undisturbed(run)


@pytest.mark.slow
@pytest.mark.skipif(not can_make_networks(), reason="needs root and iproute2")
def test_losing_a_machine_s_network_loses_no_update(ray_session: None, run: Run) -> None:
    machines = Machines(run.folder)
    machines.add(2)
    second = machines.add(2)
    process = run.start(*run.words, "num_runners=2", "runner_threads=2", *LIMIT, RAY_ADDRESS=machines.address)
    try:
        run.hold_after(2)
        machines.cut(second)
        run.resume()  # Ray notices after a minute
        run.hold.touch()
        assert "died. Its queries are assigned again." in run.output_text
        machines.add(2)
        run.resume()
        wait_until(lambda: process.poll() is not None, WAIT_SECONDS)
    finally:
        process.kill()
        machines.close()
    assert process.returncode == 0, run.output_text
    assert_as_undisturbed(run)
