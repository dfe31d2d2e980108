"""Adapters on a shared base: memory per additional agent, seconds of a weight sync, and rollouts of mixed lengths
on both backends.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.alternate import alternate
from benchmarks.models import SHAPES, make_model
from benchmarks.record import Figure, Record, median
from benchmarks.side import run_side
from cory_env.tasks import make_task
from policies.cory import CoryConfig
from policies.generation.generator import Generator, Sampling
from policies.generation.transformers_generator import TransformersGenerator
from policies.generation.vllm_generator import VLLMGenerator
from policies.models.adapters import add_lora
from policies.models.language_model import shared_base
from policies.models.lora import Lora
from policies.settings.files import read_preset

CLAIM = "a second agent costs ≤ 15 % of memory, and its weights reach the engine in ≤ 0.2 s (135 M parameters, LoRA)"
LORA = Lora(rank=8, alpha=16.0)
MODULES = ("llm_1", "llm_2")


def run(folder: Path, quick: bool) -> Record:
    """Measures a random model of SmolLM2-135M's shape."""
    size = "test" if quick else "135M"
    settings: dict[str, Any] = read_preset("paper") | {
        "task": "imdb",
        "model": make_model(size, folder),
        "weights": "lora",
        "lora_rank": LORA.rank,
        "lora_alpha": LORA.alpha,
        "dtype": "bf16",
        "queries_per_update": 8,
        "minibatch_size": 8,
        "micro_batch_size": 4,
        "num_epochs": 1,
        "max_prompt_tokens": 96,
        "max_response_tokens": 48,
        "reward": "benchmarks.no_reward:zero",
    }
    record = Record("adapters", CLAIM, settings)
    record.figures += memory("", settings | equal_lengths(folder), (1, 2) if quick else (1, 2, 4, 8))
    record.figures += memory("longer prompts for observers, ", settings, (1, 2))
    budget = settings | {"micro_batch_tokens": 256}  # four rows of a pioneer
    record.figures += memory("longer prompts for observers, 256 tokens at once, ", budget, (1, 2))
    record.figures += sync(settings, 3 if quick else 9)
    record.figures += rollouts(settings["model"], SHAPES[size].vocabulary, 8 if quick else 24, 1)
    return record


def equal_lengths(folder: Path) -> dict[str, Any]:
    """Settings that give every agent the same prompts of one length, because longer ones would cost more."""
    openings = [query.text for query in make_task("imdb").train[:192]]
    data = folder / "long.jsonl"
    data.write_text("".join(json.dumps({"query": " ".join(openings[i : i + 12])}) + "\n" for i in range(0, 192, 12)))
    return {"task": "imdb", "data": str(data), "knowledge_transfer": False}


def memory(how: str, settings: dict[str, Any], agents: tuple[int, ...]) -> list[Figure]:
    """Peak memory of a learner's process by number of agents; `how` prefixes the names of the figures."""
    peaks = {}
    for n in agents:
        work = {"settings": settings | {"num_agents": n}, "updates": 2}
        peaks[n] = run_side("benchmarks.learner_side", work).peak_mb
    return [
        *(Figure(f"{how}training {n}: peak memory", peak, "MB") for n, peak in peaks.items()),
        Figure(f"{how}training 2: of training 1", peaks[2] / peaks[1], "×", at_most=1.15),
        *(Figure(f"{how}training {n}: of training 1", peaks[n] / peaks[1], "×") for n in agents if n > 2),
    ]


def sync(settings: dict[str, Any], rounds: int) -> list[Figure]:
    """Seconds from the learner's weights to an engine that holds them, for both agents together."""
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    algorithm = CoryConfig().cory(**settings).build_algo()
    seconds = []
    for version in range(rounds):
        started = time.perf_counter()
        algorithm.runners.sync_weights(version)
        seconds.append(time.perf_counter() - started)
    algorithm.stop()
    ray.shutdown()
    return [median("both adapters to the engine", seconds, "s", at_most=0.2)]


def rollouts(path: str, vocabulary: int, count: int, rounds: int) -> list[Figure]:
    """Response tokens per second of both backends: prompts of 4 to 64 tokens, responses that stop on one token in 32,
    at 64 at the latest.
    """
    random, longest = np.random.default_rng(0), 64
    prompts = [random.integers(1, 2000, int(random.integers(4, 65))).tolist() for _ in range(count)]
    sampling = Sampling(1.0, longest, range(count), range(0, vocabulary, 32))
    common: dict[str, Any] = {
        "dtype": "bf16",
        "device": torch.device("cpu"),
        "lora": LORA,
    }
    sizes: dict[str, Any] = {"max_prompt_tokens": 64, "max_response_tokens": longest, "max_sequences": count}
    backends: dict[str, Generator] = {
        "vllm": VLLMGenerator(dict.fromkeys(MODULES, path), **common, **sizes),
        "transformers": TransformersGenerator(dict.fromkeys(MODULES, path), **common),
    }
    initial = add_lora(shared_base(path, torch.device("cpu")), LORA).named_parameters()
    weights = {name: parameter.detach().numpy() for name, parameter in initial if parameter.requires_grad}
    tokens: dict[str, list[int]] = {name: [] for name in backends}

    def generate(name: str) -> None:
        out = backends[name].generate(prompts, "llm_1", sampling)
        tokens[name].append(sum(len(response.tokens) for response in out))

    for backend in backends.values():
        backend.load("llm_1", weights, 1)
    took = alternate({name: partial(generate, name) for name in backends}, rounds)
    speed = {name: tokens[name][-1] / took.seconds(name, "cpu") for name in backends}
    ratios = [
        ratio * tokens["vllm"][-1] / tokens["transformers"][-1] for ratio in took.ratios("transformers", "vllm", "cpu")
    ]
    backends["vllm"].close()
    return [
        *(Figure(f"rollouts, {name}", value, "tokens/CPU-s") for name, value in speed.items()),
        median("rollouts: vLLM's tokens/s of transformers'", ratios, "×"),
    ]
