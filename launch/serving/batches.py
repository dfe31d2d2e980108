"""Generates the chains of concurrent requests in batches, in a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from cory_env.rewarding.episodes import compute_awaited
from cory_env.rewarding.worker import RewardError, RewardWorker
from launch.serving.protocol import QUERY_ERRORS
from policies.generation.generator import GenerationError, Generator, Response
from policies.rollout.chain_generation import ChainRequest, FeedbackTogether, generate_chains

Finished = tuple[ChainRequest, list[Response]]
Job = tuple[ChainRequest, Future[Finished]]

GATHER_SECONDS = 0.01
"""How long a batch waits for more chains: clients that got a batch's responses send their next requests together."""


class BatchRunner:
    """Runs a generator in its own thread. Chains that arrive while a batch is generated form the next one."""

    def __init__(self, generator: Generator, worker: RewardWorker | None, max_batch_size: int) -> None:
        """Starts the thread; `worker` has the feedback function, if chains get feedback."""
        self.healthy = True
        """Whether the last batch succeeded."""
        self._generator = generator
        self._worker = worker
        self._max_batch_size = max_batch_size
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, chain: ChainRequest) -> Future[Finished]:
        """Queues a chain.

        Returns:
            A future with the finished chain and its generated responses; or an error of its prompt, a `RewardError` of
            its feedback, or an error of the engine. It can be cancelled until the chain's batch begins.
        """
        future: Future[Finished] = Future()
        self._jobs.put((chain, future))
        return future

    def close(self, timeout: float) -> bool:
        """Ends the thread after its current batch and frees the models; returns whether it ended within `timeout`."""
        self._jobs.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._generator.close()
        if self._worker is not None:
            self._worker.close()
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            time.sleep(GATHER_SECONDS)
            jobs = [job]
            while len(jobs) < self._max_batch_size and not self._jobs.empty():
                if (job := self._jobs.get()) is None:
                    return
                jobs.append(job)
            if jobs := [(chain, future) for chain, future in jobs if future.set_running_or_notify_cancel()]:
                self._generate(jobs)

    def _generate(self, jobs: Sequence[Job]) -> None:
        feedback = None if self._worker is None else FeedbackTogether(partial(compute_awaited, self._worker))
        try:
            responses = generate_chains(self._generator, [chain for chain, _ in jobs], feedback)
        except BaseException as error:
            if len(jobs) > 1 and not isinstance(error, GenerationError):  # only the chain that caused it may fail
                for chain, future in jobs:
                    self._generate([(chain.restarted(), future)])
            else:
                self.healthy = isinstance(error, (*QUERY_ERRORS, RewardError))
                for _, future in jobs:
                    future.set_exception(error)
            return
        self.healthy = True
        for (chain, future), chain_responses in zip(jobs, responses, strict=True):
            future.set_result((chain, chain_responses))
