"""vLLM engines that live in this process, beside others and beside training: what vLLM does to the process, undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
