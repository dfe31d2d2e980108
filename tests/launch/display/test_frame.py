"""The data frame of metrics, built from lines written by hand."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from launch.display.frame import Metrics, mean_over_seeds
from launch.run_folder.frame import LAST_RESPONSE, MEAN, metrics_frame
from tests.launch.conftest import record_test_run
from tests.paper import paper_settings

LINES: list[Any] = [
    {"update": 0, "evaluation": {"llm_1": {"kl": 0.0}, MEAN: {"kl": 0.0}}},
    {
        "update": 1,
        "policy": {"llm_1": {"kl": 4.0, "response_length": 8.0}, "llm_2": {"kl": None, "response_length": 0.0}},
        "role": {"pioneer": {"kl": 4.0}},
        "evaluation": {"llm_1": {"kl": 1.0}, MEAN: {"kl": None}},
        "last_response": {"kl": 2.0},
        "tokens": 30,
        "exchanged": True,
        "seconds": {"total": 1.5},
    },
]
FINAL = {"update": 1, "policy": {"llm_1": {"kl": 3.0}}, "mean": {"kl": 3.0}}


def metrics(*runs: str) -> Metrics:
    return Metrics(dict.fromkeys(runs, metrics_frame(LINES, FINAL)))


def test_metrics_are_indexed_by_split_policy_role_run_and_update() -> None:
    frame = metrics("a", "b")
    assert frame.get("validation", "kl", "llm_1").to_dict() == {("a", 0): 0, ("a", 1): 1, ("b", 0): 0, ("b", 1): 1}
    assert frame.get("train", "kl", "", "pioneer").to_dict() == {("a", 1): 4.0, ("b", 1): 4.0}
    assert frame.get("validation", "kl", "", LAST_RESPONSE)["a", 1] == 2.0
    assert frame.get("test", "kl").to_dict() == {("a", 1): 3.0, ("b", 1): 3.0}
    assert [frame.get("run", name, "")["a", 1] for name in ("tokens", "exchanged", "seconds/total")] == [30, 1, 1.5]


def test_unknown_values_are_nan_and_a_mean_requires_every_policy() -> None:
    frame = metrics("a")
    assert math.isnan(frame.get("train", "kl")["a", 1]) and math.isnan(frame.get("validation", "kl")["a", 1])
    assert frame.get("train", "response_length")["a", 1] == 4.0
    unknown = frame.get("validation", "task_reward")
    assert list(unknown.index) == [("a", 0), ("a", 1)] and unknown.isna().all()
    assert Metrics({}).get("test", "kl").empty and mean_over_seeds(Metrics({}).get("train", "kl")).empty


def test_modules_that_do_not_read_runs_do_not_import_pandas() -> None:
    modules = "launch.main, launch.commands.train, launch.experiments.tables, launch.evaluation.figures"
    code = f"import sys, {modules}; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_frame_of_a_run_has_every_metric_once(tmp_path: Path) -> None:
    run = record_test_run(tmp_path / "run", paper_settings(num_updates=12))
    last = {**run.metrics[12], "update": 13, "last_response": {"kl": 0.5}, "role": {"pioneer": {"task_reward": None}}}
    run.metrics_file.append(last)
    rows = run.frame().dropna().itertuples(index=False)
    values = {tuple(row)[:5]: row.value for row in rows}
    assert len(values) == len(run.frame().dropna())  # no duplicates
    for line in run.metrics:
        for split, group in (("train", line.get("policy", {})), ("validation", line.get("evaluation", {}))):
            for policy, figures in group.items():
                for metric, value in figures.items():
                    assert values[line["update"], split, policy, "", metric] == value
    assert values[13, "validation", "", "last answer", "kl"] == 0.5
    assert values[5, "run", "", "", "exchanged"] == 1 and values[5, "run", "", "", "seconds/total"] == 2
    assert (13, "train", "", "pioneer", "task_reward") not in values
    assert (5, "train", "", "pioneer", "task_reward") in values
