"""Generation with vLLM: one engine per LLM, or one for all adapters; weights handed over through memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from cory_env.shadowing import own_packages_first
from policies.compat.vllm import classes_kept, is_dead, kill, share_groups, threads_kept, wake_callers
from policies.generation import vllm_device, vllm_lora
from policies.generation.generator import GenerationError, LoadedWeights, OnFinished, Request, Response, Sampling
from policies.models.language_model import compute_dtype
from policies.models.lora import Lora
from policies.models.model_check import ModelError, head_width, key_value_heads, load_config
from policies.models.weights import Weights, in_shared_memory

if TYPE_CHECKING:
    from vllm import LLM

BLOCK_TOKENS = 32
"""Of a CPU engine's KV cache; of vLLM's own choice, 128, short contexts leave most empty."""
_STEP_TOKENS = 4096  # prompt tokens that an engine takes in one step
_POLL_SECONDS = 0.25
_DEATH_SECONDS = 10.0
"""An engine that loses a worker first says that the present call failed, and dies then; it takes at most so long."""
_SHARED = "all adapters"  # the name of the engine that serves them


class EngineStartError(RuntimeError):
    """A generation engine cannot start; the message says why, and what to lower."""


class VLLMGenerator:
    """One vLLM engine per LLM; where the LLMs are adapters, one engine for them all.

    In-process engines start in seconds. With `in_process=False` every engine is a process of its own, watched: one that
    is killed would make its caller wait for ever, so its death, or a wait beyond `timeout`, ends in a
    `GenerationError`, a new engine and the last weights.
    """

    def __init__(
        self,
        models: Mapping[str, str],
        *,
        dtype: str,
        device: torch.device,
        max_prompt_tokens: int,
        max_response_tokens: int,
        max_sequences: int,
        seed: int = 0,
        trust_remote_code: bool = False,
        lora: Lora | None = None,
        gpu_share: float = 1.0,
        tensor_parallel_size: int = 1,
        in_process: bool = True,
        timeout: float = 600.0,
        weight_transfer: str | None = None,
    ) -> None:
        """Starts the engines, with the initial weights.

        Args:
            models: by LLM, the folder or hub id of its model; where there are adapters, the same for all.
            dtype: `auto`, `bf16` or `fp32`.
            device: where to run.
            max_prompt_tokens, max_response_tokens: tokens; together the context length.
            max_sequences: responses generated at once.
            seed: vLLM's own seed; responses depend on `Sampling.seeds` alone.
            trust_remote_code: run code that comes with the model.
            lora: what the adapters are like; None: every LLM has all weights of its own.
            gpu_share: on CUDA, the part of a GPU that is this runner's; the engines share 90 % of it evenly, and take
                what they need of that.
            tensor_parallel_size: devices that each engine's model is split over, the first ones of this process. Their
                workers are processes, so that such an engine is never in-process.
            in_process: run the engines in this process.
            timeout: longest wait for an engine's next response, or for one `load`, in seconds (own processes only;
                in-process, the caller watches).
            weight_transfer: vLLM's backend by which `transfer` takes weights; None: only `load` does.

        Raises:
            DeviceError: the installed vLLM cannot generate on that device.
            EngineStartError: an engine cannot start there, or not with so much memory.
        """
        vllm_device.check_device(device, dtype, lora)
        self.device = device
        self.in_process = in_process and tensor_parallel_size == 1
        self.tensor_parallel_size = tensor_parallel_size
        self.timeout = timeout
        self.lora = lora
        self.policy_ids = list(models)
        self._paths = dict(models) if lora is None else {_SHARED: models[self.policy_ids[0]]}
        """By engine."""
        self._caches: dict[str, int] = {}
        """The bytes of each engine's KV cache on each of its devices; vLLM chooses those that are missing."""
        self._weights: dict[str, tuple[Weights, int]] = {}
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if self.in_process else "1"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # It would be imported, and never used: requests have seeds, and ask for processed log-probabilities.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        self._arguments: dict[str, Any] = {
            "dtype": "bfloat16" if compute_dtype(dtype, device) == torch.bfloat16 else "float32",
            "seed": seed,
            "trust_remote_code": trust_remote_code,
            "max_model_len": max_prompt_tokens + max_response_tokens,
            "max_num_seqs": max_sequences,
            "max_num_batched_tokens": max(_STEP_TOKENS, max_prompt_tokens + max_response_tokens),
            "logprobs_mode": "processed_logprobs",  # with the temperature in it
            "generation_config": "vllm",  # the model's own would bring penalties and other stop tokens
            "skip_tokenizer_init": True,
            "worker_extension_cls": "policies.generation.vllm_worker.WeightSync",
            "disable_log_stats": True,
        }
        if weight_transfer is not None:
            self._arguments["weight_transfer_config"] = {"backend": weight_transfer}
        if tensor_parallel_size > 1:
            self._arguments["tensor_parallel_size"] = tensor_parallel_size
            # Inside a Ray actor vLLM may choose Ray, whose workers would want GPUs beside those of the runner.
            self._arguments["distributed_executor_backend"] = "policies.generation.vllm_executor.OwnedExecutor"
        if lora is not None:
            self._arguments |= vllm_lora.engine_arguments(lora, len(models))
        for name, path in self._paths.items():
            self._caches[name] = self._cache_bytes(path, max_sequences, trust_remote_code)
        if device.type == "cuda":
            share = vllm_device.GPU_SHARE * min(gpu_share, 1.0) / len(self._paths)
            self._arguments["gpu_memory_utilization"] = share
            size = (2 if self._arguments["dtype"] == "bfloat16" else 4) / tensor_parallel_size
            for name, path in self._paths.items():
                if not vllm_device.cache_fits(path, trust_remote_code, self._caches[name], size, share):
                    del self._caches[name]
        else:
            self._arguments |= vllm_device.cpu_arguments(tensor_parallel_size)
            self._arguments["block_size"] = BLOCK_TOKENS
            self._check_memory(sum(self._caches.values()) * tensor_parallel_size, max_sequences)
        self.engines: dict[str, LLM] = {name: self._start(name) for name in self._paths}

    def _start(self, name: str) -> LLM:
        """Starts an engine.

        Raises:
            EngineStartError: vLLM could not.
        """
        from vllm import LLM

        kept = classes_kept() if self._arguments.get("enforce_eager") else nullcontext()
        what = f"start an engine for `{self._paths[name]}`"
        with vllm_device.explained(what, EngineStartError, self.device), threads_kept(), kept, own_packages_first():
            engine = LLM(self._paths[name], kv_cache_memory_bytes=self._caches.get(name), **self._arguments)
        if self.in_process:
            share_groups(engine)
        return engine

    def _cache_bytes(self, path: str, max_sequences: int, trust_remote_code: bool) -> int:
        """KV cache of each of an engine's devices for `max_sequences` full contexts; by default an engine asks for most
        of the memory that there is.
        """
        config = load_config(path, trust_remote_code).get_text_config()
        width = head_width(config)
        heads = max(key_value_heads(config) // self.tensor_parallel_size, 1)
        size = 2 if self._arguments["dtype"] == "bfloat16" else 4
        blocks = max_sequences * -(-int(self._arguments["max_model_len"]) // BLOCK_TOKENS) + 16
        return int(blocks * BLOCK_TOKENS * 2 * config.num_hidden_layers * heads * width * size)

    def _check_memory(self, needed: int, max_sequences: int) -> None:
        """Refuses KV caches beyond the free memory: the system would grant them, and kill the process in mid-run.

        Raises:
            EngineStartError: they do not fit.
        """
        import psutil  # which vLLM brings

        free = psutil.virtual_memory().available
        if needed > free:
            raise EngineStartError(
                f"vLLM needs {needed / 2**30:.1f} GiB for the KV caches of this runner's engines ({max_sequences} "
                f"responses at once, {self._arguments['max_model_len']} tokens each), but {free / 2**30:.1f} GiB of "
                f"memory are free. {vllm_device.memory_advice(self.device).capitalize()}."
            )

    def generate(self, prompts: Sequence[Sequence[int]], policy_id: str, sampling: Sampling) -> list[Response]:
        """See `Generator.generate`."""
        found: dict[int, Response] = {}

        def note(ended: Sequence[tuple[int, Response]]) -> Sequence[Request]:
            found.update(ended)
            return ()

        asked = [
            Request(key, policy_id, prompt, sampling._replace(seeds=[seed]))
            for key, (prompt, seed) in enumerate(zip(prompts, sampling.seeds, strict=True))
        ]
        self.run_requests(asked, note)
        return [found[key] for key in range(len(asked))]

    def run_requests(self, requests: Sequence[Request], follow: OnFinished) -> None:
        """See `Generator.converse`. An engine that works goes on until it has nothing left, and what others are asked
        for gathers meanwhile: they share its devices, where one full batch after another takes less than two at once.
        """
        waiting: dict[str, list[Request]] = {}  # by engine

        def ask(requests: Sequence[Request]) -> None:
            for request in requests:
                waiting.setdefault(self._engine_of(request.policy_id), []).append(request)

        ask(requests)
        while waiting:
            name = next(iter(waiting))
            asked: dict[str, Request] = {}
            try:
                while asked or name in waiting:
                    ask(follow(self._next(name, waiting.pop(name, []), asked)))
            except BaseException:
                if name in self.engines:  # else what it still has would come out in the next conversation
                    self.engines[name].llm_engine.abort_request(list(asked))
                raise

    def _next(self, name: str, new: Sequence[Request], asked: dict[str, Request]) -> list[tuple[int, Response]]:
        """Asks an engine for more, and waits until a response has ended, or several at once.

        Args:
            name: the engine's.
            new: requests to add.
            asked: those that the engine has, by its names for them; kept up to date.

        Returns:
            Keys and responses.
        """
        from vllm import SamplingParams, TokensPrompt

        params = [
            SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_tokens,
                seed=sampling.seeds[0],
                logprobs=0,
                stop_token_ids=list(sampling.stop_token_ids),
                detokenize=False,
            )
            for *_, sampling in new
        ]
        inputs = [TokensPrompt(prompt_token_ids=list(request.prompt)) for request in new]
        adapters = None
        if self.lora is not None:
            adapters = [vllm_lora.request(of.policy_id, self._number(of.policy_id)) for of in new]
        with self.watched([*new, *asked.values()][0].policy_id) as engine:
            names = engine.enqueue(inputs, params, lora_request=adapters, use_tqdm=False)
            # Outputs have a request's name without the random part that vLLM adds.
            asked |= {each.partition("-")[0]: request for each, request in zip(names, new, strict=True)}
            while not (outputs := engine.llm_engine.step()):
                pass
        ended = []
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            steps = output.outputs[0].logprobs or []
            logprobs = [float(step[token].logprob) for step, token in zip(steps, tokens, strict=True)]
            ended.append((asked.pop(output.request_id).key, Response(tokens, logprobs)))
        return ended

    def load(self, policy_id: str, weights: Weights, version: int) -> LoadedWeights:
        """See `Generator.load`. Only a path crosses to the engine.

        Raises:
            ModelError: vLLM cannot replace the weights of such a model.
        """
        what = f"replace the weights of `{self._paths[self._engine_of(policy_id)]}`"
        explained = vllm_device.explained(what, ModelError, self.device)
        with in_shared_memory(weights) as path, self.watched(policy_id) as engine, explained:
            if self.lora is None:
                read = engine.collective_rpc("load_safetensors", args=(path,))
            else:
                arguments = (path, self._number(policy_id), self.lora.rank, self.lora.alpha)
                read = engine.collective_rpc("load_adapter", args=arguments)
            loaded = self._loaded(policy_id, engine, read, version)
        if not self.in_process:
            self._weights[policy_id] = (weights, version)
        return loaded

    def transfer(self, step: str, policy_id: str, argument: Any, version: int) -> LoadedWeights | None:
        """A step of vLLM's weight transfer: `meet`, `begin`, `take` or `end`; see `vllm_worker`.

        Returns:
            After the last one, what the engine holds.

        Raises:
            GenerationError: the engine died or hung, and was started anew, with its initial weights.
        """
        with self.watched(policy_id) as engine:
            read = engine.collective_rpc(f"{step}_transfer", args=(argument,))
            return self._loaded(policy_id, engine, read, version) if step == "end" else None

    def _loaded(self, policy_id: str, engine: LLM, read: list[tuple[int, list[str]]], version: int) -> LoadedWeights:
        """Drops what an engine computed with old weights, and sums up what its workers read."""
        checksums = {number for number, _ in read}
        if len(checksums) > 1:
            raise GenerationError(f"The workers of {policy_id}'s vLLM engine read different weights: {checksums}.")
        if not engine.reset_prefix_cache():
            raise GenerationError(f"vLLM did not drop {policy_id}'s cached activations after new weights.")
        return LoadedWeights(version, checksums.pop(), tuple(sorted({name for _, stale in read for name in stale})))

    def _number(self, policy_id: str) -> int:
        """What vLLM knows an LLM's adapter by; it counts from 1."""
        return self.policy_ids.index(policy_id) + 1

    def _engine_of(self, policy_id: str) -> str:
        """The name of the engine that an LLM is in."""
        return policy_id if self.lora is None else _SHARED

    @contextmanager
    def watched(self, policy_id: str) -> Iterator[LLM]:
        """Yields the engine of `policy_id`, and watches it meanwhile.

        Raises:
            GenerationError: it died or hung, and was started anew with its last weights; or it could not be.
        """
        name = self._engine_of(policy_id)
        if name not in self.engines:
            self._replace(name, f"The vLLM engine of {policy_id} is gone")
        engine = self.engines[name]
        if self.in_process:
            yield engine
            return
        done, overdue = threading.Event(), threading.Event()

        def watch() -> None:
            waited = 0.0
            while not done.wait(_POLL_SECONDS):
                waited += _POLL_SECONDS
                if waited > self.timeout:
                    overdue.set()
                    kill(engine)
                if is_dead(engine):
                    wake_callers(engine)
                    return

        watchdog = threading.Thread(target=watch, daemon=True)
        watchdog.start()
        try:
            yield engine
        except Exception as error:
            deadline = time.monotonic() + _DEATH_SECONDS
            while not is_dead(engine):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_SECONDS)
            done.set()
            failed = f"gave no answer for {self.timeout:.0f} s" if overdue.is_set() else "died"
            what = f"The vLLM engine of {policy_id} {failed}"
            self._replace(name, what)
            raise GenerationError(f"{what}; it was started anew.") from error
        finally:
            done.set()
            watchdog.join()

    def _replace(self, name: str, what: str) -> None:
        """Starts a new engine in the place of one that died, and gives it the weights that the dead one had.

        Args:
            name: the engine's.
            what: happened to it, to begin a sentence.

        Raises:
            GenerationError: none could be started, as while the dead one's memory is not free yet; the next use of
                the engine tries again.
        """
        if (dead := self.engines.pop(name, None)) is not None:
            dead.llm_engine.engine_core.shutdown()
        try:
            self.engines[name] = self._start(name)
        except EngineStartError as error:
            raise GenerationError(f"{what}, and no new one could be started. {error}") from error
        for policy_id in self.policy_ids if name == _SHARED else [name]:
            if policy_id in self._weights:
                weights, held = self._weights[policy_id]
                self.load(policy_id, weights, held)

    def close(self) -> None:
        """Shuts all engines down."""
        for engine in self.engines.values():
            engine.llm_engine.engine_core.shutdown()
        self.engines.clear()
