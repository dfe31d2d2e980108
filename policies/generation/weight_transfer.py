"""vLLM weight transfer over gloo: from a learner process to the engines' workers, one tensor at a time, without a GPU.

vLLM has backends for NCCL and CUDA IPC. Importing this module registers `gloo`, for CPUs and clusters without RDMA.
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
    WeightTransferInitInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

GLOO = "gloo"


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """How a worker connects to the sender, which is rank 0; `rank_offset` is the rank of the engine's first worker."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout: float


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """How a learner sends. Only its rank 0 does.

    Attributes:
        master_address: The learner's address, as workers reach it.
        world_size: Number of workers plus the sender.
        timeout: Per tensor, in seconds.
    """

    backend: ClassVar[str] = GLOO
    master_address: str
    world_size: int
    timeout: float


class GlooReceiver(NCCLWeightTransferEngine):
    """The receiving side, in an engine's worker: vLLM's for NCCL, but without a GPU."""

    init_info_cls = GlooInitInfo
    group: Any = None
    """A `ProcessGroupGloo`."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Connects to the sender, in a process group of its own."""
        timeout = timedelta(seconds=init_info.timeout)
        store = dist.TCPStore(init_info.master_address, init_info.master_port, is_master=False, timeout=timeout)
        rank = init_info.rank_offset + self.parallel_config.rank
        self.group = dist.ProcessGroupGloo(store, rank, init_info.world_size, timeout)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives tensors. vLLM's own method also synchronizes an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receives the tensors one by one, and loads each into the model."""
        if self.group is None:
            raise RuntimeError("This worker is not connected to a sender.")
        try:
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                self.group.broadcast(tensor, 0).wait()
                self.model.load_weights([(name, tensor)])
        except BaseException:
            self.shutdown()  # so that the other ranks fail instead of waiting
            raise

    def shutdown(self) -> None:
        """Leaves the process group."""
        self.group = None


class GlooSender(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The sending side, in each rank of a learner. Only rank 0 sends; the others iterate, to help gather tensors."""

    init_info_cls = GlooTrainerInitInfo
    group: Any = None
    """A `ProcessGroupGloo`."""

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> GlooSender:
        """Connects to the workers."""
        sender = cls(client=client, source=source, is_sender=init_info.is_sender)
        if sender.is_sender:
            timeout = timedelta(seconds=init_info.timeout)
            store = dist.TCPStore(init_info.master_address, 0, is_master=True, timeout=timeout, wait_for_workers=False)
            info = GlooInitInfo(init_info.master_address, store.port, 1, init_info.world_size, init_info.timeout)
            with _call_in_thread(client.init_weight_transfer_engine, asdict(info)):
                sender.group = dist.ProcessGroupGloo(store, 0, init_info.world_size, timeout)
        return sender

    def send_weights(self) -> None:
        """Sends all tensors of the source."""
        assert self.source is not None
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        assert self.group is not None
        parameters = self.source.metadata()
        info = NCCLWeightTransferUpdateInfo(
            [parameter.name for parameter in parameters],
            [str(parameter.dtype).removeprefix("torch.") for parameter in parameters],
            [list(parameter.shape) for parameter in parameters],
        )
        self.client.start_weight_update()
        with _call_in_thread(self.client.update_weights, asdict(info)):
            for _, tensor in self.source:
                self.group.broadcast(tensor.detach().cpu().contiguous(), 0).wait()
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Leaves the process group."""
        self.group = None


@contextmanager
def _call_in_thread(function: Callable[[dict[str, Any]], None], argument: dict[str, Any]) -> Iterator[None]:
    """Runs a function in a thread during the body, and waits for it, except if the body fails: it may never return."""
    threads = ThreadPoolExecutor(1)
    try:
        call = threads.submit(function, argument)
        yield
        call.result()
    finally:
        threads.shutdown(wait=False)


WeightTransferEngineFactory.register_engine(GLOO, GlooReceiver)
WeightTransferTrainerFactory.register_engine(GLOO, GlooSender)
