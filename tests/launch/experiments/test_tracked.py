"""Trials of a search are logged to experiment trackers as concurrent runs of one group."""

import json
import subprocess
import sys
from pathlib import Path

from tests.launch.conftest import ENVIRONMENT, record_test_run
from tests.launch.training.test_tracking import exit_code_in, record_in
from tests.paper import paper_settings

TRIALS = """
import json, pathlib, sys
from launch.experiments.callbacks import SearchCallback
from policies.settings.settings import Settings

class Trial:
    def __init__(self, name):
        self.trial_id, self.path = name, str(folder / name)
        self.config = {"cory_settings": Settings(tracker="wandb").model_dump()}
    def __str__(self):
        return self.trial_id

folder = pathlib.Path(sys.argv[1])
callback, trials = SearchCallback(["lr"]), [Trial("trial_0"), Trial("trial_1")]
lines = [json.loads(line) for line in sys.stdin]
for line in lines:
    for trial in trials:
        (folder / str(trial)).mkdir(exist_ok=True, parents=True)
        callback.on_trial_result(1, trials, trial, {"updates": 1, "cory": line})
callback.on_trial_error(1, trials, trials[0])
for trial in trials[1:]:
    callback.on_trial_result(1, trials, trial, {"updates": 3, "cory": {**lines[-1], "update": 3}})
callback.on_experiment_end(trials)
"""


def test_concurrent_trials_are_runs_of_one_group_and_a_failed_trial_does_not_close_others(tmp_path: Path) -> None:
    updates = record_test_run(tmp_path / "run", paper_settings(num_updates=12), updates=range(3)).metrics[1:]
    process = subprocess.run(
        [sys.executable, "-c", TRIALS, str(tmp_path / "search")],
        env={**ENVIRONMENT, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)},
        input="".join(json.dumps(line) + "\n" for line in updates),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert (process.returncode, process.stderr) == (0, "")
    for trial, code in (("trial_0", 1), ("trial_1", 0)):
        folder = tmp_path / "search" / trial
        (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        wandb_run = record_in(file, "run").run
        assert (wandb_run.project, wandb_run.run_group, wandb_run.display_name) == ("cory", "search", trial)
        assert exit_code_in(file) == code
        assert file.read_bytes().count(b"policy/llm_1/kl") >= 3 - code
