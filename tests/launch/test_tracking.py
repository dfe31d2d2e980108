"""Where a run's numbers go, beside its own files: Ray's metrics endpoint, and Weights & Biases without a network."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

from policies.settings import Settings
from tests.launch.conftest import ENVIRONMENT, record

EXPORT = """
import json, pathlib, sys, time, urllib.request
import ray
from launch.tracking import figures_of, open_trackers
from policies.settings import Settings

run, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, _metrics_export_port=port)
trackers = open_trackers(run, Settings(), after=None)
for line in map(json.loads, sys.stdin):
    for tracker in trackers:
        tracker.log(line["update"], figures_of(line))
text, end = "", time.monotonic() + 60
while "cory_plays" not in text and time.monotonic() < end:
    time.sleep(0.5)
    try:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    except OSError:
        pass
print(text)
"""


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
import json, pathlib, sys
from launch.tracking import WeightsAndBiases, figures_of
from policies.settings import Settings

for text in sys.stdin:  # a run, and one that was resumed
    tracker = WeightsAndBiases(pathlib.Path(sys.argv[1]), Settings(lr=2e-5))
    tracker.log(json.loads(text)["update"], figures_of(json.loads(text)))
    tracker.close()
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
