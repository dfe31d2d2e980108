"""Logging to TensorBoard, and to Weights & Biases offline."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.console.errors import CommandError
from launch.training.tracking import check_trackers, open_trackers
from policies.settings.settings import Settings
from tests.launch.conftest import ENVIRONMENT, record_test_run
from tests.paper import paper_settings

OFFLINE = """
import json, pathlib, sys, time
from launch.training.tracking import WeightsAndBiases, flat_metrics
from policies.settings.settings import Settings

RESPONSES = [{"role": "pioneer", "policy": "llm_2", "text": "is a wonder", "task_reward": 0.5}]
for text, failed in zip(sys.stdin, (True, False)):  # a run that failed, and was resumed
    tracker = WeightsAndBiases(pathlib.Path(sys.argv[1]), Settings(reward=lambda completions: [0.0]))
    tracker.log_samples(json.loads(text)["update"], [{"query": "This film", "responses": RESPONSES}], held_out=True)
    tracker.log(json.loads(text)["update"], flat_metrics(json.loads(text)))
    print(tracker.location())
    tracker.close(failed)
    time.sleep(1.1)  # W&B names the folder of an offline run by the second of its start
"""


def test_wandb_logs_a_run_offline_under_one_id_with_its_environment_variables(tmp_path: Path) -> None:
    run = record_test_run(tmp_path / "here", paper_settings(num_updates=12), updates=range(3))
    variables = {"PROJECT": "theirs", "NAME": "mine", "ENTITY": "team", "RUN_GROUP": "seeds", "JOB_TYPE": "train"}
    variables |= {"TAGS": "one,two", "NOTES": "why", "RUN_ID": "another", "DIR": str(tmp_path / "wandb-dir")}
    (tmp_path / "wandb-dir").mkdir()
    environment = {f"WANDB_{key}": value for key, value in {**variables, "MODE": "offline"}.items()}
    result = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(run.path)],
        env={**ENVIRONMENT, **environment, "HOME": str(tmp_path)},
        input="".join(json.dumps(line) + "\n" for line in run.metrics[1:]),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert result.returncode == 0, result.stderr
    name = (run.path / "wandb.id").read_text()  # not WANDB_RUN_ID
    files = sorted((tmp_path / "wandb-dir" / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert len(files) == 2
    assert re.findall("wandb sync (.*)", result.stdout) == [str(file.parent) for file in files]
    for update, file in enumerate(files, start=1):
        kl = run.metrics[update]["policy"]["llm_1"]["kl"]
        assert re.search(rb"policy/llm_1/kl\W{1,3}" + re.escape(str(kl).encode()), file.read_bytes())
        assert exit_code_in(file) == (1 if update == 1 else 0)
        assert b'"lambda"' in file.read_bytes() and b"pickled" not in file.read_bytes()  # only the reward's name
        (table,) = (file.parent / "files" / "media" / "table" / "samples").glob("held_out*.table.json")
        content = json.loads(table.read_text())
        assert content["columns"] == ["update", "query", "role", "policy", "response", "task_reward"]
        assert content["data"] == [[update, "This film", "pioneer", "llm_2", "is a wonder", 0.5]]
        wandb_run = record_in(file, "run").run
        assert (wandb_run.project, wandb_run.display_name, wandb_run.entity) == ("theirs", "mine", "team")
        assert wandb_run.run_id == name
        details = (wandb_run.run_group, wandb_run.job_type, list(wandb_run.tags), wandb_run.notes)
        assert details == ("seeds", "train", ["one", "two"], "why")


def exit_code_in(file: Path) -> int:
    return int(record_in(file, "exit").exit.exit_code)


def record_in(file: Path, kind: str) -> Any:
    """Returns a record of a W&B file, which has a magic number, then records with headers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, record = file.read_bytes()[7:], Record()
    while data:
        _, length, _ = struct.unpack("<IHB", data[:7])
        record.ParseFromString(data[7 : 7 + length])
        data = data[7 + length :]
        if record.HasField(kind):
            return record
    raise AssertionError(f"{file} has no record {kind}")


KILLED = """
import json, pathlib, sys
import psutil
from launch.console.output import forward_warnings
from launch.training.tracking import flat_metrics, open_trackers
from policies.settings.settings import Settings

run = pathlib.Path(sys.argv[1])
lines = [json.loads(line) for line in sys.stdin]
with forward_warnings(print):
    for _ in range(2):  # a run, and its next attempt in the same process
        with open_trackers(run, Settings(tracker="wandb"), after=None) as trackers:
            trackers.log(0, flat_metrics(lines[0]))
            (core,) = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
            core.terminate()
            core.wait()
            for line in lines[1:]:
                trackers.log(line["update"], flat_metrics(line))
"""


def test_a_killed_tracker_is_dropped_with_a_warning_and_the_others_continue(tmp_path: Path) -> None:
    run = record_test_run(tmp_path / "here", paper_settings(num_updates=12), updates=range(4))
    result = subprocess.run(
        [sys.executable, "-c", KILLED, str(run.path)],
        env={**ENVIRONMENT, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)},
        input="".join(json.dumps(line) + "\n" for line in run.metrics),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert (result.returncode, result.stderr) == (0, "")
    warning = (
        r"Warning: Weights & Biases failed \(ConnectionResetError: .*\). Training continues without it; "
        r"metrics\.jsonl has all metrics\.\n"
    )
    assert re.fullmatch(2 * warning, result.stdout), result.stdout
    events = b"".join(file.read_bytes() for file in (run.path / "tensorboard").iterdir())
    assert events.count(b"policy/llm_1/kl") == 2 * 3


def test_attempts_within_one_second_have_event_files_of_their_own(tmp_path: Path) -> None:
    for attempt in range(3):  # two of them at least in the same second
        with open_trackers(tmp_path, paper_settings(), after=None) as trackers:
            trackers.log(attempt, {f"metric_{attempt}": 1.0})
    files = sorted((tmp_path / "tensorboard").iterdir())
    assert [f"metric_{attempt}".encode() in file.read_bytes() for attempt, file in enumerate(files)] == [True] * 3


def test_a_tracker_that_is_not_installed_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("wandb", "trackio"):
        with pytest.raises(CommandError, match=f"Run `pip install {name}`, or set tracker=null"):
            check_trackers(Settings.model_validate({"tracker": name}))
    check_trackers(paper_settings())


def test_a_run_without_weights_and_biases_leaves_the_user_s_process_of_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(teardown=lambda: ended.append(True)))
    ended: list[bool] = []
    with open_trackers(tmp_path, paper_settings(), after=None) as trackers:
        trackers.log(0, {"kl": 0.0})
    assert not ended
