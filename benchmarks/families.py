"""The sweep behind the table of model families (`policies/models/families.json`), over tiny random models.

    python -m benchmarks.families                  # all that are not in the table for the installed versions
    python -m benchmarks.families olmoe mixtral    # these, again
    python -m benchmarks.families --learner-only doge

Each family has a process of its own with a time limit, and the table is written after each: a crash costs one family.
Measured are, as the largest difference of a response token's log-probability in nats, fp32 on a CPU:

- rows of unequal prompts in one batch, against each row alone (`padding`);
- the attention that transformers chooses, against eager (`attention_difference`);
- an exported model, loaded again, against the policy (`export`; with adapters merged `lora_export`);
- vLLM's sampler against the learner, at first (`before`), and after an update was loaded (`after`, and `stale`, which
  would be the difference had the engine kept the old weights); with LoRA `lora_before` and `lora_after`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
"""A family's time."""
LORA = {"weights": "lora", "lora_rank": 4}
PROMPTS = [[5, 6, 7], [8], list(range(9, 40))]
LONGEST_PROMPT, LONGEST_RESPONSE = 40, 8
_FORK = multiprocessing.get_context("fork")


def main() -> int:
    """Runs the sweep; 0, or 1 if a family could not be built."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("families", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--learner-only", action="store_true", help="leave vLLM out, and keep what is known of it")
    parser.add_argument("--at-most", type=int, default=10_000, metavar="N", help="of those that are not in the table")
    options = parser.parse_args()
    table = read_table()
    todo = options.families or [name for name in FAMILIES if name not in table["families"]][: options.at_most]
    failed = 0
    if todo:
        _import_all()
    for name in todo:
        row = _in_own_process(name, options.learner_only)
        failed += "error" in row
        table = read_table()  # another sweep may have written meanwhile
        if options.learner_only and "vllm" in table["families"].get(name, {}):
            row["vllm"] = table["families"][name]["vllm"]
        table["families"][name] = row
        write_table(table)
        print(f"{name}: {json.dumps(row)}", flush=True)
    return int(failed > 0)


def installed_versions() -> dict[str, str | None]:
    """What the figures depend on."""
    from policies.models.families import installed_version

    return {package: installed_version(package) for package in PACKAGES}


def read_table() -> dict[str, Any]:
    """The table so far; of other versions nothing is kept."""
    empty: dict[str, Any] = {"versions": installed_versions(), "families": {}}
    if not TABLE.is_file():
        return empty
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table if table["versions"] == empty["versions"] else empty


def write_table(table: Mapping[str, Any]) -> None:
    """Writes it, a line for each family."""
    rows = sorted(table["families"].items())
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in rows)
    text = f'{{"versions": {json.dumps(table["versions"])},\n "device": "cpu",\n "families": {{\n{lines}\n }}}}\n'
    beside = TABLE.with_name(f".{TABLE.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(TABLE)


def _in_own_process(name: str, learner_only: bool) -> dict[str, Any]:
    """Measures a family in a process that has this one's imports, which take longer than all else."""
    with tempfile.NamedTemporaryFile("w+") as log, tempfile.NamedTemporaryFile("w+") as row:
        process = _FORK.Process(target=_measure_into, args=(name, not learner_only, row.name, log.name))
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
    found: dict[str, Any] = json.loads(text)
    return found


def _measure_into(name: str, engine: bool, row: str, log: str) -> None:
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    Path(row).write_text(json.dumps(measure(name, engine)), encoding="utf-8")


def _import_all() -> None:
    for module in ("launch.models.exported", "launch.models.weight_files", "policies.rllib.causal_lm_module", "peft"):
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

    from policies.models.adapters import linear_layers
    from policies.models.tiny import attention_difference, needed_attention, padding_difference, tiny_model

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    config = CONFIG_MAPPING[name]()
    model = tiny_model(config)
    row: dict[str, Any] = {"class": type(model).__name__, "attention": needed_attention(model.config)}
    row["padding"] = _rounded(padding_difference(model))
    row["attention_difference"] = _rounded(attention_difference(config))
    row["lora_layers"] = linear_layers(model)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model"
        model.config.bos_token_id = model.config.eos_token_id = 0
        model.generation_config.eos_token_id = 0
        model.save_pretrained(path)
        row |= _noting("export", lambda: {"export": export_difference(path, {}, f"{folder}/full")})
        row |= _noting("lora", lambda: {"lora_export": export_difference(path, LORA, f"{folder}/lora")})
        if engine:
            row["vllm"] = engine_figures(path, row["lora_layers"])
    return row


def engine_figures(path: str, layers: Sequence[str]) -> dict[str, Any]:
    """What vLLM makes of a model, with all weights of its own and with an adapter."""
    figures: dict[str, Any] = {}
    engine = EngineProcess()
    try:
        part: dict[str, Any] = {}
        figures = _noting("error", lambda: follow(engine, path, {}, part)) | part
        if not engine.alive():
            engine = EngineProcess()
        if "model" in figures:
            part = {}
            of_lora = _noting("error", lambda: follow(engine, path, LORA, part)) | part
            if "error" in of_lora and "model" in of_lora:  # the engine runs, so some layers may be to blame
                part = {}
                barred = barred_layers(engine, path, layers)
                usable = {**LORA, "lora_targets": ",".join(name for name in layers if name not in barred)}
                if barred and usable["lora_targets"]:
                    of_lora = _noting("error", lambda: follow(engine, path, usable, part)) | part
                    of_lora["barred"] = barred
            figures |= {f"lora_{name}": value for name, value in of_lora.items() if name != "model"}
        return figures
    finally:
        engine.end()


def _noting(key: str, measurement: Any) -> dict[str, Any]:
    try:
        figures: dict[str, Any] = measurement()
        return figures
    except Exception as error:
        traceback.print_exc()
        return {key: _in_short(error)}


def _in_short(error: Exception) -> str:
    """What an error says, without what belongs to this sweep, or to memory."""
    text = str(error) if isinstance(error, EngineFailure) else f"{type(error).__name__}: {error}"
    text = re.sub(r"EngineStartError: vLLM could not start an engine for `[^`]*`: ", "", " ".join(text.split()))
    # vLLM lists all that it knows, and pydantic what it was given.
    text = re.sub(r" (If memory is short|Supported architectures:|\[type=).*", "", text)
    return text.rstrip(".,")[:400]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.1e}")


def make_learner(path: str, settings: Mapping[str, Any]) -> Any:
    """One LLM as a learner holds it."""
    from policies.learning.policy_model import PolicyModel
    from policies.rllib.causal_lm_module import module_config
    from policies.settings.settings import make_settings

    config = module_config(make_settings({"model": path, "dtype": "fp32", **settings}), "llm_1")
    return PolicyModel(config.pop("model"), **config)


def moved(learner: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The learner's weights, and others far from them, which it then has."""
    from policies.self_test import perturb

    old = learner.state()
    new = perturb(old, seed=1, noise=0.5)
    learner.load(new)
    return old, new


def export_difference(path: str, settings: Mapping[str, Any], folder: str) -> float:
    """Writes a policy that is far from its base as `cory export` does, loads it, and compares the two."""
    from launch.models.exported import whole_model
    from launch.models.trained import Trained
    from launch.models.weight_files import write_weights
    from policies.learning.rows import make_rows
    from policies.settings.settings import make_settings

    learner = make_learner(path, settings)
    moved(learner)

    class Policy(Trained):
        place = name = origin = "the sweep"

        def _weights(self, llm: str) -> Any:
            state = learner.state()
            return {name.removeprefix("lm."): state[name] for name in state if name.startswith("lm.")}

    trained = Policy()
    trained.settings = make_settings({"model": path, "dtype": "fp32", **settings})
    trained.update, trained.lines = 1, []
    model, tensors = whole_model(trained, "llm_1")
    os.makedirs(folder)
    model.save_pretrained(folder, state_dict={})
    write_weights(model, tensors, Path(folder))
    answers = [[17, 31, 90, 2], [44], [3, 3, 8, 9, 120, 64]]
    rows = make_rows(PROMPTS, answers, [[0.0] * len(each) for each in answers], [0.0] * 3, [False] * 3)
    again = make_learner(folder, {}).score(rows)["logprobs"]
    return float(f"{((learner.score(rows)['logprobs'] - again).abs() * rows['mask']).max():.1e}")


class EngineFailure(Exception):
    """What an engine, or its process, failed with."""


class EngineProcess:
    """A process in which vLLM runs, apart from the learner: vLLM changes classes of transformers in its process."""

    def __init__(self) -> None:
        self._connection, other = _FORK.Pipe()
        self._process = _FORK.Process(target=engine_process, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def ask(self, *question: Any) -> Any:
        """Returns its answer.

        Raises:
            EngineFailure: what it said.
        """
        try:
            self._connection.send(question)
            ok, answer = self._connection.recv()
        except (EOFError, OSError):
            raise EngineFailure("vLLM's process died") from None
        if not ok:
            raise EngineFailure(answer)
        return answer

    def alive(self) -> bool:
        """Tells whether it can be asked."""
        return self._process.is_alive()

    def end(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.join()


def follow(engine: EngineProcess, path: str, settings: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Starts an engine, and compares its log-probabilities with the learner's before and after an update.

    Args:
        engine: where it starts.
        path: the model.
        settings: `LORA`, or nothing.
        result: gets the figures one by one, so that those before an error are known.

    Raises:
        EngineFailure: what the engine's process said.
    """
    from policies.models.weights import checksum
    from policies.settings.settings import make_settings

    def load(state: Mapping[str, Any]) -> Any:
        weights = {name.removeprefix("lm."): array for name, array in state.items() if name.startswith("lm.")}
        loaded = engine.ask("load", weights)
        if loaded.checksum != checksum(weights):
            raise EngineFailure("The engine read other weights than were sent.")
        return loaded

    lora = make_settings(settings).lora
    result["model"] = engine.ask("start", path, lora)
    learner = make_learner(path, settings)
    if lora is not None:
        load(learner.state())
    result["before"] = _gap(learner, engine.ask("generate"))
    old, new = moved(learner)
    if stale := load(new).stale:
        result["not_loaded"] = list(stale)
    responses = engine.ask("generate")
    result["after"] = _gap(learner, responses)
    learner.load(old)
    result["stale"] = _gap(learner, responses)
    return result


def barred_layers(engine: EngineProcess, path: str, layers: Sequence[str]) -> dict[str, str]:
    """Tries an adapter on each kind of layer alone, and returns those that vLLM cannot adapt, and why."""
    barred = {}
    for name in layers:
        part: dict[str, Any] = {}
        settings = {**LORA, "lora_targets": name}
        figures = _noting("error", lambda: follow(engine, path, settings, part)) | part  # noqa: B023 (called at once)
        if "error" in figures:
            barred[name] = figures["error"]
        elif figures["after"] > 1e-3:
            barred[name] = f"log-probabilities are off by {figures['after']:.2g} nats"
    return barred


def _gap(learner: Any, responses: Sequence[Any]) -> float:
    from policies.learning.rows import make_rows

    none = [0.0] * len(responses)
    tokens, logprobs = [each.tokens for each in responses], [each.logprobs for each in responses]
    rows = make_rows(PROMPTS, tokens, logprobs, none, [False] * len(responses))
    difference = (learner.score(rows)["logprobs"] - rows["sampler_logprobs"]).abs() * rows["mask"]
    return float(f"{float(difference.max()):.1e}")


def engine_process(connection: Connection) -> None:
    """What runs in the engine's process: answers until the other end is closed."""
    import torch

    from policies.generation.generator import Sampling
    from policies.generation.vllm_generator import VLLMGenerator

    torch.set_num_threads(1)
    lengths: dict[str, Any] = {"max_prompt": LONGEST_PROMPT, "max_response": LONGEST_RESPONSE, "max_sequences": 4}
    generator: Any = None
    while True:
        try:
            question, *arguments = connection.recv()
        except EOFError:
            return
        answer: Any
        try:
            if question == "start":
                path, lora = arguments
                if generator is None or lora is None or generator.lora is None:  # layers are an adapter's own
                    if generator is not None:
                        generator.close()
                    generator = VLLMGenerator(
                        {"llm_1": path}, dtype="fp32", device=torch.device("cpu"), lora=lora, **lengths
                    )
                (engine,) = generator.engines.values()
                (answer,) = engine.collective_rpc(_model_class)
            elif question == "load":
                answer = generator.load("llm_1", arguments[0], 1)
            else:
                answer = generator.generate(PROMPTS, "llm_1", Sampling(1.0, LONGEST_RESPONSE, range(3), [0]))
            connection.send((True, answer))
        except Exception as error:
            traceback.print_exc()
            connection.send((False, f"{type(error).__name__}: {' '.join(str(error).split())}"))


def _model_class(worker: Any) -> str:
    return type(worker.model_runner.get_model()).__name__


if __name__ == "__main__":
    sys.exit(main())
