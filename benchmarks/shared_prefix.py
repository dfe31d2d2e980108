"""Learning with and without prefix sharing, on responses whose prompts have prefixes in common.

An update is what a run does: scoring with policy and reference, then training in mini-batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.alternate import alternate
from benchmarks.family_engine import FORK
from benchmarks.learner import learn
from benchmarks.models import make_model
from benchmarks.record import Figure, Record, median
from policies.learning.forward.prefix_tree import Paths
from policies.learning.policy_learner import PolicyLearner
from policies.learning.policy_model import PolicyModel
from policies.learning.rows import Rows, make_rows
from policies.models.model_names import model_path
from policies.rllib.causal_lm_module import module_config
from policies.settings.files import read_preset
from policies.settings.settings import Settings, make_settings

CLAIM = "learning on groups of 8 with prompts of 200 tokens is ≥ 2.2 × as fast with shared prefixes, few-shot ≥ 5 ×"


@dataclass(frozen=True)
class Case:
    """Rows of one update."""

    prompt: int
    """Tokens."""
    response: int
    """Maximum; a quarter of the responses end earlier."""
    group: int
    """Responses per prompt."""
    rows: int = 128
    common: int = 0
    """Tokens with which the prompts begin that share a prefix."""
    common_groups: int = 10_000
    """Neighbouring groups that share them."""
    at_least: float | None = None
    """The goal: updates per time, relative to plain rows."""


CASES = {
    "pioneer of imdb-tiny: prompts of 6, responses of 12, groups of 4": Case(6, 12, 4, at_least=1.1),
    "observer of imdb-tiny: prompts of 34, of which 6 are shared by 4": Case(34, 12, 1, common=6, common_groups=4),
    "prompts of 40, responses of 12, groups of 4": Case(40, 12, 4),
    "prompts of 200, responses of 50, groups of 8": Case(200, 50, 8, at_least=2.2),
    "prompts of 60, responses of 60, groups of 8": Case(60, 60, 8),
    "prompts of 16, responses of 60, groups of 8": Case(16, 60, 8),
    "few-shot: 800 common tokens, prompts of 820, responses of 20, groups of 4": Case(
        820, 20, 4, rows=64, common=800, at_least=5.0
    ),
}


def run(folder: Path, quick: bool) -> Record:
    """Measures each case in fp32 and bf16."""
    record = Record("shared_prefix", CLAIM, {})
    for dtype in ("fp32",) if quick else ("fp32", "bf16"):
        for name, case in CASES.items():
            measure(f"{dtype}, {name}", case, settings(folder, case, dtype, quick), 1 if quick else 3, record)
    return record


def settings(folder: Path, case: Case, dtype: str, quick: bool) -> Settings:
    """One agent that learns by RLOO, in two mini-batches and one epoch."""
    values: dict[str, Any] = {
        **read_preset("paper"),
        **{"task": "imdb", "model": make_model("test" if quick else "5M", folder), "dtype": dtype, "num_agents": 1},
        **{
            "advantage": "rloo" if case.group > 1 else "reinforce",
            "num_generations": case.group,
            "queries_per_update": case.rows // case.group,
        },
        **{"minibatch_size": case.rows // 2, "num_epochs": 1, "lr": 1e-6},
        **{"max_prompt_tokens": case.prompt, "max_response_tokens": case.response},
    }
    return make_settings(values)


def measure(name: str, case: Case, s: Settings, rounds: int, record: Record) -> None:
    """Adds a case's tokens, times and memory."""
    rows = make_case(case)
    sides = {"shared": make_learner(s, True), "plain": make_learner(s, False)}
    work = {side: partial(learn, {"llm_1": learner}, {"llm_1": rows}, s, 0) for side, learner in sides.items()}
    turns = alternate(work, rounds)
    nodes = {side: count_tokens(learner, rows) for side, learner in sides.items()}
    peaks = {side: peak_growth(work[side]) for side in sides}
    ratios = turns.ratios("plain", "shared", "cpu")
    record.figures += [
        median(f"{name}: speed", ratios, "×", at_least=case.at_least),
        Figure(f"{name}: fewer tokens", nodes["plain"] / nodes["shared"], "×"),
        Figure(f"{name}: peak memory of an update", peaks["shared"] / peaks["plain"], "×"),
    ]
    record.detail[name] = {"tokens": nodes, "peak_bytes": peaks, "cpu_seconds": turns.cpu, "wall_seconds": turns.wall}
    print(*(f"{figure.label} {figure.value:.2f}" for figure in record.figures[-3:]), sep="; ", flush=True)


def make_case(case: Case) -> Rows:
    """Random rows of a case."""
    random = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return random.integers(1, 4096, count).tolist()

    prompts: list[list[int]] = []
    common: list[int] = []
    for group in range(case.rows // case.group):
        if group % case.common_groups == 0:
            common = tokens(case.common)
        prompts += [[*common, *tokens(case.prompt - case.common)]] * case.group
    lengths = [case.response if random.random() > 0.25 else int(random.integers(1, case.response)) for _ in prompts]
    responses = [tokens(length) for length in lengths]
    logprobs = [[-8.0] * length for length in lengths]
    groups = [row // case.group for row in range(case.rows)]
    rewards = random.normal(size=case.rows).tolist()
    return make_rows(prompts, responses, logprobs, rewards, [True] * case.rows, groups)


def make_learner(s: Settings, prefix_sharing: bool) -> PolicyLearner:
    """The policy's learner, as an algorithm builds it."""
    config = module_config(s, "llm_1")
    model = PolicyModel(model_path(config.pop("model")), **config)
    model.check_forward(prefix_sharing)
    return PolicyLearner(model, s.hyperparameters)


def count_tokens(learner: PolicyLearner, rows: Rows) -> int:
    """Tokens of an update's training, with padding."""
    h, count = learner.hyperparameters, 0
    for index in learner._minibatches(rows, 0, 0):
        paths = Paths(rows.select(index))
        for packs in paths.micro_batches(h.micro_batch_size, h.micro_batch_tokens, learner.model.cost)[0]:
            count += len(packs) * max(pack.nodes for pack in packs)
    return count


def peak_growth(work: Callable[[], object]) -> int:
    """Bytes by which a piece of work raises the memory of a process that is forked for it."""
    receiver, sender = FORK.Pipe(duplex=False)

    def measured() -> None:
        before = psutil.Process().memory_info().rss
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        work()
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        sender.send(int(peak[1]) * 1024 - before if peak else 0)

    process = FORK.Process(target=measured)
    process.start()
    growth = int(receiver.recv())
    process.join()
    return growth
