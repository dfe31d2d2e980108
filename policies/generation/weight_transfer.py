"""vLLM's weight transfer over gloo: from a learner's process to engines' workers, tensor by tensor, without a GPU.

vLLM has backends for NCCL and CUDA IPC; importing this module adds `gloo`, for CPUs and clusters without RDMA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

NAME = "gloo"


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """How a worker meets the sender, which is rank 0."""

    master_address: str
    master_port: int
    rank_offset: int
    """The rank of the engine's first worker."""
    world_size: int
    timeout: float
    """Of each tensor, in seconds."""


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """How a learner sends; of its ranks only the first does."""

    backend: ClassVar[str] = NAME
    master_address: str
    """Its own, as workers reach it."""
    world_size: int
    """All workers, and the sender."""
    timeout: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What is about to be sent, in this order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooReceiver(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """An engine's worker."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    group: Any = None
    """A `ProcessGroupGloo`."""

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Meets the sender, in a group that is not torch's default one."""
        timeout = timedelta(seconds=init_info.timeout)
        store = dist.TCPStore(init_info.master_address, init_info.master_port, is_master=False, timeout=timeout)
        rank = init_info.rank_offset + self.parallel_config.rank
        self.group = dist.ProcessGroupGloo(store, rank, init_info.world_size, timeout)

    def start_weight_update(self) -> None:
        """Lets the model take weights as a checkpoint holds them."""
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Lets the model use what it took."""
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives; vLLM's own also waits for an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receives one tensor after another, and hands each to the model.

        Raises:
            RuntimeError: the sender is gone, or a tensor did not come in time.
        """
        if self.group is None:
            raise RuntimeError("This worker never met a sender.")
        try:
            for name, kind, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, kind))
                self.group.broadcast(tensor, 0).wait()
                self.model.load_weights([(name, tensor)])
        except BaseException:
            self.shutdown()  # which the others notice, where they would wait
            raise

    def shutdown(self) -> None:
        """Leaves the group."""
        self.group = None


class GlooSender(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """A learner's rank; but the first, each only iterates, as gathering a tensor takes all."""

    init_info_cls = GlooTrainerInitInfo
    group: Any = None
    """A `ProcessGroupGloo`."""

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> GlooSender:
        """Meets the workers.

        Raises:
            RuntimeError: they did not come in time.
        """
        sender = cls(client=client, source=source, is_sender=init_info.is_sender)
        if sender.is_sender:
            timeout = timedelta(seconds=init_info.timeout)
            store = dist.TCPStore(init_info.master_address, 0, is_master=True, timeout=timeout, wait_for_workers=False)
            info = GlooInitInfo(init_info.master_address, store.port, 1, init_info.world_size, init_info.timeout)
            with _beside(client.init_weight_transfer_engine, asdict(info)):
                sender.group = dist.ProcessGroupGloo(store, 0, init_info.world_size, timeout)
        return sender

    def send_weights(self) -> None:
        """Sends all that the source yields.

        Raises:
            RuntimeError: a worker is gone, or did not take a tensor in time.
        """
        assert self.source is not None
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        assert self.group is not None
        known = self.source.metadata()
        info = GlooUpdateInfo(
            [each.name for each in known],
            [str(each.dtype).removeprefix("torch.") for each in known],
            [list(each.shape) for each in known],
        )
        self.client.start_weight_update()
        with _beside(self.client.update_weights, asdict(info)):
            for _, tensor in self.source:
                self.group.broadcast(tensor.detach().cpu().contiguous(), 0).wait()
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Leaves the group."""
        self.group = None


@contextmanager
def _beside(function: Callable[[dict[str, Any]], None], argument: dict[str, Any]) -> Iterator[None]:
    """Calls a function in a thread meanwhile, and waits for its end; not where the body fails, as it may never come."""
    threads = ThreadPoolExecutor(1)
    try:
        call = threads.submit(function, argument)
        yield
        call.result()
    finally:
        threads.shutdown(wait=False)


WeightTransferEngineFactory.register_engine(NAME, GlooReceiver)
WeightTransferTrainerFactory.register_engine(NAME, GlooSender)
