"""vLLM (0.32) beside its public interfaces: what an engine does to its process, undone; how its death is noticed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import InvalidStateError
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

if TYPE_CHECKING:
    from vllm import LLM

_clients: WeakSet[Any] = WeakSet()
"""vLLM's clients of the engines in this process."""


@contextmanager
def threads_kept() -> Iterator[None]:
    """Keeps `torch.set_num_threads`, which an engine that starts on a CPU makes do nothing in its whole process."""
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads


@contextmanager
def classes_kept() -> Iterator[None]:
    """Keeps Hugging Face's model classes as they are, for the learner in this process.

    For a family without a class of its own in vLLM, such as OLMo, vLLM decorates Hugging Face's class for
    `torch.compile`, and from then on a model of it can only be built inside an engine (vLLM 0.32). An engine that
    compiles nothing, as on a CPU, does not need the decoration.
    """
    from vllm.model_executor.models.transformers import base

    decorate = base.support_torch_compile
    base.support_torch_compile = lambda **arguments: lambda cls: cls
    try:
        yield
    finally:
        base.support_torch_compile = decorate


def share_groups(engine: LLM) -> None:
    """Lets the process-wide groups of vLLM live as long as any engine in this process does: vLLM 0.32 destroys them
    with the first engine that ends or is collected, and the others' next step fails.
    """
    from vllm.v1.engine import core

    _clients.add(engine.llm_engine.engine_core)
    if getattr(core.cleanup_dist_env_and_memory, "of_last", False):
        return
    clean_up = core.cleanup_dist_env_and_memory

    def clean_up_after_the_last() -> None:
        # A client's finalizer is dead before its engine ends.
        if not any(client._finalizer.alive for client in _clients):
            clean_up()

    clean_up_after_the_last.of_last = True  # type: ignore[attr-defined]
    core.cleanup_dist_env_and_memory = clean_up_after_the_last


def is_dead(engine: LLM) -> bool:
    """Whether the process of an engine is known to be gone: vLLM notices it, and lets its caller wait all the same."""
    dead: bool = engine.llm_engine.engine_core.resources.engine_dead
    return dead


def kill(engine: LLM) -> None:
    """Ends the process of an engine that hangs; it counts as dead from then on."""
    resources = engine.llm_engine.engine_core.resources
    resources.engine_manager.shutdown()
    resources.engine_dead = True


def wake_callers(engine: LLM) -> None:
    """Ends the waits on an engine that died, which vLLM leaves as they are: for responses, and for calls of it."""
    from vllm.v1.engine.exceptions import EngineDeadError

    core = engine.llm_engine.engine_core
    core.outputs_queue.put_nowait(EngineDeadError())
    for call in list(core.utility_results.values()):
        with suppress(InvalidStateError):  # answered at the last moment
            call.set_exception(EngineDeadError())


def adapter_manager(model_runner: Any) -> Any:
    """Returns what holds the adapters in a worker: it takes tensors, where vLLM's public calls take folders."""
    return model_runner.lora_manager._adapter_manager


def end_with_parent() -> None:
    """Kills this process as soon as its parent has ended; does nothing where `multiprocessing` did not start it.

    vLLM's engines do not look at their parent, and their workers not while they start: a runner that is killed would
    leave them, and the devices occupied.
    """
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_outlive, args=(parent,), daemon=True).start()


def _outlive(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
