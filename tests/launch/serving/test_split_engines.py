"""An engine in a separate process, as with tensor parallelism, is restarted when it dies."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.run_folder.layout import CONFIG
from launch.run_folder.run import Run
from policies.generation.installed import vllm_installed
from tests.launch.conftest import CHECKOUT, ENVIRONMENT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
    pytest.mark.timeout(600),
]

KILL = """
import sys
import psutil
from launch.models.generators import load_generator
from launch.models.trained import open_trained
from launch.serving.backends import make_backend
from launch.serving.request_queue import GenerationRequest

def generate():
    items = []
    busy = backend.step([GenerationRequest("llm_1", [40, 41, 42], 0.0, 6, 1, [], items.append)])
    while busy:
        busy = backend.step([])
    if items[-1] is not None:
        raise items[-1]
    return [token for tokens in items[:-1] for token in tokens]

if __name__ == "__main__":
    backend = make_backend(load_generator(open_trained(sys.argv[1]), ["llm_1"], "vllm", 4), ["llm_1"], 4)
    first = generate()
    for process in psutil.Process().children(recursive=True):
        if "EngineCore" in " ".join(process.cmdline()):
            process.kill()
    try:
        generate()
    except Exception as error:
        print(type(error).__name__, error)
    print(len(first), generate() == first)
    backend.close()
"""


def test_a_killed_engine_causes_an_error_and_its_replacement_generates_the_same(
    policies_run: Run, tmp_path: Path
) -> None:
    run = shutil.copytree(policies_run.path, tmp_path / "run")
    changes = {"backend": "vllm", "num_runners": 1, "runner_threads": 2, "tensor_parallel_size": 2}
    config = run / CONFIG
    unchanged = [line for line in config.read_text().splitlines() if line.partition(":")[0] not in changes]
    config.write_text("\n".join([*unchanged, *(f"{name}: {value}" for name, value in changes.items()), ""]))
    script = tmp_path / "kill.py"
    script.write_text(KILL)
    process = subprocess.run(
        [sys.executable, str(script), str(run)],
        env=ENVIRONMENT | {"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-2:] == [
        "GenerationError The vLLM engine of llm_1 died; it was restarted.",
        "6 True",
    ]
