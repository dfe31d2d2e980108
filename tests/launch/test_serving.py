"""An exported policy behind `vllm serve`, asked as any client asks: the one test that starts a real server."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.export import main
from launch.run_directory import RunDirectory
from policies.vllm_generator import vllm_installed
from tests.launch.conftest import ENVIRONMENT

pytestmark = pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")

PROMPT = "This movie is"
SMALL = ("--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", str(2**26), "--max-num-seqs", "2")


@pytest.fixture
def served(policies_run: RunDirectory, tmp_path: Path) -> Iterator[str]:
    """The address of a server of the policy in `tmp_path / "out"`."""
    assert main([str(policies_run.path), "--policy", "llm_1", "--out", str(tmp_path / "out")]) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # As `vllm serve`, whose command line wants a distribution that is called vllm, which the CPU build is not.
    serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "out"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [*serve, "--host", "127.0.0.1", "--port", port, "--served-model-name", "llm_1", *SMALL],
            cwd=tmp_path,
            env={**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        while not answers(f"{address}/health"):
            assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # what it left of its own processes


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def complete(address: str, **fields: object) -> str:
    body = json.dumps({"model": "llm_1", "prompt": PROMPT, "max_tokens": 8, **fields}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return str(json.load(reply)["choices"][0]["text"])


def test_vllm_serves_it_and_answers_as_transformers_does(served: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = tokenizer(PROMPT)["input_ids"]
    likeliest = model.generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False)[0, len(tokens) :]
    assert complete(served, temperature=0) == tokenizer.decode(likeliest, skip_special_tokens=True)
    log = (tmp_path / "log").read_text()
    assert "'temperature': 0.7" in log and "'top_k': 0" in log  # what it samples by where a client says nothing
