"""`python -m benchmarks.gpu_engine`: start and speed of vLLM engines on one GPU, compiled or not.

A runner's engines replay CUDA graphs but compile nothing (`vllm_device.cuda_arguments`). This compares them with vLLM's
defaults, which compile the model too, and with engines that do neither. Each starts two engines of a model with random
weights in a process of its own, and generates 64 responses of 256 tokens three times.

The first run on a machine also compiles vLLM's own Triton kernels, and vLLM's compiler caches its results. So the first
two lines are of the same setting, and only the second is comparable with those below it. Results: docs/lab/gpu.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu import SHAPES, make_model
from policies.generation.generator import Sampling
from policies.generation.vllm_generator import VLLMGenerator

VARIANTS: dict[str, dict[str, Any]] = {
    "compiled, empty cache": {"compilation_config": {}},
    "compiled": {"compilation_config": {}},
    "neither": {"enforce_eager": True, "compilation_config": {}},
    "CUDA graphs": {},
}
"""Arguments of `vllm.LLM` that differ from a runner's."""
ROWS, PROMPT, RESPONSE = 64, 128, 256


def main(argv: list[str] | None = None) -> None:
    """Measures the variants and prints a line of each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_engine", description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="0.5B")
    parser.add_argument("--only", default="", metavar="TEXT", help="variants whose names hold this")
    o = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{'':<24} {'first start':>12} {'second start':>13} {'batches':>20}")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(o.size, Path(folder), device)
        for name, arguments in VARIANTS.items():
            if o.only in name:
                process = multiprocessing.get_context("spawn").Process(target=measure, args=(name, arguments, model))
                process.start()
                process.join()
                if process.exitcode:
                    raise SystemExit(f"{name}: the process failed")


def measure(name: str, arguments: dict[str, Any], model: str) -> None:
    """Starts two engines, generates with the first one, and prints the seconds."""
    import vllm

    starts, engine = [], vllm.LLM

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        started = engine(*args, **kwargs | arguments)
        starts.append(time.perf_counter() - began)
        return started

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with mock.patch("vllm.LLM", timed):
        generator = VLLMGenerator(
            dict.fromkeys(("llm_1", "llm_2"), model),
            dtype="bf16",
            device=device,
            max_prompt_tokens=PROMPT,
            max_response_tokens=RESPONSE,
            max_sequences=ROWS,
        )
    prompts = [[(37 * row + 11 * position) % 500 + 1 for position in range(PROMPT)] for row in range(ROWS)]
    batches = []
    for batch in range(3):
        sampling = Sampling(1.0, RESPONSE, seeds=range(ROWS * batch, ROWS * (batch + 1)), stop_token_ids=())
        began = time.perf_counter()
        generator.generate(prompts, "llm_1", sampling)
        batches.append(time.perf_counter() - began)
    times = " ".join(f"{seconds:6.2f}" for seconds in batches)
    print(f"{name:<24} {starts[0]:10.1f} s {starts[1]:11.1f} s {times:>20}", flush=True)


if __name__ == "__main__":
    main()
