"""The order of the test files: the longest first, so that no process is left with one of them at the end.

One thread per process, as several run at once: two threads each on two cores take twice the time.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A script that starts the tests by `&` has them ignore Ctrl-C, and so would all processes that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "test_nodes_lost",
    "test_learner_killed",
    "test_scale",
    "test_mesh",
    "test_scheduler",
    "test_runners",
    "test_cory_vllm",
    "test_vllm_generator",
    "test_cory",
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

TOGETHER = {
    "vllm": ("test_vllm_generator", "test_run_requests", "test_model_families", "test_weight_transfer"),
    "forked": (
        *("test_mesh", "test_sharding", "test_mesh_fp64", "test_saving", "test_policy_learner", "test_training"),
        *("test_evaluation", "test_study", "test_ending", "test_command_line"),
    ),
}
"""Files that run in one process, as importing vLLM takes some ten seconds, and what `tests.preloaded` imports eight."""


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes back what commands that run in this process add to where modules are found."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random GPT-2 that is smaller than the bundled one, with its tokenizer and some rows to spare."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from cory_env.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("models") / "small"
    tokenizer = load_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer) + 64, n_positions=128, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the files; the order inside each stays."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Keeps in one process what one file holds, and those of `TOGETHER`."""
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return next((group for group, names in TOGETHER.items() if Path(file).stem in names), file)

    return Together(config, log)
