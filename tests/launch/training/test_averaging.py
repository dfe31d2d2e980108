"""The mean of a run's LLMs, from training to the report: one run with averaging, in a process of its own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launch.main import main
from launch.run_folder.run import Run
from tests.launch.evaluation.test_evaluation import means, play, read
from tests.launch.training.test_training import SMALL

QUERIES = 4


def scenario() -> None:
    """Trains, evaluates and reports; the last update is an averaging part of the way."""
    changed = ("lr=1e-3", "average_period=3", "average_tau=0.5", "eval_average=true", "validation=false")
    assert main(["train", *SMALL, *changed, f"test_queries={QUERIES}", "--out", "run"]) == 0
    few = ("--queries", str(QUERIES), "--samples", "1", "--checkpoint", "latest", "--out", "run/evaluation/found")
    assert main(["evaluate", "run", *few]) == 0
    assert main(["report", "run", "--out", "report.html"]) == 0


@pytest.mark.slow
def test_the_mean_is_told_and_evaluated_beside_the_llms_everywhere(tmp_path: Path) -> None:
    told = play("scenario", tmp_path, of="tests.launch.training.test_averaging").stdout
    assert "LLMs are averaged every 3" in told and told.count("LLMs averaged") == 1
    assert len(re.findall(r"/\d+ +llm_mean +-\d+\.\d+ +\d+\.\d+ +-\d+\.\d+", told)) == 3  # updates 0, 2 and 3
    run = Run(tmp_path / "run")
    lines: list[Any] = run.updates()
    assert [line.get("averaged") for line in lines] == [None, False, False, True]
    evaluated = lines[-1]["evaluation"]
    assert list(evaluated) == ["llm_1", "llm_2", "llm_mean", "mean"]
    assert evaluated["mean"]["kl"] == pytest.approx((evaluated["llm_1"]["kl"] + evaluated["llm_2"]["kl"]) / 2)
    whole = json.loads(run.final.read_text())
    assert whole["influence"]["queries"] == QUERIES and whole["influence"]["low"] <= whole["influence"]["high"]
    final = whole["policy"]
    assert list(final) == ["llm_1", "llm_2", "llm_mean"]
    rows = read(run.path / "evaluation" / "found" / "evaluation.json")["rows"]
    assert {"llm_mean", "llm_mean after llm_mean"} < set(rows)
    for name, found in final.items():  # the same queries, seeds and weights
        for figure in ("task_reward", "kl"):
            mean = sum(response["metrics"][figure] for response in found) / QUERIES
            assert means(rows, name)[figure] == pytest.approx(mean, rel=1e-4)
            assert evaluated[name][figure] == pytest.approx(mean, rel=1e-4)
    assert len({means(rows, name)["kl"] for name in final}) == 3
    page = (tmp_path / "report.html").read_text()
    assert "one LLM, whose weights are the mean of the policies" in page
    assert "llm_mean ends at" in page and run.curves.exists()
