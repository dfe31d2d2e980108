"""The evaluation after the last update: a run killed there has lost nothing and ends as if it had not been killed."""

import json
import os
import signal
from pathlib import Path

import pytest

from launch.main import main
from launch.run_folder import final
from launch.training.start import lacks_final
from tests.forked import run_forked
from tests.launch.conftest import ENVIRONMENT, record_test_run
from tests.paper import paper_settings

WORDS = (
    "imdb-tiny",
    *("backend=transformers", "num_runners=0", "num_updates=3", "queries_per_update=2", "num_generations=2"),
    *("minibatch_size=4", "num_epochs=1", "eval_queries=4", "eval_every=3", "checkpoint_every=10", "dtype=fp32"),
    *("max_response_tokens=6", "check_weight_sync=false", "average_period=null", "exchange_period=1"),
    *("reward=tests.policies.sample_rewards:letters", "test_queries=4", "--quiet"),
)


def train(*words: str) -> int:
    return main(["train", *words])


def train_and_die(*words: str) -> int:
    """Trains until the final evaluation, in which the process is killed."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    final.evaluate_final = die  # type: ignore[assignment]
    return train(*words)


def read_records(run: Path) -> list[object]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for name in ("seconds", "tokens_per_second"):
            line.pop(name, None)
    return [lines, (run / "samples.jsonl").read_text()]


@pytest.mark.parametrize("way", ["--resume", pytest.param("--continue", marks=pytest.mark.slow)])
def test_a_run_killed_during_its_final_evaluation_is_saved_and_resumes_to_the_same_result(
    cluster: dict[str, str], tmp_path: Path, way: str
) -> None:
    environment = {**ENVIRONMENT, **cluster}
    expected = run_forked(train, *WORDS, "--out", "whole", folder=tmp_path, environment=environment)
    assert expected.returncode == 0, expected.stderr
    killed = run_forked(train_and_die, *WORDS, "--out", "run", folder=tmp_path, environment=environment)
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (run / "checkpoints" / "update_000003" / "manifest.json").exists() and not (run / "final.json").exists()
    records = read_records(run)
    assert records == read_records(whole)

    resume = ["--resume", "run", "--quiet"] if way == "--resume" else [*WORDS, "--out", "run", "--continue"]
    resumed = run_forked(train, *resume, folder=tmp_path, environment=environment)
    assert resumed.returncode == 0, resumed.stderr
    assert (run / "final.json").read_text() == (whole / "final.json").read_text()
    assert read_records(run) == records
    again = run_forked(train, *resume, folder=tmp_path, environment=environment)
    assert again.returncode == 0 and "is done: all 3 updates are completed" in again.stdout


@pytest.mark.parametrize(
    ("updates", "changes", "written", "expected"),
    [
        (12, {}, None, True),
        (12, {}, 6, True),  # of an earlier end of the run, which then continued
        (12, {}, 12, False),
        (12, {"test_queries": None}, None, False),
        (11, {}, None, False),
        (13, {}, None, False),
    ],
)
def test_a_run_lacks_its_final_evaluation_only_after_its_last_update(
    tmp_path: Path, updates: int, changes: dict[str, int | None], written: int | None, expected: bool
) -> None:
    settings = paper_settings(num_updates=12, test_queries=4).model_copy(update=changes)
    run = record_test_run(tmp_path / "run", settings, updates=range(updates + 1))
    if written is not None:
        final.write_final(run.final, {"update": written, "policy": {}})
    assert lacks_final(run, settings) == expected
