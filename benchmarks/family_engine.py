"""Compares vLLM's engine, in its own process, with the learner on a small model."""

from __future__ import annotations

import multiprocessing
import re
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

PROMPTS = [[5, 6, 7], [8], list(range(9, 40))]
LONGEST_PROMPT, LONGEST_RESPONSE = 40, 8
LORA = {"weights": "lora", "lora_rank": 4}
FORK = multiprocessing.get_context("fork")


def engine_figures(path: str, layers: Sequence[str]) -> dict[str, Any]:
    """Measures vLLM on a model, with full weights and with an adapter."""
    figures: dict[str, Any] = {}
    engine = EngineProcess()
    try:
        part: dict[str, Any] = {}
        figures = record_error("error", lambda: follow(engine, path, {}, part)) | part
        if not engine.alive():
            engine = EngineProcess()
        if "model" in figures:
            part = {}
            lora_result = record_error("error", lambda: follow(engine, path, LORA, part)) | part
            if "error" in lora_result and "model" in lora_result:  # the engine runs, so some layers may be to blame
                part = {}
                barred = barred_layers(engine, path, layers)
                usable = {**LORA, "lora_target_modules": ",".join(name for name in layers if name not in barred)}
                if barred and usable["lora_target_modules"]:
                    lora_result = record_error("error", lambda: follow(engine, path, usable, part)) | part
                    lora_result["barred"] = barred
            figures |= {f"lora_{name}": value for name, value in lora_result.items() if name != "model"}
        return figures
    finally:
        engine.end()


def record_error(key: str, measurement: Any) -> dict[str, Any]:
    """Returns the figures of a measurement or, if it fails, the error under `key`."""
    try:
        figures: dict[str, Any] = measurement()
        return figures
    except Exception as error:
        traceback.print_exc()
        return {key: _in_short(error)}


def _in_short(error: Exception) -> str:
    """Returns an error's message without parts that depend on this sweep or on memory."""
    text = str(error) if isinstance(error, EngineFailure) else f"{type(error).__name__}: {error}"
    text = re.sub(r"EngineStartError: vLLM could not start an engine for `[^`]*`: ", "", " ".join(text.split()))
    # vLLM lists all that it knows, and pydantic what it was given.
    text = re.sub(r" (If it ran out of memory|Supported architectures:|\[type=).*", "", text)
    return text.rstrip(".,")[:400]


def make_learner(path: str, settings: Mapping[str, Any]) -> Any:
    """One LLM as a learner holds it."""
    from policies.learning.policy_model import PolicyModel
    from policies.models.model_names import model_path
    from policies.rllib.causal_lm_module import module_config
    from policies.settings.files import read_preset
    from policies.settings.settings import make_settings

    config = module_config(make_settings({**read_preset("paper"), "model": path, "dtype": "fp32", **settings}), "llm_1")
    return PolicyModel(model_path(config.pop("model")), **config)


def moved(learner: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the learner's weights, and others far from them, which it loads."""
    from policies.sync_check import perturb

    old = learner.state()
    new = perturb(old, seed=1, noise=0.5)
    learner.load(new)
    return old, new


class EngineFailure(Exception):
    """The error of an engine or its process."""


class EngineProcess:
    """A process in which vLLM runs, apart from the learner: vLLM changes classes of transformers in its process."""

    def __init__(self) -> None:
        self._connection, other = FORK.Pipe()
        self._process = FORK.Process(target=engine_process, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def ask(self, *question: Any) -> Any:
        """Returns its answer.

        Raises:
            EngineFailure: the engine failed.
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
        """Whether the process is alive."""
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
        EngineFailure: the engine's process failed.
    """
    from policies.models.weights import checksum
    from policies.settings.files import read_preset
    from policies.settings.settings import make_settings

    def load(state: Mapping[str, Any]) -> Any:
        weights = {name.removeprefix("lm."): array for name, array in state.items() if name.startswith("lm.")}
        loaded = engine.ask("load", weights)
        if loaded.checksum != checksum(weights):
            raise EngineFailure("The engine read other weights than were sent.")
        return loaded

    lora = make_settings({**read_preset("paper"), **settings}).lora
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
        settings = {**LORA, "lora_target_modules": name}
        figures = record_error("error", lambda: follow(engine, path, settings, part)) | part  # noqa: B023 (called at once)
        if "error" in figures:
            barred[name] = figures["error"]
        elif figures["after"] > 1e-3:
            barred[name] = f"log-probabilities are off by {figures['after']:.2g} nats"
    return barred


def _gap(learner: Any, responses: Sequence[Any]) -> float:
    from policies.learning.rows import make_rows

    none = [0.0] * len(responses)
    tokens, logprobs = [response.tokens for response in responses], [response.logprobs for response in responses]
    rows = make_rows(PROMPTS, tokens, logprobs, none, [False] * len(responses))
    difference = (learner.score(rows).logprobs - rows.sampler_logprobs).abs() * rows.mask
    return float(f"{float(difference.max()):.1e}")


def engine_process(connection: Connection) -> None:
    """What runs in the engine's process: answers until the other end is closed."""
    import torch

    from policies.generation.generator import Sampling
    from policies.generation.vllm_generator import VLLMGenerator

    torch.set_num_threads(1)
    lengths: dict[str, Any] = {
        "max_prompt_tokens": LONGEST_PROMPT,
        "max_response_tokens": LONGEST_RESPONSE,
        "max_sequences": 4,
    }
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
