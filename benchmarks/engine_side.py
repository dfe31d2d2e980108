"""Engines that generate and take weights, in a separate process; see `benchmarks.side`."""

from __future__ import annotations

import time

import numpy as np
import torch

from benchmarks.engines import PROMPT, RESPONSE
from benchmarks.processes import watched_memory
from benchmarks.side import Took, read_work
from policies.generation.generator import Sampling
from policies.generation.vllm_generator import VLLMGenerator
from policies.models.language_model import load_language_model


def main() -> None:
    """Starts the engines, generates once with each, then measures loads and batches of the first one."""
    work, took = read_work(), Took()
    names = [f"llm_{number + 1}" for number in range(work["engines"])]
    numbers = np.random.default_rng(0)
    prompts = numbers.integers(1, work["vocabulary"], (work["prompts"], PROMPT)).tolist()
    sampling = Sampling(1.0, RESPONSE, list(range(work["prompts"])), ())
    with watched_memory() as peak:
        generator = VLLMGenerator(
            dict.fromkeys(names, work["model"]),
            dtype="fp32",
            device=torch.device("cpu"),
            max_prompt_tokens=PROMPT,
            max_response_tokens=RESPONSE,
            max_sequences=work["prompts"],
        )
        weights = {
            name: tensor.detach().numpy() for name, tensor in load_language_model(work["model"]).named_parameters()
        }
        for name in names:
            generator.load(name, weights, 0)
            generator.generate(prompts, name, sampling)
    took.note_memory(peak)
    for version in range(1, work["loads"] + 1):
        started = time.perf_counter()
        generator.load(names[0], weights, version)
        loaded = time.perf_counter()
        generator.generate(prompts, names[0], sampling)
        took.wall.append(loaded - started)
        took.phases.append({"batch": time.perf_counter() - loaded})
    generator.close()
    took.answer()


if __name__ == "__main__":
    main()
