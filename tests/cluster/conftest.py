"""Runs `cory train` whose processes are killed, and compares them with an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.long_run import short_folder
from benchmarks.models import make_model
from benchmarks.nodes import wait_until
from launch.run_folder.run import Run as RunFolder
from policies.cory import CoryConfig
from tests.cluster.head import head
from tests.launch.conftest import ENVIRONMENT
from tests.policies.conftest import ray_session

__all__ = ["head", "ray_session"]

UPDATES = 14
SETTINGS: dict[str, Any] = {
    **{"backend": "transformers", "dtype": "fp32", "num_updates": UPDATES, "exchange_period": 3, "checkpoint_every": 4},
    **{
        "queries_per_update": 4,
        "minibatch_size": 4,
        "micro_batch_size": 4,
        "num_epochs": 1,
        "lr": 1e-4,
        "max_response_tokens": 6,
    },
    **{"eval_queries": 2, "eval_every": 10, "check_weight_sync": "false"},
}
REWARD = "tests.cluster.sample_rewards:brevity?hold="
WAIT_SECONDS = 140.0
"""Seconds to wait for a process to start or end, on a busy machine."""
_TIMINGS = ("seconds", "tokens_per_second")


class Run:
    """`cory train` with a very small model. While the file `hold` exists, its rewards wait, which stops the update."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hold = folder / "hold"
        self.output = folder / "output.txt"
        self.model = make_model("test", folder)

    def start(self, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "cory_rllib", "train", *words],
                cwd=self.folder,
                env={**ENVIRONMENT, **environment},
                stdout=output,
                stderr=output,
            )

    @property
    def words(self) -> list[str]:
        settings = [f"{key}={value}" for key, value in SETTINGS.items()]
        return [*settings, f"model={self.model}", f"reward={REWARD}{self.hold}", "--out", "run"]

    @property
    def output_text(self) -> str:
        return self.output.read_text()

    def lines(self, name: str = "metrics") -> list[dict[str, Any]]:
        file = self.folder / "run" / f"{name}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def hold_after(self, update: int) -> None:
        """Waits until the run has finished an update, then stops one of the next updates."""
        wait_until(lambda: len(self.lines()) > update, WAIT_SECONDS)
        self.hold.touch()

    def resume(self, updates: int = 1) -> None:
        """Ends the hold, and waits until `updates` more updates are recorded."""
        before = len(self.lines())
        self.hold.unlink()
        wait_until(lambda: len(self.lines()) >= before + updates, WAIT_SECONDS)


@pytest.fixture
def run() -> Iterator[Run]:
    with short_folder() as folder:
        yield Run(folder)


@pytest.fixture(autouse=True)
def checkout_importable_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets PYTHONPATH for the nodes of clusters that tests start."""
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])


def undisturbed_reports(run: Run) -> list[dict[str, Any]]:
    """Returns the reports of the same run without failures, generated and trained in this process."""
    settings = RunFolder.open(run.folder / "run").settings.model_dump()
    local = {"num_runners": 0, "num_learners": 0, "shards_per_policy": None, "runner_threads": 1}
    algorithm = CoryConfig().cory(**{**settings, **local}).build_algo()
    reports = [algorithm.train()["cory"] for _ in range(UPDATES)]
    algorithm.stop()
    return [{key: value for key, value in report.items() if key not in _TIMINGS} for report in reports]


def assert_as_undisturbed(run: Run, near: float = 1e-5) -> None:
    """Checks that every update was recorded once, with the metrics, roles and responses of an undisturbed run.

    Args:
        run: the disturbed run.
        near: relative tolerance of its metrics.
    """
    lines = run.lines()
    assert [line["update"] for line in lines] == list(range(UPDATES + 1))
    samples = [sample for sample in run.lines("samples") if not sample["held_out"]]
    for line, report in zip(lines[1:], undisturbed_reports(run), strict=True):
        recorded = [sample for sample in samples if sample["update"] == line["update"]]
        expected = report["samples"] if "evaluation" in report else []
        assert [_responses(sample) for sample in recorded] == [_responses(sample) for sample in expected]
        for key in ("roles", "exchanges", "exchanged", "weight_version_lag", "tokens"):
            assert line[key] == report[key], (line["update"], key)
        for policy_id, figures in report["policy"].items():
            assert line["policy"][policy_id] == pytest.approx(figures, rel=near, abs=near / 5), line["update"]


def _responses(sample: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(response["role"], response["policy"], response["text"]) for response in sample["responses"]]
