"""The order of the test files: the slowest first, so that none of them runs alone at the end.

Each process uses one thread, because several processes run in parallel: with two threads each on two cores, the tests
take twice as long.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import small_inputs

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A script that starts the tests with `&` makes them ignore Ctrl-C, which all their child processes would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOWEST_FIRST = (
    "test_nodes_lost",
    "test_learner_killed",
    "test_scale",
    "test_mesh",
    "test_scheduler",
    "test_runners",
    "test_cory_vllm",
    "test_vllm_generator",
    "test_cory",
    "test_sandbox_verdicts",
    "test_code",
    "test_learning",
    "test_learners",
    "test_session",
    "test_mishaps",
    "test_long_run",
    "test_tune",
    "test_serving",
    "test_tensor_parallel",
    "test_vllm_processes",
    "test_smollm2",
    "test_tracking",
    "test_average",
    "test_chain_runner",
)

SAME_PROCESS = {
    "vllm": ("test_vllm_generator", "test_run_requests", "test_model_families", "test_weight_transfer"),
    "forked": (
        *("test_mesh", "test_sharding", "test_mesh_fp64", "test_saving", "test_policy_learner", "test_training"),
        *("test_evaluation", "test_study", "test_ending", "test_command_line"),
    ),
}
"""Groups of files that run in one process: importing vLLM takes ten seconds, the modules of `tests.preloaded` eight."""


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the import path after commands that run in this process have changed it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


@pytest.fixture(scope="session")
def small_model() -> str:
    """Folder of a random GPT-2, smaller than the bundled model."""
    return small_inputs.small_model()


def pytest_unconfigure() -> None:
    """Removes what the tests shared."""
    small_inputs.remove()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the test files; the order of tests in a file is kept."""
    items.sort(
        key=lambda item: SLOWEST_FIRST.index(item.path.stem) if item.path.stem in SLOWEST_FIRST else len(SLOWEST_FIRST)
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Runs the tests of a file, and of each group in `SAME_PROCESS`, in one process."""
    from xdist.scheduler import LoadFileScheduling

    class GroupedScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return next((group for group, names in SAME_PROCESS.items() if Path(file).stem in names), file)

    return GroupedScheduling(config, log)
