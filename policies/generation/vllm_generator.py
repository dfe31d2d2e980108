"""Generation with vLLM: one engine per model, or one for all adapters. Weights are passed in shared memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from cory_env.shadowing import project_packages_first
from policies.compat.imports import COMPILER, UNUSED_BY_VLLM, gc_paused, packages_hidden
from policies.compat.vllm import (
    collections_skipped,
    engine_is_dead,
    fail_pending_calls,
    keep_process_groups,
    kernel_scan_limited,
    kill_engine,
    preserve_model_classes,
    preserve_num_threads,
)
from policies.generation import vllm_device, vllm_lora
from policies.generation.generator import (
    GenerationError,
    IsReady,
    LoadedWeights,
    OnFinished,
    Request,
    Response,
    Sampling,
)
from policies.generation.vllm_device import EngineStartError
from policies.models.language_model import compute_dtype
from policies.models.lora import Lora
from policies.models.model_check import ModelError, attention_head_dim, load_config, num_kv_heads
from policies.models.revision import split_revision
from policies.models.weights import Weights, shared_memory_file

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

BLOCK_TOKENS = 32
"""Block size of a CPU engine's KV cache. vLLM's default, 128, wastes most of a block on short contexts."""
_STEP_TOKENS = 4096
"""Maximum number of prompt tokens per engine step."""
_POLL_SECONDS = 0.25
_DEATH_SECONDS = 10.0
"""Longest time between a call's failure and the engine's death, if the engine lost a worker."""
_SHARED_ENGINE = "all adapters"
"""Name of the engine that serves all adapters. Without adapters, and for frozen models, it is the policy id."""


class VLLMGenerator:
    """Generates with one vLLM engine per policy, or one engine for all adapters.

    In-process engines start in seconds. With `in_process=False` every engine runs in a process of its own. A watchdog
    checks it, because vLLM lets callers wait forever for an engine that was killed. If the engine dies or exceeds
    `timeout`, the call raises a `GenerationError` after a new engine was started with the last weights.
    """

    in_batches = False

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
        frozen: Container[str] = (),
        gpu_share: float = 1.0,
        tensor_parallel_size: int = 1,
        in_process: bool = True,
        timeout: float = 600.0,
        weight_transfer: str | None = None,
    ) -> None:
        """Starts the engines, with the initial weights.

        Args:
            models: by policy id, the folder or hub id of its model. With adapters, the same for all but frozen ones.
            dtype: `auto`, `bf16` or `fp32`.
            seed: vLLM's own seed. Responses depend only on `Sampling.seeds`.
            lora: configuration of the adapters; None if every policy has a full model of its own.
            frozen: policy ids that have no adapters and get no new weights.
            gpu_share: on CUDA, this runner's part of a GPU. The engines may use 90 % of it, in equal parts.
            tensor_parallel_size: number of devices that each engine's model is split over: the first ones of this
                process. If it is above 1, each device has a worker process, and the engine is not in-process.
            timeout: longest wait in seconds for an engine's next response or for one `load`. Only for engines in
                processes of their own; callers of in-process engines must have a timeout themselves.
            weight_transfer: vLLM's backend for `transfer`; None if only `load` is used.
        """
        vllm_device.check_device(device, dtype, lora)
        self.device = device
        self.in_process = in_process and tensor_parallel_size == 1
        self.tensor_parallel_size = tensor_parallel_size
        self.timeout = timeout
        self.lora = lora
        self.policy_ids = [policy_id for policy_id in models if policy_id not in frozen]
        self._paths = {
            policy_id if lora is None or policy_id in frozen else _SHARED_ENGINE: path
            for policy_id, path in models.items()
        }
        """By engine name."""
        self._cache_bytes: dict[str, int] = {}
        """By engine name, bytes of the KV cache on each device. For missing engines, vLLM chooses the size."""
        self._weights: dict[str, tuple[Weights, int]] = {}
        """By policy id, the last weights and their version, to restore after a restart."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if self.in_process else "1"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # FlashInfer would be imported but never used, because requests have seeds and processed log-probabilities.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        self._arguments: dict[str, Any] = {
            "dtype": "bfloat16" if compute_dtype(dtype, device) == torch.bfloat16 else "float32",
            "seed": seed,
            "trust_remote_code": trust_remote_code,
            "max_model_len": max_prompt_tokens + max_response_tokens,
            "max_num_seqs": max_sequences,
            "max_num_batched_tokens": max(_STEP_TOKENS, max_prompt_tokens + max_response_tokens),
            "logprobs_mode": "processed_logprobs",  # after temperature
            "generation_config": "vllm",  # the model's own may contain penalties and other stop tokens
            "skip_tokenizer_init": True,
            "worker_extension_cls": "policies.generation.vllm_worker.WeightSync",
            "disable_log_stats": True,
        }
        if weight_transfer is not None:
            self._arguments["weight_transfer_config"] = {"backend": weight_transfer}
        if tensor_parallel_size > 1:
            self._arguments["tensor_parallel_size"] = tensor_parallel_size
            # Inside a Ray actor, vLLM may choose Ray workers, which would request more GPUs than the runner has.
            self._arguments["distributed_executor_backend"] = "policies.generation.vllm_executor.OwnedExecutor"
        self._adapter_arguments = {} if lora is None else vllm_lora.engine_arguments(lora, len(self.policy_ids))
        for name, path in self._paths.items():
            self._cache_bytes[name] = self._compute_cache_bytes(path, max_sequences, trust_remote_code)
        if device.type == "cuda":
            share = vllm_device.GPU_SHARE * min(gpu_share, 1.0) / len(self._paths)
            self._arguments |= {"gpu_memory_utilization": share, **vllm_device.cuda_arguments(max_sequences)}
            weight_bytes = (2 if self._arguments["dtype"] == "bfloat16" else 4) / tensor_parallel_size
            for name, path in self._paths.items():
                if not vllm_device.cache_fits(path, trust_remote_code, self._cache_bytes[name], weight_bytes, share):
                    del self._cache_bytes[name]
        else:
            self._arguments |= vllm_device.cpu_arguments(tensor_parallel_size)
            self._arguments["block_size"] = BLOCK_TOKENS
            cache_bytes = sum(self._cache_bytes.values()) * tensor_parallel_size
            vllm_device.check_memory(cache_bytes, max_sequences, int(self._arguments["max_model_len"]))
        self.engines: dict[str, LLM] = {name: self._start(name) for name in self._paths}

    def _start(self, name: str) -> LLM:
        is_eager = bool(self._arguments.get("enforce_eager"))
        compiles = not is_eager or os.environ.get("TORCHDYNAMO_DISABLE") != "1"
        with gc_paused(), packages_hidden(*UNUSED_BY_VLLM, *([] if compiles else [COMPILER])):
            from vllm import LLM

        errors = vllm_device.wrap_errors(f"start an engine for `{self._paths[name]}`", EngineStartError, self.device)
        classes = preserve_model_classes() if is_eager else nullcontext()
        with errors, preserve_num_threads(), classes, kernel_scan_limited(), project_packages_first():
            hub_id, revision = split_revision(self._paths[name])
            arguments = self._arguments | revision | (self._adapter_arguments if name == _SHARED_ENGINE else {})
            engine = LLM(hub_id, kv_cache_memory_bytes=self._cache_bytes.get(name), **arguments)
        if self.in_process:
            keep_process_groups(engine)
        return engine

    def _compute_cache_bytes(self, path: str, max_sequences: int, trust_remote_code: bool) -> int:
        """Returns the size of the KV cache per device for `max_sequences` full contexts.

        vLLM's default would take most of the available memory.
        """
        config = load_config(path, trust_remote_code).get_text_config()
        width = attention_head_dim(config)
        heads = max(num_kv_heads(config) // self.tensor_parallel_size, 1)
        size = 2 if self._arguments["dtype"] == "bfloat16" else 4
        blocks = max_sequences * -(-int(self._arguments["max_model_len"]) // BLOCK_TOKENS) + 16
        return int(blocks * BLOCK_TOKENS * 2 * config.num_hidden_layers * heads * width * size)

    def generate(self, prompts: Sequence[Sequence[int]], policy_id: str, sampling: Sampling) -> list[Response]:
        """See `Generator.generate`."""
        responses: dict[int, Response] = {}

        def collect(finished: Sequence[tuple[int, Response]]) -> Sequence[Request]:
            responses.update(finished)
            return ()

        requests = [
            Request(key, policy_id, prompt, sampling._replace(seeds=[seed]))
            for key, (prompt, seed) in enumerate(zip(prompts, sampling.seeds, strict=True))
        ]
        self.run_requests(requests, collect)
        return [responses[key] for key in range(len(requests))]

    def run_requests(
        self, requests: Sequence[Request], on_finished: OnFinished, is_ready: IsReady = lambda: False
    ) -> None:
        """See `Generator.run_requests`.

        Only one engine works at a time, until it has no requests left; requests for the others are queued meanwhile.
        The engines share their devices, and one full batch after another takes less time than two at once.
        """
        queued: dict[str, list[Request]] = {}  # by engine name

        def enqueue(requests: Sequence[Request]) -> None:
            for request in requests:
                queued.setdefault(self._engine_name(request.policy_id), []).append(request)

        enqueue(requests)
        while queued:
            name = next(iter(queued))
            running: dict[str, Request] = {}
            try:
                while running or name in queued:
                    enqueue(on_finished(self._step(name, queued.pop(name, []), running, is_ready)))
            except BaseException:
                if name in self.engines:  # otherwise its remaining responses would appear in the next call
                    self.engines[name].llm_engine.abort_request(list(running))
                raise

    def _step(
        self, name: str, new: Sequence[Request], running: dict[str, Request], is_ready: IsReady
    ) -> list[tuple[int, Response]]:
        """Adds requests to an engine, and steps it until responses are finished; returns these with their keys.

        Returns none if there may be more requests meanwhile.

        Args:
            running: the engine's unfinished requests, by vLLM's request ids; updated in place.
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
        if name == _SHARED_ENGINE:
            adapters = [self._adapter_request(request.policy_id) for request in new]
        with self.watched([*new, *running.values()][0].policy_id) as engine:
            ids = engine.enqueue(inputs, params, lora_request=adapters, use_tqdm=False)
            # Outputs have the request's id without the random suffix that vLLM adds.
            running |= {id_.partition("-")[0]: request for id_, request in zip(ids, new, strict=True)}
            while not (outputs := engine.llm_engine.step()) and not is_ready():
                pass
        finished = []
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            steps = output.outputs[0].logprobs or []
            logprobs = [float(step[token].logprob) for step, token in zip(steps, tokens, strict=True)]
            finished.append((running.pop(output.request_id).key, Response(tokens, logprobs)))
        return finished

    def load(self, policy_id: str, weights: Weights, version: int) -> LoadedWeights:
        """See `Generator.load`. Only a path is sent to the engine."""
        action = f"replace the weights of `{self._paths[self._engine_name(policy_id)]}`"
        errors = vllm_device.wrap_errors(action, ModelError, self.device)
        with shared_memory_file(weights) as path, self.watched(policy_id) as engine, errors:
            if self.lora is None:
                results = engine.collective_rpc("load_weights", args=(path,))
            else:
                arguments = (path, self._adapter_number(policy_id), self.lora.rank, self.lora.alpha)
                results = engine.collective_rpc("load_adapter", args=arguments)
            loaded = self._finish_load(policy_id, engine, results, version)
        if not self.in_process:
            self._weights[policy_id] = (weights, version)
        return loaded

    def transfer(self, step: str, policy_id: str, argument: Any, version: int) -> LoadedWeights | None:
        """Runs one step of vLLM's weight transfer; see `vllm_worker`.

        Args:
            step: `connect`, `start`, `receive` or `finish`, which returns the engine's weights.
        """
        with self.watched(policy_id) as engine:
            results = engine.collective_rpc(f"{step}_transfer", args=(argument,))
            return self._finish_load(policy_id, engine, results, version) if step == "finish" else None

    def _finish_load(
        self, policy_id: str, engine: LLM, results: list[tuple[int, list[str]]], version: int
    ) -> LoadedWeights:
        """Drops an engine's caches, and combines its workers' checksums and stale weights."""
        checksums = {checksum for checksum, _ in results}
        if len(checksums) > 1:
            raise GenerationError(f"The workers of {policy_id}'s vLLM engine read different weights: {checksums}.")
        if not engine.reset_prefix_cache():
            raise GenerationError(f"vLLM did not reset the prefix cache of {policy_id} after a weight sync.")
        return LoadedWeights(version, checksums.pop(), tuple(sorted({name for _, stale in results for name in stale})))

    def _adapter_request(self, policy_id: str) -> LoRARequest:
        return vllm_lora.lora_request(policy_id, self._adapter_number(policy_id))

    def _adapter_number(self, policy_id: str) -> int:
        """Returns vLLM's number of a policy's adapter, from 1."""
        return self.policy_ids.index(policy_id) + 1

    def _engine_name(self, policy_id: str) -> str:
        return policy_id if policy_id in self._paths else _SHARED_ENGINE

    @contextmanager
    def watched(self, policy_id: str) -> Iterator[LLM]:
        """Yields a policy's engine, and watches it until the context exits."""
        name = self._engine_name(policy_id)
        if name not in self.engines:
            self._restart(name, f"The vLLM engine of {policy_id} died")
        engine = self.engines[name]
        if self.in_process:
            yield engine
            return
        done, timed_out = threading.Event(), threading.Event()

        def watch() -> None:
            waited = 0.0
            while not done.wait(_POLL_SECONDS):
                waited += _POLL_SECONDS
                if waited > self.timeout:
                    timed_out.set()
                    kill_engine(engine)
                if engine_is_dead(engine):
                    fail_pending_calls(engine)
                    return

        watchdog = threading.Thread(target=watch, daemon=True)
        watchdog.start()
        try:
            yield engine
        except Exception as error:
            deadline = time.monotonic() + _DEATH_SECONDS
            while not engine_is_dead(engine):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_SECONDS)
            done.set()
            failure = f"did not respond within {self.timeout:.0f} s" if timed_out.is_set() else "died"
            event = f"The vLLM engine of {policy_id} {failure}"
            self._restart(name, event)
            raise GenerationError(f"{event}; it was restarted.") from error
        finally:
            done.set()
            watchdog.join()

    def _restart(self, name: str, event: str) -> None:
        """Replaces a dead engine by a new one with the same weights.

        Args:
            event: what happened to it, as the first clause of the error message.
        """
        if (dead := self.engines.pop(name, None)) is not None:
            dead.llm_engine.engine_core.shutdown()
        try:
            self.engines[name] = self._start(name)
        except EngineStartError as error:
            raise GenerationError(f"{event}, and restarting it failed. {error}") from error
        for policy_id in self.policy_ids if name == _SHARED_ENGINE else [name]:
            if policy_id in self._weights:
                weights, version = self._weights[policy_id]
                self.load(policy_id, weights, version)

    def close(self) -> None:
        """Stops all engines."""
        with collections_skipped():
            for engine in self.engines.values():
                engine.llm_engine.engine_core.shutdown()
        self.engines.clear()
