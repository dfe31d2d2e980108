"""A learner's side of vLLM's weight transfer: one LLM's weights to engines, past the driver and Ray's object store."""

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
from policies.learning.sharding import whole
from policies.models.weights import Digest, Weights

logger = logging.getLogger(__name__)


class WeightSender:
    """Sends an LLM's weights to any runners; every rank that learns the LLM has one, and the first one's sends."""

    def __init__(self, policy: PolicyLearner, backend: str, workers: int, timeout: float) -> None:
        """Takes the LLM.

        Args:
            policy: its learner.
            backend: `gloo`, or another one's name in vLLM.
            workers: processes of each engine.
            timeout: the longest wait for a runner, in seconds.
        """
        self.policy, self.backend, self.workers, self.timeout = policy, backend, workers, timeout
        self._engine: Any = None
        self._met: Any = None

    def send(
        self, runners: Sequence[Any], version: int, restarts: int, weights: Weights | None = None
    ) -> tuple[int, list[LoadedWeights] | None]:
        """Sends the present weights, or others. All ranks of the LLM must call it alike.

        Args:
            runners: actors, each of which gets them.
            version: of the weights.
            restarts: how many runners came back so far: they have forgotten the learner.
            weights: others than the present ones.

        Returns:
            The checksum of what was sent, and what each runner's engine read; None where a runner failed, so that
            none of them may be played with.
        """
        met = (restarts, list(runners))
        source = Source(self.policy, weights)
        client = Client(runners, self.policy.name, version, self.workers, self.timeout)
        try:
            if self._engine is None or self._met != met:
                self.close()
                meeting = self._meeting(len(runners))
                self._engine = WeightTransferTrainerFactory.trainer_init(meeting, client=client, source=source)
                self._met = met
            self._engine.source, self._engine.client = source, client
            self._engine.send_weights()
        except Exception as error:  # of a runner, of Ray, of the backend
            logger.warning("The weights of %s did not reach all runners: %s", self.policy.name, _line(error))
            self.close()
            client.found = None
        finally:
            source.finish()
        return source.digest.value(), client.found

    def close(self) -> None:
        """Leaves the group of the runners, which end what they wait for."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = None

    def _meeting(self, runners: int) -> TrainerInitInfo:
        """How engines and this learner find each other."""
        rank, world = 0 if self.policy.leads else 1, 1 + runners * self.workers
        address = ray.util.get_node_ip_address()
        if self.backend == weight_transfer.NAME:
            return weight_transfer.GlooTrainerInitInfo(address, world, self.timeout, rank=rank)
        if self.backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            with socket.socket() as free:
                free.bind(("", 0))
                port = free.getsockname()[1]
            return NCCLTrainerInitInfo(address, port, world, rank=rank)
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=rank)


class Source(WeightSource):
    """An LLM's weights one after another, in the type that it computes in; gathering each takes all its ranks."""

    def __init__(self, policy: PolicyLearner, weights: Weights | None = None) -> None:
        """Takes the learner, and other weights than the present ones."""
        self.digest = Digest()
        self._dtype = policy.model.dtype
        self._policy, self._weights = policy, weights
        self._left: Iterator[tuple[str, Tensor]] = self._stream()

    def metadata(self) -> list[ParamMeta]:
        """What will be sent."""
        return [ParamMeta(name, self._dtype, tuple(tensor.shape)) for name, tensor in self._policy.played_weights()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """What is left of it."""
        return self._left

    def finish(self) -> None:
        """Takes what is left, so that the LLM's other ranks, which gather it too, do not wait for this one."""
        for _ in self._left:
            pass

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._policy.played_weights():
            if self._weights is None:
                tensor = whole(parameter.to(self._dtype))
            else:
                tensor = torch.from_numpy(self._weights[name]).to(parameter.device, self._dtype)
            if self._policy.leads:
                self.digest.add(name, tensor)
            yield name, tensor


class Client:
    """How vLLM's sender speaks to engines: through the actors that have them."""

    def __init__(self, runners: Sequence[Any], policy_id: str, version: int, workers: int, timeout: float) -> None:
        """Takes the runners, and whose weights of which version they get."""
        self.found: list[LoadedWeights] | None = None
        """What each read, in the end."""
        self._runners, self._call, self._workers = runners, {"policy_id": policy_id, "version": version}, workers
        self._timeout = timeout

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Lets all engines meet the learner."""
        places = [1 + place * self._workers for place in range(len(self._runners))]
        of_each = [init_info | {"rank_offset": place} if "rank_offset" in init_info else init_info for place in places]
        self._all("meet", of_each)

    def start_weight_update(self) -> None:
        """Tells them that weights will come."""
        self._all("begin", [None] * len(self._runners))

    def update_weights(self, update_info: Any) -> None:
        """Lets them take some."""
        self._all("take", [update_info] * len(self._runners))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Tells them that these were all."""
        self.found = self._all("end", [None] * len(self._runners))

    def _all(self, step: str, arguments: Sequence[Any]) -> list[Any]:
        calls = [
            runner.transfer.remote(step=step, argument=argument, **self._call)
            for runner, argument in zip(self._runners, arguments, strict=True)
        ]
        waiting, until = calls, time.monotonic() + self._timeout
        while waiting:  # what one raises must not wait for the others, which wait for it
            ready, waiting = ray.wait(waiting, timeout=max(until - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError(f"{len(waiting)} runners gave no answer in {self._timeout:.0f} s.")
            ray.get(ready)
        return ray.get(calls)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
