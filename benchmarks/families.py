"""The sweep behind the table of model families (`policies/models/families.json`), over tiny random models.

    python -m benchmarks.families                  # all that are not in the table for the installed versions
    python -m benchmarks.families olmoe mixtral    # these, again
    python -m benchmarks.families --learner-only doge

Each family runs in a separate process with a time limit. The table is written after each, so a crash costs one family.
Measured are, as the largest difference of a response token's log-probability in nats, fp32 on a CPU:

- rows of unequal prompts in one batch, against each row alone (`padding`);
- the attention that transformers chooses, against eager (`attention_difference`);
- rows in a prefix tree, against plain rows (`prefix_tree`; null: the family's code does not take a tree);
- an exported model, loaded again, against the policy (`export`; with adapters merged `lora_export`);
- vLLM's sampler against the learner, at first (`before`), and after an update was loaded (`after`, and `stale`, which
  would be the difference had the engine kept the old weights); with LoRA `lora_before` and `lora_after`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.family_engine import FORK, LORA, PROMPTS, engine_figures, make_learner, moved, record_error

TABLE = Path(__file__).parents[1] / "policies" / "models" / "families.json"
FAMILIES: tuple[str, ...] = (
    *("olmoe", "qwen3_moe", "gpt_oss", "apertus", "mixtral", "gpt_neox", "smollm3", "olmo2", "falcon", "glm4"),
    *("phimoe", "falcon_h1", "gemma2", "vaultgemma", "rwkv", "recurrent_gemma", "opt", "gpt2", "qwen2", "qwen3"),
    *("llama", "mistral", "gemma", "gemma3_text", "phi", "phi3", "olmo", "olmo3", "granite", "cohere", "cohere2"),
    *("glm", "stablelm", "starcoder2", "gpt_bigcode", "exaone4", "nemotron", "seed_oss", "qwen2_moe", "mamba"),
    *("gpt_neo", "gptj", "bloom", "mpt", "granitemoe", "ernie4_5", "hunyuan_v1_dense", "arcee", "lfm2", "helium"),
    *("minicpm3", "deepseek_v3", "glm4_moe", "ministral", "codegen", "xglm", "bamba", "granitemoehybrid"),
    *("jamba", "mamba2", "qwen3_next", "doge", "biogpt"),
)
"""By `model_type`, the most used first."""
PACKAGES = ("transformers", "vllm", "torch", "peft")
SECONDS = 420
"""Time limit of a family."""


def main() -> int:
    """Runs the sweep; 0, or 1 if a family could not be built."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("families", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--learner-only", action="store_true", help="leave vLLM out, and keep its previous figures")
    parser.add_argument("--at-most", type=int, default=10_000, metavar="N", help="of those that are not in the table")
    options = parser.parse_args()
    table = read_table()
    todo = options.families or [name for name in FAMILIES if name not in table["families"]][: options.at_most]
    failed = 0
    if todo:
        _import_all()
    for name in todo:
        table = read_table()  # another sweep may have written meanwhile
        previous = table["families"].pop(name, {})
        write_table(table)  # measurements must not depend on earlier entries
        row = _in_own_process(name, options.learner_only)
        failed += "error" in row
        if options.learner_only and "vllm" in previous:
            row["vllm"] = previous["vllm"]
        table = read_table()
        table["families"][name] = row
        write_table(table)
        print(f"{name}: {json.dumps(row)}", flush=True)
    return int(failed > 0)


def installed_versions() -> dict[str, str | None]:
    """Everything that the figures depend on."""
    return {package: _installed_version(package) for package in PACKAGES}


def _installed_version(package: str) -> str | None:
    """A package's version, without the name of its build; vLLM's build for CPUs is a package of another name."""
    for name in (package, f"{package}-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def read_table() -> dict[str, Any]:
    """The table so far; entries of other versions are dropped."""
    empty: dict[str, Any] = {"versions": installed_versions(), "families": {}}
    if not TABLE.is_file():
        return empty
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table if table["versions"] == empty["versions"] else empty


def write_table(table: Mapping[str, Any]) -> None:
    """Writes the table, a line for each family."""
    rows = sorted(table["families"].items())
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in rows)
    text = f'{{"versions": {json.dumps(table["versions"])},\n "device": "cpu",\n "families": {{\n{lines}\n }}}}\n'
    beside = TABLE.with_name(f".{TABLE.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(TABLE)


def _in_own_process(name: str, learner_only: bool) -> dict[str, Any]:
    """Measures a family in a process that has this one's imports, which take longer than all else."""
    with tempfile.NamedTemporaryFile("w+") as log, tempfile.NamedTemporaryFile("w+") as row:
        process = FORK.Process(target=_measure_into, args=(name, not learner_only, row.name, log.name))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        text = row.read()
        if not text:
            print(log.read()[-3000:], file=sys.stderr)
            log.seek(0)
            return {"error": f"exit code {process.exitcode}: {_last(log.read())}"}
    table: dict[str, Any] = json.loads(text)
    return table


def _measure_into(name: str, engine: bool, row: str, log: str) -> None:
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    Path(row).write_text(json.dumps(measure(name, engine)), encoding="utf-8")


def _import_all() -> None:
    for module in ("launch.models.export", "policies.rllib.causal_lm_module", "peft"):
        importlib.import_module(module)
    for module in ("entrypoints.llm", "v1.engine.core", "v1.worker.cpu_worker", "model_executor.models.transformers"):
        importlib.import_module(f"vllm.{module}")


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def measure(name: str, engine: bool) -> dict[str, Any]:
    """Measures one family, in this process, with engines in another."""
    import torch
    import transformers
    from transformers import CONFIG_MAPPING

    from benchmarks.tiny_models import attention_difference, padding_difference, tiny_model
    from policies.models.adapters import linear_layers
    from policies.models.families import LOGPROB_TOLERANCE, has_soft_cap

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    config = CONFIG_MAPPING[name]()
    model = tiny_model(config)
    row: dict[str, Any] = {"class": type(model).__name__, "padding": _rounded(padding_difference(model))}
    difference = row["attention_difference"] = _rounded(attention_difference(config))
    eager = has_soft_cap(model.config) or (difference is not None and not difference < LOGPROB_TOLERANCE)
    row["attention"] = "eager" if eager else None
    row["lora_layers"] = linear_layers(model)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model"
        model.config.bos_token_id = model.config.eos_token_id = 0
        model.generation_config.eos_token_id = 0
        model.save_pretrained(path)
        row["prefix_tree"] = tree_difference(path)
        row |= record_error("export", lambda: {"export": export_difference(path, {}, f"{folder}/full")})
        row |= record_error("lora", lambda: {"lora_export": export_difference(path, LORA, f"{folder}/lora")})
        if engine:
            row["vllm"] = engine_figures(path, row["lora_layers"])
    return row


def tree_difference(path: str) -> float | None:
    """The difference within a prefix tree, with rows within the window if all layers have one."""
    from policies.learning.forward import checks
    from policies.learning.policy_model import PolicyModel

    model = PolicyModel(path, critic=False, dtype="fp32")
    config = model.lm.config
    if getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None):
        config.sliding_window = 64
    difference = checks.tree_difference(lambda *tree: model(*tree)[0], config.vocab_size, model.device)
    return _rounded(difference) if math.isfinite(difference) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.1e}")


def export_difference(path: str, settings: Mapping[str, Any], folder: str) -> float:
    """Writes a policy that is far from its base as `cory export` does, loads it, and compares the two."""
    import torch

    from launch.models.export import full_model
    from launch.models.trained import PolicySet
    from policies.learning.rows import make_rows
    from policies.settings.files import read_preset
    from policies.settings.settings import make_settings

    learner = make_learner(path, settings)
    moved(learner)

    def read(policy_id: str) -> Any:
        state = learner.state()
        return {name.removeprefix("lm."): state[name] for name in state if name.startswith("lm.")}

    chosen = make_settings({**read_preset("paper"), "model": path, "dtype": "fp32", **settings})
    trained = PolicySet(chosen, 1, [], ("llm_1",), "the sweep", "the sweep", "the sweep", read)
    full_model(trained, "llm_1", torch.float32).save_pretrained(folder)
    answers = [[17, 31, 90, 2], [44], [3, 3, 8, 9, 120, 64]]
    rows = make_rows(PROMPTS, answers, [[0.0] * len(tokens) for tokens in answers], [0.0] * 3, [False] * 3)
    again = make_learner(folder, {}).score(rows).logprobs
    return float(f"{((learner.score(rows).logprobs - again).abs() * rows.mask).max():.1e}")


if __name__ == "__main__":
    sys.exit(main())
