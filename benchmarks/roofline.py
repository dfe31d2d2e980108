"""`python -m benchmarks.roofline`: time of an update of the examples for large machines by a roofline model, and
the number of GPUs that models need.

Nothing here was measured on a GPU. Each part takes as long as the slower of its arithmetic and its traffic, at the
speeds of `Machine`; nothing overlaps but a part's own two. Responses are as long as they may be, prompts half of that.

- rollout: each position of the chain in turn; a prompt's tokens at the speed of arithmetic, then a step per token,
  which reads the weights and all keys and values.
- score: the policy and its reference go forward once.
- learn: forward, forward again where activations are computed twice, and backward, twice as dear; each micro-batch
  gathers the weights twice in bf16 and sums gradients once in fp32.
- sync: the weights in fp32, gathered, copied into the machine's memory, and read by the engines one after another.

Where the GPUs' time goes, as shares of an update:

- products: what generating, scoring and learning must multiply, each forward and backward pass once.
- decode: the rest of the rollout, above all reading weights and keys and values for each token.
- twice: activations that are computed again.
- traffic: all-gathers and reduce-scatters beyond what products take meanwhile.
- uneven: by how much longer the same tokens take to score and learn, padded, and each micro-batch as long as the
  slowest GPU's, if responses are of any length from a quarter of the longest to all of it.
- sync: as above; all wait.
- save: weights and moments of all LLMs to `Machine.disk`, at every `checkpoint_every`-th update; all wait.
- waiting: runners while learners work, and learners while runners play, which `max_lag=1` would overlap.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from launch.console.configuration import resolve_settings
from policies.learning.forward.prefix_tree import Paths
from policies.learning.rows import make_rows
from policies.settings import memory
from policies.settings.memory import ModelShape, model_shapes
from policies.settings.settings import Settings


def _qwen(width: int, layers: int, heads: int, groups: int, inner: int, tied: bool = False) -> Qwen2Config:
    """Returns a shape of Qwen2.5's."""
    return Qwen2Config(
        vocab_size=152064,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=inner,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )


MODELS: dict[str, PreTrainedConfig] = {
    "1.5B": _qwen(1536, 28, 12, 2, 8960, tied=True),
    "7B": _qwen(3584, 28, 28, 4, 18944),
    "14B": _qwen(5120, 48, 40, 8, 13824),
    "32B": _qwen(5120, 64, 40, 8, 27648),
    "70B": LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    ),
}
"""Qwen2.5's shapes; the last one is Llama 3's."""
EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
CASES = {"gsm8k-qwen7b-lora": ("7B", 1), "gsm8k-qwen7b": ("7B", 1), "gsm8k-qwen14b": ("14B", 2)}
"""The examples for large machines, with their model's size and their machines."""
LOST = ("products", "decode", "twice", "traffic", "uneven", "sync", "save", "waiting")
GPU = 80e9
SHARD_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of shards to try per policy."""


class Machine(NamedTuple):
    """Assumptions about a machine with H100 GPUs: data sheet values and the fraction that training achieves."""

    arithmetic: float = 0.45 * 989e12
    """bf16 operations per second of a GPU."""
    memory: float = 0.7 * 3.35e12
    """Bytes per second that a GPU reads of its own memory."""
    link: float = 0.7 * 450e9
    """Bytes per second and GPU, in each direction, within a machine."""
    network: float = 0.7 * 50e9
    """The same between machines."""
    host: float = 0.5 * 64e9
    """Bytes per second between a GPU and its machine's memory."""
    disk: float = 2e9
    """Bytes per second that a machine writes to storage."""
    engine: float = 4e9
    """Bytes per second at which an engine takes new weights from the machine's memory, checksum included."""


def main(argv: list[str] | None = None) -> None:
    """Prints the seconds of each part, and the GPUs that models need."""
    argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__).parse_args(argv)
    shares = Table("of an update", *LOST)
    times = Table("example", "rollout", "score", "learn", "of it traffic", "sync", "update")
    with tempfile.TemporaryDirectory() as folder:
        paths = {size: Path(folder) / size for size in MODELS}
        for size, path in paths.items():
            MODELS[size].save_pretrained(path)
        for name, (size, nodes) in CASES.items():
            settings = example_settings(name, [f"model={paths[size]}", "dtype=bf16"])
            parts = update(settings, model_shapes(settings)[0], Machine(), nodes)
            total = sum(parts[name] for name in ("rollout", "score", "learn", "sync"))
            times.add_row(name, *(f"{seconds:.1f} s" for seconds in parts.values()), f"{total:.1f} s")
            of_parts = spent(settings, model_shapes(settings)[0], Machine(), nodes)
            shares.add_row(name, *(f"{abs(share):.1%}" for share in of_parts.values()))
        needed = Table("GPUs per LLM that learn it", *MODELS)
        for weights in ("full", "lora"):
            needed.add_row(f"weights={weights}", *(str(least_gpus(path, weights)) for path in paths.values()))
    console = Console(width=130)
    console.print(times)
    console.print(shares)
    console.print(needed)


def example_settings(name: str, words: Sequence[str] = ()) -> Settings:
    """Returns the settings of an example, with `words` over them."""
    return resolve_settings(None, [EXAMPLES / f"{name}.yaml"], words)


def least_gpus(path: Path, weights: str) -> int | None:
    """The fewest over which an LLM can be learned with GSM8K's lengths, by `cory plan`'s estimate."""
    settings = example_settings("gsm8k-qwen7b", [f"model={path}", "dtype=bf16", f"weights={weights}"])
    models = model_shapes(settings.model_copy(update={"shards_per_policy": 2}))  # with the sizes of blocks
    for shards in SHARD_COUNTS:
        update = {"shards_per_policy": shards, "num_learners": 2 * shards, "gpus_per_learner": 1}
        if memory.estimate_learner(settings.model_copy(update=update), models).total <= GPU:
            return shards
    return None


def update(s: Settings, model: ModelShape, machine: Machine, nodes: int) -> dict[str, float]:
    """Seconds of each part of one update."""
    ranks, num_policies = s.shards_per_policy or 1, len(s.policy_ids)
    tokens = s.responses * (s.prompt_limit / 2 + s.max_response_tokens) / ranks
    at_once = s.micro_batch_size * (s.prompt_limit / 2 + s.max_response_tokens)
    turns = 1 if s.shards_per_policy else num_policies  # one learner that has all LLMs takes one after another
    trained = model.parameters if s.lora is None else model.adapter
    forward = 2.0 * model.parameters * tokens / machine.arithmetic
    gather = 2.0 * model.parameters / (machine.link if ranks <= 8 and nodes == 1 else machine.network)
    gathers = tokens / at_once if ranks > 1 else 0.0
    backward = 2.0 if s.lora is None else 1.0  # frozen weights need no gradients
    steps = 1.0 + s.gradient_checkpointing + backward
    traffic = s.num_epochs * gathers * gather * (2 + (2 if s.lora is None else 0))
    learn = max(s.num_epochs * steps * forward, traffic)
    per_engine = s.chains / max(s.num_runners, 1)
    parts = s.tensor_parallel_size
    context = s.prompt_limit / 2 + s.max_response_tokens / 2
    prefill = 2.0 * model.parameters * per_engine * s.prompt_limit / 2 / parts / machine.arithmetic
    read = (2.0 * model.parameters + 2.0 * model.heads * model.head * context * per_engine) / parts / machine.memory
    decode = s.max_response_tokens * max(read, 2.0 * model.parameters * per_engine / parts / machine.arithmetic)
    sent = 4.0 * trained
    sync = num_policies * (sent / machine.host + sent / machine.engine)
    return {
        "rollout": s.num_agents * (prefill + decode),
        "score": turns * max(2.0 * forward, 2.0 * gathers * gather),
        "learn": turns * learn,
        "of it traffic": turns * max(0.0, learn - s.num_epochs * steps * forward),
        "sync": sync,
    }


def spent(s: Settings, model: ModelShape, machine: Machine, nodes: int) -> dict[str, float]:
    """The shares of all GPUs' time in an update, by the names of `LOST`; their sum is 1."""
    parts = update(s, model, machine, nodes)
    learners, runners = (s.num_learners * s.gpus_per_learner, s.num_runners * s.gpus_per_runner)
    gpus = learners + runners
    if s.gpus_per_learner < 1:  # the same GPU, which whoever works has for itself
        learners = runners = gpus
    one = (
        2.0
        * model.parameters
        * s.num_agents
        * s.chains
        * (s.prompt_limit / 2 + s.max_response_tokens)
        / machine.arithmetic
    )
    backward = 2.0 if s.lora is None else 1.0
    learned = one * (2.0 + s.num_epochs * (1.0 + backward))  # scored under the policy and its reference
    twice = one * s.num_epochs * s.gradient_checkpointing
    learning = parts["score"] + parts["learn"]
    late = (uneven(s) - 1.0) * learning
    trained = model.parameters if s.lora is None else model.adapter
    save = 12.0 * trained * len(s.policy_ids) / (machine.disk * nodes) / s.checkpoint_every
    seconds = {
        "products": one + learned,
        "decode": parts["rollout"] * runners - one,
        "twice": twice,
        "traffic": learning * learners - learned - twice,
        "uneven": late * learners,
        "sync": parts["sync"] * gpus,
        "save": save * gpus,
        "waiting": parts["rollout"] * (gpus - runners) + (learning + late) * (gpus - learners),
    }
    total = (parts["rollout"] + learning + late + parts["sync"] + save) * gpus
    assert math.isclose(sum(seconds.values()), total)
    return {name: seconds[name] / total for name in LOST}


def uneven(s: Settings) -> float:
    """How much longer rows of many lengths take than the same tokens would, dealt evenly and without padding."""
    random = np.random.default_rng(0)
    ranks = s.shards_per_policy or 1
    lengths = random.integers(s.max_response_tokens // 4, s.max_response_tokens + 1, s.responses_per_step).tolist()
    some = [[0] * length for length in lengths]
    prompts = [
        [0] * length for length in random.integers(s.prompt_limit // 4, 3 * s.prompt_limit // 4, s.responses_per_step)
    ]
    rows = make_rows(prompts, some, [[0.0] * length for length in lengths], lengths, [True] * s.responses_per_step)
    shares = Paths(rows).micro_batches(s.micro_batch_size, s.micro_batch_limit, cost=None, ranks=ranks)
    costs = [[float(len(packs) * max(pack.nodes for pack in packs)) for packs in share] for share in shares]
    steps = max(map(len, costs))
    slowest = sum(max(cost[step] for cost in costs if step < len(cost)) for step in range(steps))
    return slowest * ranks / float(rows.mask.sum() + rows.prompt_mask.sum() - len(lengths))


if __name__ == "__main__":
    main()
