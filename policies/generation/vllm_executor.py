"""The executor of vLLM engines that are split over several devices of one node, with one process per device."""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from policies.compat.vllm import exit_with_parent


class OwnedExecutor(MultiprocExecutor):
    """Ends the engine's process when its parent ends. The workers do this themselves (`vllm_worker`)."""

    def _init_executor(self) -> None:
        exit_with_parent()
        super()._init_executor()
