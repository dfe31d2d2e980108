"""Processes that learn one LLM together. Importing PyTorch and transformers takes each of them four seconds of CPU, so
they are forked from one that has.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import torch.multiprocessing as mp

_USERS = ("test_mesh_fp64", "test_saving")
"""Files of this folder that import all others which have ranks."""


def run_ranks(rank: Callable[..., None], count: int, *arguments: object) -> None:
    """Calls `rank(number, *arguments)` in processes 0 … `count` - 1, and raises what one of them raises."""
    multiprocessing.set_forkserver_preload([f"tests.policies.learning.{file}" for file in _USERS])
    mp.start_processes(rank, arguments, nprocs=count, start_method="forkserver")
