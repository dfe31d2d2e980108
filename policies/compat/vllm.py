"""Uses of vLLM's (0.32) private interfaces: undoing an engine's side effects, and handling dead engines."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import InvalidStateError
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

if TYPE_CHECKING:
    from vllm import LLM

_clients: WeakSet[Any] = WeakSet()
"""vLLM's clients of all engines in this process."""


@contextmanager
def preserve_num_threads() -> Iterator[None]:
    """Restores `torch.set_num_threads`, which an engine that starts on a CPU disables in the whole process."""
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads


@contextmanager
def preserve_model_classes() -> Iterator[None]:
    """Stops vLLM from decorating Hugging Face's model classes, which a learner in this process uses too.

    For families without a vLLM class, such as OLMo, vLLM 0.32 decorates Hugging Face's class for `torch.compile`. From
    then on, the model can only be built inside an engine. Engines without compilation, as on a CPU, do not need it.
    """
    from vllm.model_executor.models.transformers import base

    decorate = base.support_torch_compile
    base.support_torch_compile = lambda **arguments: lambda cls: cls
    try:
        yield
    finally:
        base.support_torch_compile = decorate


@contextmanager
def kernel_scan_limited() -> Iterator[None]:
    """Makes an engine that replaces Triton kernels look for them in vLLM's own modules.

    Without Triton, as on a CPU, vLLM 0.32 compares all attributes of all imported modules, about 8,000, with its
    kernels whenever an engine starts.
    """
    from vllm.triton_utils import dispatcher

    rebind = dispatcher._rebind_kernels

    def rebind_in_vllm(overrides: Any) -> None:
        modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
        dispatcher.sys = SimpleNamespace(modules=modules)
        try:
            rebind(overrides)
        finally:
            dispatcher.sys = sys

    dispatcher._rebind_kernels = rebind_in_vllm
    try:
        yield
    finally:
        dispatcher._rebind_kernels = rebind


def keep_process_groups(engine: LLM) -> None:
    """Keeps vLLM's process groups alive until the last engine of this process ends.

    vLLM 0.32 destroys these process-wide groups with the first engine that ends or is garbage-collected. The other
    engines' next step then fails.
    """
    from vllm.v1.engine import core

    _clients.add(engine.llm_engine.engine_core)
    if getattr(core.cleanup_dist_env_and_memory, "waits_for_last", False):
        return
    clean_up = core.cleanup_dist_env_and_memory

    def clean_up_after_last() -> None:
        # A client's finalizer dies before its engine ends.
        if not any(client._finalizer.alive for client in _clients):
            clean_up()

    clean_up_after_last.waits_for_last = True  # type: ignore[attr-defined]
    core.cleanup_dist_env_and_memory = clean_up_after_last


@contextmanager
def collections_skipped() -> Iterator[None]:
    """Skips the garbage collections that vLLM requests while engines of this process stop.

    Each engine requests some, of all objects, for GPU memory. With the million objects of the imported libraries they
    take a second, at the end of a run. What they would free, the next collection frees.
    """
    collect = gc.collect
    gc.collect = lambda generation=2: 0
    try:
        yield
    finally:
        gc.collect = collect


def engine_is_dead(engine: LLM) -> bool:
    """Returns whether an engine's process died. vLLM detects this, but does not wake up the waiting caller."""
    dead: bool = engine.llm_engine.engine_core.resources.engine_dead
    return dead


def kill_engine(engine: LLM) -> None:
    """Kills the process of a hanging engine, and marks the engine as dead."""
    resources = engine.llm_engine.engine_core.resources
    resources.engine_manager.shutdown()
    resources.engine_dead = True


def fail_pending_calls(engine: LLM) -> None:
    """Raises `EngineDeadError` in all callers that wait for a dead engine's responses or calls. vLLM does not."""
    from vllm.v1.engine.exceptions import EngineDeadError

    core = engine.llm_engine.engine_core
    core.outputs_queue.put_nowait(EngineDeadError())
    for call in list(core.utility_results.values()):
        with suppress(InvalidStateError):  # it finished just before the engine died
            call.set_exception(EngineDeadError())


def adapter_manager(model_runner: Any) -> Any:
    """Returns a worker's adapter manager. It accepts tensors, whereas vLLM's public calls only accept folders."""
    return model_runner.lora_manager._adapter_manager


def skip_token_ranks() -> None:
    """Replaces the ranks of sampled tokens, which nobody reads, by zeros.

    vLLM 0.32 always computes them with log-probabilities. On a CPU that takes a seventh of a tiny model's rollout.
    """
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = lambda logprobs, token_logprobs: logprobs.new_zeros(
        len(logprobs), dtype=torch.int64
    )


def exit_with_parent() -> None:
    """Kills this process when its parent ends. Does nothing if `multiprocessing` did not start this process.

    vLLM's engines never check their parent, and its workers do not while they start. Without this, a killed runner
    would leave orphans that occupy the devices.
    """
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_kill_after, args=(parent,), daemon=True).start()


def _kill_after(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
