"""Exported policies with a real `vllm serve` process and its HTTP API."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cory_env.tokenizer import load_tokenizer
from launch.main import main
from launch.run_folder.run import Run
from policies.generation.installed import vllm_installed
from tests.launch.conftest import ENVIRONMENT, record_adapters

pytestmark = pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")

PROMPT = "This movie is"
SMALL = ("--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", str(2**26), "--max-num-seqs", "2")


@contextlib.contextmanager
def serve(folder: Path, *words: str) -> Iterator[str]:
    """Starts a server in a folder and yields its address."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    # Equivalent to `vllm serve`, whose command requires a distribution named vllm; the CPU build has another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", port]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [*command, *words, *SMALL],
            cwd=folder,
            env={**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        while not is_healthy(f"{address}/health"):
            assert server.poll() is None, (folder / "log").read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # remaining child processes


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def complete(address: str, **fields: object) -> str:
    body = json.dumps({"model": "llm_1", "prompt": PROMPT, "max_tokens": 8, **fields}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["text"])


def greedy(model: Any, folder: Path) -> str:
    """Returns the greedy response of transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(PROMPT)["input_ids"]
    response = model.generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False)[0, len(tokens) :]
    return str(tokenizer.decode(response, skip_special_tokens=True))


@pytest.mark.slow
def test_vllm_serves_an_exported_policy_with_the_same_responses_as_transformers(
    policies_run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(policies_run.path), "--policy", "llm_1", "--out", str(out)]) == 0
    with serve(tmp_path, "--model", "out", "--served-model-name", "llm_1") as address:
        assert complete(address, temperature=0) == greedy(AutoModelForCausalLM.from_pretrained(out), out)
    log = (tmp_path / "log").read_text()
    assert "'temperature': 0.7" in log and "'top_k': 0" in log  # the default sampling parameters


@pytest.mark.slow
def test_vllm_serves_an_adapter_with_the_command_of_the_card(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=4096, num_attention_heads=2, max_position_embeddings=128, **shape)
    LlamaForCausalLM(config).save_pretrained(base)
    load_tokenizer().save_pretrained(base)
    run = record_adapters(tmp_path / "run", model=str(base))
    assert main(["export", str(run.path), "--policy", "llm_1", "--out", str(out)]) == 0
    command = re.search(r"`vllm serve (.+?)`", (out / "README.md").read_text())
    assert command is not None
    words = command[1].replace("NAME", "llm_1").replace("FOLDER", "out").split()
    with serve(tmp_path, "--model", *words) as address:
        adapter_text = complete(address, temperature=0)
        base_text = complete(address, temperature=0, model=str(base))
    assert adapter_text == greedy(AutoPeftModelForCausalLM.from_pretrained(out), out) != base_text
    assert base_text == greedy(LlamaForCausalLM.from_pretrained(base), base)
