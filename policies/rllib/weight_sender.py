"""The learner's side of vLLM's weight transfer: direct weight sync to engines, without driver and object store."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from policies.generation import weight_transfer
from policies.generation.generator import LoadedWeights
from policies.learning.policy_learner import PolicyLearner
from policies.learning.sharding import full_tensor
from policies.models.weights import Digest, Weights

logger = logging.getLogger(__name__)


class WeightSender:
    """Sends a policy's weights to runners; every rank of the policy has a sender, but only rank 0's sends."""

    def __init__(self, policy: PolicyLearner, backend: str, workers: int, timeout: float) -> None:
        """Creates a sender; it connects with the first `send`.

        Args:
            backend: `gloo`, or the name of a backend of vLLM.
            timeout: longest wait for a runner, in seconds.
        """
        self.policy, self.backend, self.workers, self.timeout = policy, backend, workers, timeout
        self._engine: Any = None
        self._connected_to: Any = None

    def send(
        self, runners: Sequence[Any], version: int, restarts: int, weights: Weights | None = None
    ) -> tuple[int, list[LoadedWeights] | None]:
        """Sends the current or other weights. All ranks of the policy must call it.

        Args:
            restarts: number of runner restarts so far; restarted runners must connect again.

        Returns:
            The checksum of the sent weights, and what each runner's engine loaded; None if a runner failed, in which
            case none of the runners may be used with these weights.
        """
        members = (restarts, list(runners))
        source = PolicyWeightSource(self.policy, weights)
        client = RunnerClient(runners, self.policy.name, version, self.workers, self.timeout)
        try:
            if self._engine is None or self._connected_to != members:
                self.close()
                init_info = self._init_info(len(runners))
                self._engine = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)
                self._connected_to = members
            self._engine.source, self._engine.client = source, client
            self._engine.send_weights()
        except Exception as error:  # from a runner, Ray, or the backend
            logger.warning("Weight sync of %s failed on some runners: %s", self.policy.name, _one_line(error))
            self.close()
            client.loaded = None
        finally:
            source.finish()
        return source.digest.value(), client.loaded

    def close(self) -> None:
        """Leaves the process group, so that runners stop waiting for weights."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = None

    def _init_info(self, runners: int) -> TrainerInitInfo:
        """How engines and this learner connect."""
        rank, world = 0 if self.policy.is_rank_zero else 1, 1 + runners * self.workers
        address = ray.util.get_node_ip_address()
        if self.backend == weight_transfer.GLOO:
            return weight_transfer.GlooTrainerInitInfo(address, world, self.timeout, rank=rank)
        if self.backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            with socket.socket() as sock:
                sock.bind(("", 0))
                port = sock.getsockname()[1]
            return NCCLTrainerInitInfo(address, port, world, rank=rank)
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=rank)


class PolicyWeightSource(WeightSource):
    """Streams a policy's weights, in its compute type; all ranks must iterate, to gather each weight."""

    def __init__(self, policy: PolicyLearner, weights: Weights | None = None) -> None:
        """Streams the current weights of a policy, or `weights` instead."""
        self.digest = Digest()
        self._dtype = policy.model.dtype
        self._policy, self._weights = policy, weights
        self._iterator: Iterator[tuple[str, Tensor]] = self._stream()

    def metadata(self) -> list[ParamMeta]:
        """Names, types and shapes of the weights."""
        return [ParamMeta(name, self._dtype, tuple(tensor.shape)) for name, tensor in self._policy.engine_weights()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """The remaining weights."""
        return self._iterator

    def finish(self) -> None:
        """Consumes the remaining weights, so that other ranks do not wait for this one to gather them."""
        for _ in self._iterator:
            pass

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._policy.engine_weights():
            if self._weights is None:
                tensor = full_tensor(parameter.to(self._dtype))
            else:
                tensor = torch.from_numpy(self._weights[name]).to(parameter.device, self._dtype)
            if self._policy.is_rank_zero:
                self.digest.add(name, tensor)
            yield name, tensor


class RunnerClient:
    """vLLM's weight sync client, which reaches the engines through their runner actors."""

    def __init__(self, runners: Sequence[Any], policy_id: str, version: int, workers: int, timeout: float) -> None:
        """Creates a client for one weight sync.

        Args:
            timeout: longest wait for a runner, in seconds.
        """
        self.loaded: list[LoadedWeights] | None = None  # what each runner's engine loaded, after `finish_weight_update`
        self._runners, self._call, self._workers = runners, {"policy_id": policy_id, "version": version}, workers
        self._timeout = timeout

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connects all engines to the learner."""
        offsets = [1 + index * self._workers for index in range(len(self._runners))]
        infos = [init_info | ({"rank_offset": offset} if "rank_offset" in init_info else {}) for offset in offsets]
        self._call_runners("connect", infos)

    def start_weight_update(self) -> None:
        """Starts a weight update."""
        self._call_runners("start", [None] * len(self._runners))

    def update_weights(self, update_info: Any) -> None:
        """Transfers some of the weights."""
        self._call_runners("receive", [update_info] * len(self._runners))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends the weight update."""
        self.loaded = self._call_runners("finish", [None] * len(self._runners))

    def _call_runners(self, step: str, arguments: Sequence[Any]) -> list[Any]:
        calls = [
            runner.transfer.remote(step=step, argument=argument, **self._call)
            for runner, argument in zip(self._runners, arguments, strict=True)
        ]
        pending, deadline = calls, time.monotonic() + self._timeout
        while pending:  # raise one runner's error at once: the other runners wait for that runner
            ready, pending = ray.wait(pending, timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError(f"{len(pending)} runners timed out after {self._timeout:.0f} s.")
            ray.get(ready)
        return ray.get(calls)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
