"""Where a run's numbers go, beside its own files: Ray's metrics endpoint; Weights & Biases and MLflow, both offline."""

import json
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.console.errors import CommandError
from launch.training.services import mlflow_tags
from launch.training.tracking import check
from policies.settings.settings import Settings
from tests.launch.conftest import ENVIRONMENT, record

EXPORT = """
import json, pathlib, sys, time, urllib.request
import ray
from launch.training.tracking import figures_of, open_trackers
from policies.settings.settings import Settings

run, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, _metrics_export_port=port)
trackers = open_trackers(run, Settings(), after=None)
for line in map(json.loads, sys.stdin):
    trackers.log(line["update"], figures_of(line))
text, end = "", time.monotonic() + 60
while "cory_plays" not in text and time.monotonic() < end:
    time.sleep(0.5)
    try:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    except OSError:
        pass
print(text)
"""


@pytest.mark.slow
def test_rays_own_endpoint_shows_the_last_update_of_a_run(tmp_path: Path) -> None:
    run = record(tmp_path / "here", Settings(updates=12), updates=range(7))
    line = run.updates()[6]
    line["role"] = {"pioneer": line["policy"]["llm_2"], "observer": line["policy"]["llm_1"]}
    shown_too = {**line, "weight_version_lag": 0}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shown = subprocess.run(
        [sys.executable, "-c", EXPORT, str(run.path), str(port)],
        env={**ENVIRONMENT, "RAY_metrics_report_interval_ms": "500"},
        input=json.dumps(shown_too) + "\n",
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert shown.returncode == 0, shown.stderr

    def value(name: str, **tags: str) -> float:
        for labels, number in re.findall(rf"^ray_cory_{name}\{{(.*)\}} (\S+)$", shown.stdout, re.MULTILINE):
            if all(f'{tag}="{text}"' in labels for tag, text in {"run": "here", **tags}.items()):
                return float(number)
        raise AssertionError(f"no {name} of {tags} in:\n{shown.stdout}")

    assert value("update") == 6
    assert value("tokens_per_second") == 1000 and value("weight_version_lag") == 0
    for policy, role in (("llm_1", "observer"), ("llm_2", "pioneer")):  # exchanged after update 5
        for name in ("task_reward", "kl", "combined_reward"):
            figure = line["policy"][policy][name]
            assert figure is not None
            assert abs(value(f"policy_{name}", policy=policy) - figure) < 1e-6
            assert abs(value(f"role_{name}", role=role) - figure) < 1e-6
            assert abs(value(f"held_out_{name}", policy=policy) - figure) < 1e-6
        assert value("plays", policy=policy, role=role) == 1
    assert value("plays", policy="llm_1", role="pioneer") == 0


OFFLINE = """
import json, pathlib, sys, time
from launch.training.tracking import WeightsAndBiases, figures_of
from policies.settings.settings import Settings

RESPONSES = [{"role": "pioneer", "policy": "llm_2", "text": "is a wonder", "task_reward": 0.5}]
for text, failed in zip(sys.stdin, (True, False)):  # a run that failed, and was resumed
    tracker = WeightsAndBiases(pathlib.Path(sys.argv[1]), Settings(reward=lambda completions: [0.0]))
    tracker.show(json.loads(text)["update"], [{"query": "This film", "responses": RESPONSES}], held_out=True)
    tracker.log(json.loads(text)["update"], figures_of(json.loads(text)))
    tracker.close(failed)
    time.sleep(1.1)  # W&B names an offline run's folder by the second it began in
"""


def test_weights_and_biases_keeps_a_run_without_a_network_and_under_one_id(tmp_path: Path) -> None:
    run = record(tmp_path / "here", Settings(updates=12), updates=range(3))
    written = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(run.path)],
        env={**ENVIRONMENT, "WANDB_MODE": "offline", "HOME": str(tmp_path)},
        input="".join(json.dumps(line) + "\n" for line in run.updates()[1:]),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert written.returncode == 0, written.stderr
    name = (run.path / "wandb.id").read_text()
    files = sorted((run.path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert len(files) == 2
    for update, file in enumerate(files, start=1):
        figure = run.updates()[update]["policy"]["llm_1"]["kl"]
        assert re.search(rb"policy/llm_1/kl\W{1,3}" + re.escape(str(figure).encode()), file.read_bytes())
        assert exit_code_in(file) == (1 if update == 1 else 0)
        assert b'"lambda"' in file.read_bytes() and b"pickled" not in file.read_bytes()  # of a reward, its name alone
        (table,) = (file.parent / "files" / "media" / "table" / "samples").glob("held_out*.table.json")
        kept = json.loads(table.read_text())
        assert kept["columns"] == ["update", "query", "role", "policy", "response", "task_reward"]
        assert kept["data"] == [[update, "This film", "pioneer", "llm_2", "is a wonder", 0.5]]


def test_the_variables_of_weights_and_biases_say_where_and_how_a_run_is_kept_but_not_its_id(tmp_path: Path) -> None:
    run = record(tmp_path / "here", Settings(updates=12), updates=range(2))
    own = {"PROJECT": "theirs", "NAME": "mine", "ENTITY": "team", "RUN_GROUP": "seeds", "JOB_TYPE": "train"}
    own |= {"TAGS": "one,two", "NOTES": "why", "RUN_ID": "another", "DIR": str(tmp_path / "kept")}
    (tmp_path / "kept").mkdir()
    written = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(run.path)],
        env={**ENVIRONMENT, **{f"WANDB_{key}": value for key, value in own.items()}, "WANDB_MODE": "offline"},
        input=json.dumps(run.updates()[1]) + "\n",
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert written.returncode == 0, written.stderr
    name = (run.path / "wandb.id").read_text()
    (file,) = (tmp_path / "kept" / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb")
    kept = record_in(file, "run").run
    assert (kept.project, kept.display_name, kept.entity, kept.run_id) == ("theirs", "mine", "team", name)
    assert (kept.run_group, kept.job_type, list(kept.tags), kept.notes) == ("seeds", "train", ["one", "two"], "why")


def exit_code_in(file: Path) -> int:
    return int(record_in(file, "exit").exit.exit_code)


def record_in(file: Path, kind: str) -> Any:
    """Returns a record of the file that Weights & Biases wrote: a magic number, then records with headers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, record = file.read_bytes()[7:], Record()
    while data:
        _, length, _ = struct.unpack("<IHB", data[:7])
        record.ParseFromString(data[7 : 7 + length])
        data = data[7 + length :]
        if record.HasField(kind):
            return record
    raise AssertionError(f"it has no {kind}")


KILLED = """
import json, pathlib, sys
import psutil
from launch.console.output import warnings_told
from launch.training.tracking import figures_of, open_trackers
from policies.settings.settings import Settings

run = pathlib.Path(sys.argv[1])
lines = [json.loads(line) for line in sys.stdin]
with warnings_told(print):
    for _ in range(2):  # a run, and its next attempt in the same process
        with open_trackers(run, Settings(wandb=True), after=None) as trackers:
            trackers.log(0, figures_of(lines[0]))
            (core,) = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
            core.terminate()
            core.wait()
            for line in lines[1:]:
                trackers.log(line["update"], figures_of(line))
"""


def test_a_tracker_whose_process_is_killed_is_left_out_with_a_warning_and_the_others_go_on(tmp_path: Path) -> None:
    run = record(tmp_path / "here", Settings(updates=12), updates=range(4))
    written = subprocess.run(
        [sys.executable, "-c", KILLED, str(run.path)],
        env={**ENVIRONMENT, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)},
        input="".join(json.dumps(line) + "\n" for line in run.updates()),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert (written.returncode, written.stderr) == (0, "")
    lost = (
        r"Warning: Weights & Biases has failed \(ConnectionResetError: .*\). The run does without it; "
        r"metrics\.jsonl has all numbers\.\n"
    )
    assert re.fullmatch(2 * lost, written.stdout), written.stdout
    kept = b"".join(file.read_bytes() for file in (run.path / "tensorboard").iterdir())
    assert kept.count(b"policy/llm_1/kl") == 2 * 3


TO_MLFLOW = """
import json, os, pathlib, sys
from launch.console.errors import CommandError
from launch.training.tracking import MLflow, figures_of
from policies.settings.settings import Settings

run, database = map(pathlib.Path, sys.argv[1:])
lines = [json.loads(line) for line in sys.stdin]

def session(line, failed=False, spoil=False):
    tracker = MLflow(run, Settings(lr=2e-5, reward=lambda completions: [0.0]))
    if spoil:
        database.write_text("no database")
    tracker.log(line["update"], figures_of(line))
    tracker.close(failed)

os.environ["MLFLOW_TRACKING_URI"] = "http://me:opensesame@127.0.0.1:9"
try:
    session(lines[0])
except CommandError as error:
    refused = str(error)
os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{database}"
from mlflow import MlflowClient
client = MlflowClient()
ends = []
for line, failed in ((lines[0], True), (lines[0], False), (lines[1], False)):  # it failed, went back, and goes on
    session(line, failed)
    ends.append(client.get_run((run / "mlflow.id").read_text()).info.status)
(experiment,) = client.search_experiments(filter_string="name = 'theirs'")
(kept,) = client.search_runs([experiment.experiment_id])
history = [(point.step, point.value) for point in client.get_metric_history(kept.info.run_id, "policy/llm_1/kl")]
session({**lines[1], "update": 3}, spoil=True)
print(json.dumps([refused, ends, dict(kept.info), kept.data.params, kept.data.tags, history]))
"""


def test_mlflow_keeps_a_run_and_goes_on_with_it_and_stops_nothing_when_it_fails_later(tmp_path: Path) -> None:
    run = record(tmp_path / "here", Settings(updates=12), updates=range(3))
    own = {"MLFLOW_EXPERIMENT_NAME": "theirs", "MLFLOW_TAGS": '{"team": "a", "task": "films"}'}
    written = subprocess.run(
        [sys.executable, "-c", TO_MLFLOW, str(run.path), str(tmp_path / "mlflow.db")],
        env={**ENVIRONMENT, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", **own},
        input="".join(json.dumps(line) + "\n" for line in run.updates()[1:]),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert written.returncode == 0, written.stderr
    refused, ends, kept, params, tags, history = json.loads(written.stdout)
    assert re.fullmatch(r"MLflow refuses to start: .*127.0.0.1.* To do without: mlflow=false\.", refused)
    assert "opensesame" not in refused and params["reward"] == "lambda"  # without its code
    assert kept["run_id"] == (run.path / "mlflow.id").read_text()
    assert (kept["run_name"], params["lr"], ends) == ("here", "2e-05", ["FAILED", "FINISHED", "FINISHED"])
    found = {name: tags[name] for name in ("team", "task", "model", "algorithm", "agents")}
    assert found == {"team": "a", "task": "films", "model": "imdb-gpt2-tiny", "algorithm": "PPO", "agents": "2"}
    assert history == [[update, run.updates()[update]["policy"]["llm_1"]["kl"]] for update in (1, 2)]
    assert "file is not a database" in written.stderr


def test_tags_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("team", "[1]"):
        monkeypatch.setenv("MLFLOW_TAGS", wrong)
        with pytest.raises(CommandError, match="MLFLOW_TAGS must be a JSON object"):
            mlflow_tags(Settings())


def test_a_tracker_that_is_not_there_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(CommandError, match=r"mlflow=true needs MLFLOW_TRACKING_URI: .* Set it, or set mlflow=false\."):
        check(Settings(mlflow=True))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, package in (("wandb", "wandb"), ("mlflow", "mlflow-skinny"), ("trackio", "trackio")):
        with pytest.raises(CommandError, match=f"Run `pip install {package}`, or set {name}=false"):
            check(Settings.model_validate({name: True}))
    check(Settings())
