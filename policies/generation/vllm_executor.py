"""How a vLLM engine that is split over several devices runs them: as vLLM does on one node, by a process for each."""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from policies.compat.vllm import end_with_parent


class OwnedExecutor(MultiprocExecutor):
    """Ends its engine's process with the one that started it; the workers do so themselves (`vllm_worker`)."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()
