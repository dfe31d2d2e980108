"""`python -m benchmarks.gpu`: speed and memory of a `PolicyLearner` on one GPU, without Ray, RLlib or vLLM.

One table, in four minutes on an H200. For shapes of Qwen2.5's sizes with random weights, in bf16: seconds to score and
to learn, the share of the GPU's arithmetic that learning uses (MFU; the aim is 40 %), and peak memory beside what
`cory plan` estimates. On one of the shapes, these are switched one by one: FSDP2 over one rank (NCCL), logits in parts,
`micro_batch_size`, `micro_batch_tokens`, `gradient_checkpointing`, `offload_optimizer`; and prefix sharing, in groups
of 8 with four times longer prompts and half as long responses.

What an H200 reached is in docs/lab/gpu.md. `--quick` shows that it runs: tiny shapes, on a CPU with gloo without a GPU.

MFU counts the products that the method needs: two per weight and token forward, four backward (two where the weights
are frozen), attention's, and the head's for response positions alone. What is computed twice does not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config

from policies.learning.forward import logits
from policies.learning.policy_learner import PolicyLearner
from policies.learning.policy_model import PolicyModel
from policies.learning.rows import Estimates, Rows, ScoredRows, TrainRows, make_rows
from policies.learning.sharding import learner_mesh
from policies.settings import memory
from policies.settings.files import read_preset
from policies.settings.settings import Settings, make_settings

SHAPES = {  # hidden, layers, heads, groups, inner, tied, vocabulary
    "tiny": (64, 2, 4, 2, 128, True, 512),
    "0.5B": (896, 24, 14, 2, 4864, True, 151936),
    "1.5B": (1536, 28, 12, 2, 8960, True, 151936),
    "3B": (2048, 36, 16, 2, 11008, True, 151936),
    "7B": (3584, 28, 28, 4, 18944, False, 152064),
}
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""bf16 operations per second by data sheet, of what has this in its name."""


@dataclass(frozen=True)
class Case:
    """A case to measure."""

    size: str
    weights: str = "full"
    fsdp: bool = False
    parts: bool = True
    """Compute logits in parts."""
    tokens: int | None = None
    """`micro_batch_tokens`."""
    again: bool = True
    """`gradient_checkpointing`."""
    offload: bool = False
    rows: int | None = None
    """`micro_batch_size`, if not that of the other cases."""
    group: int = 1
    """Responses to each prompt. In groups, prompts are four times longer and responses half as long."""
    share: bool = True
    """Share prefixes."""

    @property
    def name(self) -> str:
        """Name of the option that differs from the default of its size."""
        other = [
            *(["FSDP2, one rank"] if self.fsdp else []),
            *([] if self.parts else ["logits whole"]),
            *([f"micro_batch_tokens={self.tokens}"] if self.tokens else []),
            *([] if self.again else ["activations kept"]),
            *(["offload_optimizer"] if self.offload else []),
            *([f"micro_batch_size={self.rows}"] if self.rows else []),
            *([f"groups of {self.group}"] if self.group > 1 else []),
            *([] if self.share else ["plain rows"]),
        ]
        return " ".join([self.size, self.weights, *([f"({', '.join(other)})"] if other else [])])


def main(argv: list[str] | None = None) -> None:
    """Measures the cases and prints a line of each; writes them as JSON if asked. The exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny shapes; also without a GPU")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names hold this")
    parser.add_argument("--rows", type=int, default=64, help="responses of an update")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=512, help="most tokens of a response")
    parser.add_argument("--micro-batch-size", type=int, default=32)
    parser.add_argument("--updates", type=int, default=3, help="of which the median is taken, after one more")
    parser.add_argument("--folder", type=Path, help="where models are written (up to 31 GB); default: a temporary one")
    parser.add_argument("--out", type=Path, help="a JSON file")
    o = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not o.quick:
        parser.error("There is no GPU here. --quick shows that the script runs.")
    if o.quick:
        o.rows, o.prompt, o.response, o.micro_batch_size, o.updates = 8, 12, 16, 4, 1
    achieved_speed = product_speed(device, 512 if o.quick else 8192)
    peak = next(
        (speed for name, speed in PEAKS.items() if device == "cuda" and name in torch.cuda.get_device_name()),
        achieved_speed,
    )
    print(
        f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}: {peak / 1e12:.4g} T bf16 operations a second;"
        f" a product of large matrices reaches {achieved_speed / peak:.0%}"
    )
    print(f"{'case':<46} {'score':>8} {'learn':>8} {'tokens/s':>9} {'MFU':>7} {'memory':>9} {'of plan':>8}")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = o.folder or Path(temporary)
        with one_rank(device, Path(temporary)):
            for case in cases(o.quick):
                if o.only in case.name:
                    results.append(attempt(case, o, folder, device, peak))
                    print(results[-1]["line"], flush=True)
                    if o.out:  # after each one: the machine may be gone before the next ends
                        o.out.write_text(json.dumps(results, indent=1) + "\n")
    if any("error" in case for case in results):
        raise SystemExit(1)


def cases(quick: bool) -> Iterator[Case]:
    """Yields the sizes, then one size with each option switched."""
    if quick:
        yield from (Case("tiny"), Case("tiny", "lora"))
    else:
        yield from (Case("0.5B"), Case("1.5B"), Case("3B"), Case("1.5B", "lora"), Case("7B", "lora"))
    one = Case("tiny" if quick else "1.5B")
    yield replace(one, rows=2 if quick else 8)
    yield replace(one, group=8 // (1 + quick))
    yield replace(one, group=8 // (1 + quick), share=False)
    yield replace(one, fsdp=True)
    yield replace(one, parts=False)
    yield replace(one, tokens=40 if quick else 4096)
    yield replace(one, again=False)
    yield replace(one, offload=True)
    yield replace(one, fsdp=True, offload=True)
    if not quick:
        yield Case("3B", offload=True)


def attempt(case: Case, o: argparse.Namespace, folder: Path, device: str, peak: float) -> dict[str, Any]:
    """Measures one case; an error is its result, so that the others are measured too."""
    try:
        return measure(case, o, folder, device, peak)
    except torch.OutOfMemoryError as error:
        return {"case": case.name, "line": f"{case.name:<46} out of memory: {str(error).splitlines()[0]}"}
    except Exception as error:
        lines = "".join(traceback.format_exception(error)).splitlines()
        return {"case": case.name, "line": f"{case.name:<46} failed: {lines[-1]}", "error": lines}


def measure(case: Case, o: argparse.Namespace, folder: Path, device: str, peak: float) -> dict[str, Any]:
    """Learns a few updates of one case."""
    if case.group > 1:
        o = argparse.Namespace(**{**vars(o), "prompt": 4 * o.prompt, "response": o.response // 2})
    s = settings(case, o, make_model(case.size, folder, device), device)
    config = config_of(case.size)
    chunk = logits.CHUNK_LOGITS[device]
    logits.CHUNK_LOGITS[device] = chunk if case.parts else 2**62
    clear(device)
    try:
        model = PolicyModel(
            s.model_paths["llm_1"],
            critic=False,
            dtype="bf16",
            device=device,
            lora=s.lora,
            gradient_checkpointing=case.again,
            mesh=learner_mesh(1, 1, device)["shard"] if case.fsdp else None,
        ).to(device)
        learner = PolicyLearner(model, replace(s.hyperparameters, offload_optimizer=case.offload), name="llm_1")
        learner.check_forward(case.share)
        rows = play(o, config.vocab_size, case.group)
        scored, learned = [], []
        for update in range(o.updates + 1):
            began = now(device)
            scores = learner.score(rows)
            between = now(device)
            ready = with_random_advantages(rows.with_scores(scores))
            middle = now(device)
            learner.update(ready, update)
            scored.append(between - began)
            learned.append(now(device) - middle)
    finally:
        logits.CHUNK_LOGITS[device] = chunk
    score, learn = statistics.median(scored[1:]), statistics.median(learned[1:])
    mfu = operations(model, rows, config, case.weights) / learn / peak
    parts = memory.estimate_learner(s, memory.model_shapes(s)).parts
    planned = sum(size for name, size in parts.items() if name not in ("libraries", "allowance"))
    peak_bytes = float(torch.cuda.max_memory_allocated()) if device == "cuda" else None
    tokens = int(rows.mask.sum() + rows.prompt_mask.sum())
    line = f"{case.name:<46} {score:6.2f} s {learn:6.2f} s {tokens / learn:9.0f} {mfu:7.1%}"
    if peak_bytes is not None:
        line += f" {peak_bytes / 1e9:6.1f} GB {peak_bytes / planned:8.2f}"
    return {
        **{"case": case.name, "score_seconds": score, "learn_seconds": learn, "mfu": mfu, "line": line},
        **{"peak_bytes": peak_bytes, "planned_bytes": planned, "planned": parts},
    }


def settings(case: Case, o: argparse.Namespace, path: str, device: str) -> Settings:
    """The settings for `cory plan`'s estimate."""
    return make_settings(
        {
            **read_preset("paper"),
            **{"model": path, "num_agents": 1, "weights": case.weights, "dtype": "bf16", "advantage": "rloo"},
            **{
                "queries_per_update": o.rows // 4,
                "num_generations": 4,
                "minibatch_size": o.rows,
                "micro_batch_size": case.rows or o.micro_batch_size,
            },
            **{"micro_batch_tokens": case.tokens, "gradient_checkpointing": case.again, "num_epochs": 1},
            **{"max_prompt_tokens": o.prompt, "max_response_tokens": o.response, "num_learners": 1},
            **({"gpus_per_learner": 1, "offload_optimizer": case.offload} if device == "cuda" else {}),
        }
    )


def play(o: argparse.Namespace, vocabulary: int, group: int = 1) -> Rows:
    """Random responses, `group` to each prompt; a quarter of them end early."""
    random = np.random.default_rng(0)
    lengths = [o.response if random.random() > 0.25 else int(random.integers(1, o.response)) for _ in range(o.rows)]
    prompts, responses = (
        [random.integers(1, vocabulary, length).tolist() for length in limits]
        for limits in ([o.prompt] * (o.rows // group), lengths)
    )
    prompts = [prompt for prompt in prompts for _ in range(group)]
    return make_rows(prompts, responses, [[-11.0] * length for length in lengths], [0.0] * o.rows, [False] * o.rows)


def with_random_advantages(rows: ScoredRows) -> TrainRows:
    """Rows that a learner without a critic can train on."""
    advantages = torch.randn(rows.mask.shape) * rows.mask
    rewards, kl = rows.task_rewards.float(), torch.zeros_like(rows.mask)
    return rows.with_estimates(Estimates(rewards=rewards, kl=kl, advantages=advantages))


def operations(model: PolicyModel, rows: Rows, config: PreTrainedConfig, weights: str) -> float:
    """Of the products that learning from the rows once takes, each row by itself."""
    lengths = (rows.mask.sum(1) + rows.prompt_mask.sum(1)).double()
    head = config.vocab_size * config.hidden_size
    base_size = sum(parameter.numel() for name, parameter in model.lm.named_parameters() if ".lora_" not in name)
    body = base_size - head * (1 if config.tie_word_embeddings else 2)
    forward = 2.0 * body * float(lengths.sum()) + 2.0 * head * float(rows.mask.sum())
    attention = 2.0 * config.num_hidden_layers * config.hidden_size * float((lengths**2).sum())  # half of all pairs
    return forward * (3.0 if weights == "full" else 2.0) + 3.0 * attention


def config_of(size: str) -> Qwen2Config:
    """A size of `SHAPES` as transformers describes it."""
    hidden, layers, heads, groups, inner, tied, vocabulary = SHAPES[size]
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=inner,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )


def make_model(size: str, folder: Path, device: str) -> str:
    """Writes a model with random weights, once, and returns its path."""
    path = folder / size
    if not (path / "config.json").exists():
        with torch.device(device):
            AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16).save_pretrained(path)
    return str(path)


def product_speed(device: str, width: int) -> float:
    """Operations per second of products of square matrices in bf16."""
    left, right = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    left @ right
    began, products = now(device), 20
    for _ in range(products):
        left @ right
    return 2.0 * width**3 * products / (now(device) - began)


@contextmanager
def one_rank(device: str, folder: Path) -> Iterator[None]:
    """A process group of this process alone."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def clear(device: str) -> None:
    """Frees the previous case's memory and resets the peak."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def now(device: str) -> float:
    """Seconds, after synchronizing the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
