"""Logging to Trackio."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.launch.conftest import ENVIRONMENT, record_test_run
from tests.paper import paper_settings

TO_TRACKIO = """
import json, pathlib, sys
from launch.training.tracking import Trackio, flat_metrics
from policies.settings.settings import Settings

run, again = pathlib.Path(sys.argv[1]), sys.argv[2:]
first, *rest = map(json.loads, sys.stdin)

def session(*lines):
    tracker = Trackio(run, Settings(tracker="trackio", lr=3e-5))
    for line in lines:
        response = {"role": "pioneer", "policy": "llm_1", "text": "good", "task_reward": 1.0}
        tracker.log_samples(line["update"], [{"query": "Is it", "responses": [response]}], True)
        tracker.log(line["update"], flat_metrics(line))
    tracker.close(failed=False)

session(first)
session(first, *rest)  # resumes from a checkpoint before its first update
"""


def test_trackio_continues_a_resumed_run_and_stores_each_update_once(tmp_path: Path) -> None:
    run = record_test_run(tmp_path / "here", paper_settings(num_updates=12), updates=range(3))
    environment = {**ENVIRONMENT, "TRACKIO_DIR": str(tmp_path / "kept"), "TRACKIO_PROJECT": "theirs"}
    result = subprocess.run(
        [sys.executable, "-c", TO_TRACKIO, str(run.path)],
        env=environment,
        input="".join(json.dumps(line) + "\n" for line in run.metrics[1:]),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""

    def query(*words: str) -> Any:
        command = [str(Path(sys.executable).with_name("trackio")), *words, "--project", "theirs", "--json"]
        return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60).stdout)

    assert query("list", "runs")["runs"] == ["here"]
    metric = query("get", "metric", "--run", "here", "--metric", "policy/llm_1/kl")
    points = [(point["step"], point["value"]) for point in metric["values"]]
    assert points == [(update, run.metrics[update]["policy"]["llm_1"]["kl"]) for update in (1, 2)]
    tables = query("get", "metric", "--run", "here", "--metric", "samples/held_out")["values"]
    assert [(table["step"], table["value"]["_value"][0]["response"]) for table in tables] == [(1, "good"), (2, "good")]
    assert query("get", "run", "--run", "here")["config"]["lr"] == 3e-5
