"""The order of the test files: the longest first, so that no process is left with one of them at the end.

One thread per process, as several run at once: two threads each on two cores take twice the time.
"""

from __future__ import annotations

import os
import signal

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A script that starts the tests by `&` has them ignore Ctrl-C, and so would all processes that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "test_nodes_lost",
    "test_learner_killed",
    "test_scale",
    "test_runners",
    "test_vllm_generator",
    "test_mishaps",
    "test_cory_vllm",
    "test_long_run",
    "test_learning",
    "test_tune",
    "test_tuning",
    "test_evaluation",
    "test_training",
    "test_serving",
    "test_model_families",
    "test_cory",
    "test_study",
    "test_command_line",
    "test_smollm2",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the files; the order inside each stays."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
