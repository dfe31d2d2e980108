"""Weight averaging from training to evaluation: one run in a separate process."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launch.main import main
from launch.run_folder.run import Run
from tests.launch.evaluation.test_evaluation import means, read_json, run_scenario
from tests.launch.training.test_training import SMALL

QUERIES = 4


def scenario() -> None:
    """Trains and evaluates; the last update averages weights partially."""
    settings = ("lr=1e-3", "average_period=3", "average_tau=0.5", "eval_average=true", "validation=false")
    assert main(["train", *SMALL, *settings, f"test_queries={QUERIES}", "--out", "run"]) == 0
    options = ("--queries", str(QUERIES), "--samples", "1", "--checkpoint", "latest", "--out", "run/evaluation/out")
    assert main(["evaluate", "run", *options]) == 0


@pytest.mark.slow
def test_the_average_is_printed_and_evaluated_like_a_policy(tmp_path: Path) -> None:
    output = run_scenario("scenario", tmp_path, module="tests.launch.training.test_averaging").stdout
    assert "LLMs are averaged by 0.5 of the way every 3" in output and output.count("LLMs averaged") == 1
    assert len(re.findall(r"/\d+ +llm_mean +-\d+\.\d+ +\d+\.\d+ +-\d+\.\d+", output)) == 3  # updates 0, 2 and 3
    run = Run(tmp_path / "run")
    lines: list[Any] = run.metrics
    assert [line.get("averaged") for line in lines] == [None, False, False, True]
    evaluation = lines[-1]["evaluation"]
    assert list(evaluation) == ["llm_1", "llm_2", "llm_mean", "mean"]
    assert evaluation["mean"]["kl"] == pytest.approx((evaluation["llm_1"]["kl"] + evaluation["llm_2"]["kl"]) / 2)
    final = json.loads(run.final.read_text())
    assert list(final["policy"]) == ["llm_1", "llm_2", "llm_mean"]
    rows = read_json(run.path / "evaluation" / "out" / "evaluation.json")["rows"]
    assert {"llm_mean", "llm_mean after llm_mean"} < set(rows)
    for name, responses in final["policy"].items():  # the same queries, seeds and weights
        for metric in ("task_reward", "kl"):
            mean = sum(response["metrics"][metric] for response in responses) / QUERIES
            assert means(rows, name)[metric] == pytest.approx(mean, rel=1e-4)
            assert evaluation[name][metric] == pytest.approx(mean, rel=1e-4)
    assert len({means(rows, name)["kl"] for name in final["policy"]}) == 3
    assert run.curves.exists()
