"""Chains at their own pace against lockstep, where each position waits for the last response of the one before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.alternate import alternate
from benchmarks.models import make_model
from benchmarks.record import Figure, Record, median
from launch.console.configuration import read_preset
from policies.cory import CoryConfig
from policies.generation.generator import Generator
from policies.generation.transformers_generator import TransformersGenerator
from policies.generation.vllm_generator import VLLMGenerator
from policies.models.adapters import add_lora
from policies.models.language_model import shared_base
from policies.models.weights import Weights
from policies.rollout.chain_runner import ChainRunner
from policies.rollout.episodes import Rollout
from policies.rollout.prompt_sampling import PromptRef
from policies.rollout.role_mapping import make_mapping

CLAIM = "rollouts of ragged responses take fewer steps than in lockstep; none take longer"
RAGGED = {"max_prompt_tokens": 200, "max_response_tokens": 160, "stop": "k"}  # which one token in 26 holds
CASES: dict[str, dict[str, Any]] = {
    "two adapters": {"weights": "lora", **RAGGED},
    "two adapters, 32 chains": {"weights": "lora", **RAGGED, "queries_per_update": 32, "minibatch_size": 32},
    "four adapters": {"weights": "lora", "num_agents": 4, "observed": "last", **RAGGED},
    "one LLM in both roles": {"num_policies": 1, **RAGGED},
    "one LLM in both roles, cut at 64 tokens": {"num_policies": 1, **RAGGED, "max_response_tokens": 64},
    "two LLMs": RAGGED,
    "two adapters, 12 tokens each": {"weights": "lora"},
    "two LLMs, 12 tokens each": {},
}


class Lockstep:
    """A backend that has vLLM generate as `transformers` does: all that waits for one LLM at once."""

    run_requests = TransformersGenerator.run_requests

    def __init__(self, generator: VLLMGenerator) -> None:
        """Wraps a vLLM generator."""
        self.generate = generator.generate


def run(folder: Path, quick: bool) -> Record:
    """Measures the bundled model's size, with engines in this process, as in a runner."""
    values = read_preset("imdb-tiny-paper") | {
        "model": make_model("test" if quick else "5M", folder),
        "reward": "benchmarks.no_reward:zero",
    }
    few = {"queries_per_update": 8, "minibatch_size": 8} if quick else {}
    record = Record("pace", CLAIM, values)
    for label, case in CASES.items():
        config = CoryConfig().cory(**values | case | few)
        config.validate()
        runner = ChainRunner(config=config, worker_index=1)
        record.figures += measure(runner, label, 1 if quick else 5, record.detail)
        runner.stop()
    return record


def measure(runner: ChainRunner, label: str, rounds: int, detail: dict[str, Any]) -> list[Figure]:
    """Times one case; `detail` gets the seconds and steps."""
    s, generator = runner.settings, runner.generator
    assert isinstance(generator, VLLMGenerator)
    runner._versions = dict.fromkeys(s.policy_ids, 0)
    for policy_id in s.policy_ids if s.lora else ():
        generator.load(policy_id, initial(runner, policy_id), 0)
    mapping, prompt_refs = (
        make_mapping(s),
        [PromptRef(query) for query in range(s.queries_per_update)],
    )
    counter = [0]
    for engine in generator.engines.values():
        engine.llm_engine.step = counted(engine.llm_engine.step, counter)
    modes = {"own pace": generator, "lockstep": Lockstep(generator)}
    rollouts: dict[str, list[Rollout]] = {mode: [] for mode in modes}
    steps = dict.fromkeys(modes, 0)

    def play(mode: str) -> None:
        counter[0], runner.generator = 0, cast(Generator, modes[mode])
        rollouts[mode].append(runner.sample(prompt_refs=prompt_refs, mapping=mapping, version=0))
        steps[mode] = counter[0]

    took = alternate({mode: partial(play, mode) for mode in modes}, rounds)
    if rollouts["own pace"][0].samples != rollouts["lockstep"][0].samples:
        raise RuntimeError("The two modes generated different chains.")
    runner.generator = generator
    seconds = {
        mode: [rollout.counters["rollout_seconds"] for rollout in mode_rollouts[-rounds:]]
        for mode, mode_rollouts in rollouts.items()
    }
    detail[label] = {
        "cpu_seconds": took.cpu,
        "rollout_seconds": seconds,
        "steps": steps,
        "tokens": rollouts["lockstep"][0].counters["tokens"],
    }
    ratios = [one / other for one, other in zip(seconds["lockstep"], seconds["own pace"], strict=True)]
    return [
        Figure(f"{label}: steps in lockstep", steps["lockstep"] / steps["own pace"], "×", at_least=1.0),
        median(
            f"{label}: CPU time of sample() in lockstep", took.ratios("lockstep", "own pace", "cpu"), "×", at_least=0.97
        ),
        median(f"{label}: wall time of the rollout in lockstep", ratios, "×", at_least=0.97),
    ]


def counted(step: Callable[[], Any], steps: list[int]) -> Callable[[], Any]:
    """An engine's step that counts itself."""

    def counting() -> Any:
        steps[0] += 1
        return step()

    return counting


def initial(runner: ChainRunner, policy_id: str) -> Weights:
    """An adapter's weights at the start."""
    s = runner.settings
    assert s.lora is not None
    model = add_lora(shared_base(s.model_paths[policy_id], torch.device("cpu")), s.lora)
    return {name: p.detach().numpy() for name, p in model.named_parameters() if p.requires_grad}
