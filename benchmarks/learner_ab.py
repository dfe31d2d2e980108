"""What makes one learner faster on a GPU: `python -m benchmarks.learner_ab [--size 1.5B] [--cases a,b+c] [--out FILE]`.

It loads a model once, and then switches changes on and off around the project's own `PolicyModel` and `PolicyLearner`
(rows, shapes and MFU are those of `benchmarks.gpu`). A case is names of `CHANGES` joined by `+`; `trees:` before it
takes groups of 8 with four times longer prompts, which share prefixes. The learning rate is 0, so all cases have the
same weights, and each one's answers for a few rows are compared with the baseline's and with fp32's. Each case is tried
by itself: what fails prints why. Every case is written to --out at once; --deadline starts no case after so many
seconds.

It needs neither Ray nor vLLM. `--quick` shows on a CPU that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks import gpu
from benchmarks.learner_changes import Skip, attributes
from benchmarks.learner_logits import CHANGES
from policies.learning.forward.prefix_tree import Paths
from policies.learning.policy_learner import PolicyLearner
from policies.learning.policy_model import PolicyModel
from policies.learning.rows import Rows, Scores
from policies.learning.sharding import transformer_blocks
from policies.models.lora import Lora

CASES = {
    "1.5B": "base,logprobs,compile,liger,compile+logprobs,casts+logprobs,liger+compile+logprobs,compile+logprobs+cudnn,"
    "compile+logprobs+every2,compile+logprobs+off,compile+logprobs+budget50,head,ligerhead,compile+head+residual,sac,"
    "align,trees:base,trees:flex,trees:compile+logprobs,trees:compile+logprobs+flex,compile+logprobs+flex",
    "": "base,compile+logprobs,compile+logprobs+every2,compile+head+residual",
}


class Bench:
    """A model, its learner, and the rows."""

    def __init__(self, o: argparse.Namespace, folder: Path, device: str) -> None:
        """Loads the model."""
        self.o, self.device, self.dtype = o, torch.device(device), torch.bfloat16
        self.backend = o.backend or ("inductor" if device == "cuda" else "aot_eager")
        self.config = gpu.config_of(o.size)
        self.chunk = max(2**29 // self.config.vocab_size, 8) if device == "cuda" else 16
        self.notes: list[str] = []
        lora = Lora(16, 32.0) if o.lora else None
        path = gpu.make_model(o.size, folder, device)
        self.model = PolicyModel(
            path,
            critic=False,
            dtype="bf16",
            device=device,
            lora=lora,
            gradient_checkpointing=True,
        ).to(device)
        settings = gpu.settings(gpu.Case(o.size, "lora" if o.lora else "full"), o, path, device)
        hyper = replace(settings.hyperparameters, lr=0.0, steps=1, clip_ratio=0.9, kl_coef=0.0)
        self.learner = PolicyLearner(self.model, hyper, name="llm_1")
        self.learner.check_forward(True)
        self.rows: dict[str, list[Rows]] = {}
        for kind, group in (("", 1), ("trees", o.group)):
            shape = argparse.Namespace(**vars(o))
            if group > 1:
                shape.prompt, shape.response = 4 * o.prompt, o.response // 2
            other = argparse.Namespace(
                **vars(shape) | {"prompt": shape.prompt * 7 // 8 - 1, "response": shape.response * 7 // 8 - 1}
            )
            few = argparse.Namespace(**vars(shape) | {"rows": max(4, group)})
            self.rows[kind] = [gpu.play(part, self.config.vocab_size, group) for part in (shape, other, few)]
        self.truth: dict[str, tuple[Tensor, list[Tensor]]] = {}
        self.baseline: dict[str, tuple[Tensor, list[Tensor]]] = {}

    def lms(self) -> list[Any]:
        """The policy's LM, and the reference's unless it is the same."""
        reference = self.model.reference()
        return [self.model.lm] + ([reference] if reference is not self.model.lm else [])

    def need_triton(self) -> None:
        """Raises Skip without Triton."""
        if self.device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
            raise Skip("needs Triton, so a GPU")

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the compiled function."""
        return torch.compile(function, dynamic=True, backend=self.backend)

    def reset(self) -> None:
        """Back to the product's way of keeping activations."""
        self.model.lm.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in transformer_blocks(self.model.lm):
            layer.__dict__.pop("gradient_checkpointing", None)
            layer.gradient_checkpointing = True  # type: ignore[assignment]
        self.notes.clear()

    def answers(self, kind: str, old: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Log-probabilities and gradients for the few rows, in the current way: on the CPU."""
        rows = self.rows[kind][2]
        paths = Paths(rows)
        packs = [
            pack for batch in paths.micro_batches(64, None, self.model.cost if kind else None)[0] for pack in batch
        ]
        index = paths.index(packs)
        moved = rows.select(index).to(self.device)
        self.model.eval()
        with torch.no_grad():
            logprobs = torch.zeros(rows.mask.shape, dtype=torch.float32)
            logprobs[index] = self.model(moved, paths.layout(packs).to(self.device))[0].float().cpu()
        torch.manual_seed(0)
        before = logprobs if old is None else old
        scored = replace(rows, sampler_logprobs=before).with_scores(Scores(before, torch.zeros_like(before)))
        ready = gpu.with_random_advantages(scored)
        self.model.train()
        totals = torch.zeros(len(self.learner._sum_names), dtype=torch.float64, device=self.device)
        self.learner._accumulate(ready, 0.0, totals)
        gradients = [p.grad.float().cpu() for p in self.learner.parameters if p.grad is not None]
        self.learner.optimizer.zero_grad(set_to_none=True)
        return logprobs, gradients

    def forward_difference(self) -> str:
        """Mean difference of log-probabilities in fp32 from the baseline's, in a tree and in plain rows."""
        rows, differences = self.rows["trees"][2], []
        self.model.eval()
        for cost in (self.model.cost, None):
            paths = Paths(rows)
            packs = [pack for batch in paths.micro_batches(64, None, cost)[0] for pack in batch]
            index = paths.index(packs)
            moved = rows.select(index).to(self.device)
            layout = paths.layout(packs).to(self.device)
            with torch.no_grad(), attributes((self.model, "_dtype", "fp32")):
                difference = (self.model(moved, layout)[0].float().cpu() - self.truth["trees"][0][index]).abs()
            differences.append(f"{float(difference[rows.mask[index].bool()].mean()):.1e}{' in a tree' * layout.shared}")
        return ", ".join(differences)

    def compare(self, kind: str) -> dict[str, Any]:
        """How far the current way is from the baseline's, and from fp32's beside how far the baseline is from it."""
        rows = self.rows[kind][2]
        mask = rows.mask.bool()
        if kind not in self.truth:  # with the baseline's code, before anything is switched
            self.model._dtype = "fp32"
            try:
                self.truth[kind] = self.answers(kind)
            finally:
                self.model._dtype = "bf16"
        answers = self.answers(kind, self.truth[kind][0])
        self.baseline.setdefault(kind, answers)

        def distance(
            one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]
        ) -> tuple[float, float, float]:
            difference = (one[0] - other[0]).abs()[mask]
            square = norm = 0.0
            for a, b in zip(one[1], other[1], strict=True):
                a, b = a.to(self.device), b.to(self.device)
                square, norm = square + float((a - b).square().sum()), norm + float(b.square().sum())
            return float(difference.mean()), float(difference.max()), (square / max(norm, 1e-30)) ** 0.5

        base, truth, baseline = (
            distance(answers, self.baseline[kind]),
            distance(answers, self.truth[kind]),
            distance(self.baseline[kind], self.truth[kind]),
        )
        return {
            "logprobs_to_base": base[:2],
            "gradient_to_base": base[2],
            "logprobs_to_fp32": truth[:2],
            "gradient_to_fp32": truth[2],
            "base_to_fp32": [baseline[0], baseline[2]],
        }

    def update(self, rows: Rows, number: int) -> tuple[float, float]:
        """Seconds to score and to learn."""
        device = self.device.type
        began = gpu.now(device)
        scores = self.learner.score(rows)
        between = gpu.now(device)
        ready = gpu.with_random_advantages(rows.with_scores(scores))
        middle = gpu.now(device)
        self.learner.update(ready, number)
        return between - began, gpu.now(device) - middle

    def measure(self, name: str, peak: float) -> dict[str, Any]:
        """One case."""
        kind, _, names = name.rpartition(":")
        began = time.perf_counter()
        self.reset()
        gpu.clear(self.device.type)
        counters = torch._dynamo.utils.counters
        counters.clear()
        self.learner.score(self.rows[kind][2])  # loads the reference before changes are made to it
        for needed in {kind, "trees"} if "flex" in names else {kind}:
            if needed not in self.baseline:
                self.compare(needed)
        with contextlib.ExitStack() as stack:
            for part in names.split("+"):
                stack.enter_context(CHANGES[part](self))
            compared = self.compare(kind)
            rows, other, _ = self.rows[kind]
            first = sum(self.update(rows, 0))
            gpu.clear(self.device.type)
            times = [self.update(rows, 1 + number) for number in range(self.o.updates)]
            memory = torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else 0.0
            otherwise = sum(self.update(other, 9))
            if self.o.profile and self.o.profile in name:
                self.profile(name, rows)
        score, learn = (min(column) for column in zip(*times, strict=True))
        mfu = gpu.operations(self.model, rows, self.config, "lora" if self.o.lora else "full") / learn / peak
        graphs, breaks = counters["stats"].get("unique_graphs", 0), sum(counters["graph_break"].values())
        line = (
            f"{self.o.size} {name:<34} score {score:6.3f} learn {learn:6.3f} s, MFU {mfu:6.1%}, {memory:6.1f} GB, "
            f"first {first:5.1f} s, other lengths {otherwise:5.2f} s; logp {compared['logprobs_to_base'][0]:.1e} mean "
            f"{compared['logprobs_to_base'][1]:.1e} max, grad {compared['gradient_to_base']:.1e} from base; from fp32 "
            f"{compared['logprobs_to_fp32'][0]:.1e}, {compared['gradient_to_fp32']:.1e} "
            f"(base {compared['base_to_fp32'][0]:.1e}, {compared['base_to_fp32'][1]:.1e}); {graphs} graphs, "
            f"{breaks} breaks{''.join('; ' + note for note in self.notes)} [{time.perf_counter() - began:.0f} s]"
        )
        return {
            "case": name,
            "size": self.o.size,
            "score": score,
            "learn": learn,
            "mfu": mfu,
            "gb": memory,
            "first": first,
            "other_lengths": otherwise,
            **compared,
            "graphs": graphs,
            "breaks": breaks,
            "notes": list(self.notes),
            "line": line,
        }

    def profile(self, name: str, rows: Rows) -> None:
        """Writes which kernels an update spends the GPU's time in."""
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        with profile(activities=kinds) as profiler:
            seconds = sum(self.update(rows, 10))
        averages = profiler.key_averages()
        table = averages.table(sort_by=f"self_{self.device.type}_time_total", row_limit=25, max_name_column_width=90)
        busy = sum(getattr(a, "self_device_time_total", 0) for a in averages) / 1e6
        text = f"{name}: an update of {seconds:.3f} s with the profiler on, {busy:.3f} s of kernels\n{table}\n"
        path = (
            self.o.out.parent if self.o.out else Path(tempfile.gettempdir())
        ) / f"profile-{name.replace(':', '-').replace('+', '-')}.txt"
        path.write_text(text)


def main() -> None:
    """Measures the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shape; also on a CPU")
    parser.add_argument("--size", choices=gpu.SHAPES, default="1.5B")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--cases", default="", help=f"comma-separated; of {', '.join(CHANGES)}")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--group", type=int, default=8, help="of cases with trees:")
    parser.add_argument("--micro-batch-size", type=int, default=32)
    parser.add_argument("--updates", type=int, default=2, help="of which the faster counts")
    parser.add_argument("--deadline", type=float, default=500.0, help="seconds after which no case is started")
    parser.add_argument("--backend", default="", help="of torch.compile")
    parser.add_argument("--profile", default="", help="profile the cases whose names hold this")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "models")
    parser.add_argument("--out", type=Path)
    o = parser.parse_args()
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not o.quick:
        parser.error("There is no GPU here. --quick shows that the script runs.")
    if o.quick:
        o.size, o.rows, o.prompt, o.response, o.micro_batch_size, o.updates, o.group = "tiny", 8, 12, 16, 4, 1, 4
    cases = (o.cases or CASES["1.5B" if o.quick else o.size if o.size in CASES else ""]).split(",")
    achieved = gpu.product_speed(device, 512 if o.quick else 8192)
    peak = next(
        (speed for name, speed in gpu.PEAKS.items() if device == "cuda" and name in torch.cuda.get_device_name()),
        achieved,
    )
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}, transformers {transformers.__version__}; "
        f"products reach {achieved / peak:.0%} of {peak / 1e12:.4g} T",
        flush=True,
    )
    o.folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(o, o.folder, device)
    print(
        f"loaded after {time.perf_counter() - began:.0f} s; prefixes are shared: {bench.model.cost is not None}",
        flush=True,
    )
    results = []
    for case in cases:
        if time.perf_counter() - began > o.deadline:
            results.append({"case": case, "line": f"{o.size} {case:<34} not started: --deadline"})
        else:
            try:
                results.append(bench.measure(case, peak))
            except Skip as reason:
                results.append({"case": case, "line": f"{o.size} {case:<34} skipped: {reason}"})
            except torch.OutOfMemoryError as error:
                results.append(
                    {"case": case, "line": f"{o.size} {case:<34} out of memory: {str(error).splitlines()[0][:160]}"}
                )
            except Exception as error:
                text = traceback.format_exception(error)
                last = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                results.append({"case": case, "error": text, "line": f"{o.size} {case:<34} failed: {last}"})
        bench.learner.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        print(results[-1]["line"], flush=True)
        if o.out:
            o.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
