"""Feedback between the responses of a served chain, computed in a thread so that other requests go on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from cory_env.episode import ChainEpisode
from cory_env.rewarding.episodes import compute_awaited
from cory_env.rewarding.worker import RewardWorker
from launch.serving.protocol import RequestError


class FeedbackThread:
    """Calls a feedback function for one response at a time."""

    def __init__(self, worker: RewardWorker, columns: list[str]) -> None:
        """Creates the thread.

        Args:
            worker: has the feedback function.
            columns: the data columns that the function requires.
        """
        self._worker = worker
        self._columns = columns
        self._executor = ThreadPoolExecutor(1, "feedback")

    def check_columns(self, columns: Mapping[str, object]) -> None:
        """Checks that a request has the columns that the function requires.

        Raises:
            RequestError: one is missing.
        """
        if missing := [name for name in self._columns if columns.get(name) is None]:
            raise RequestError(
                f"The feedback of this chain requires a value for: {', '.join(missing)}. Send `columns`, such as "
                f'{{"{missing[0]}": ...}}, or use a single policy as the model.',
                param="columns",
            )

    async def compute(self, episode: ChainEpisode) -> None:
        """Computes the feedback that the episode's next turn depends on.

        Raises:
            RewardError: the function failed.
        """
        if episode.awaits_feedback:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._executor, compute_awaited, self._worker, [episode])

    def close(self) -> None:
        """Ends the thread and the function's process."""
        self._executor.shutdown(cancel_futures=True)
        self._worker.close()
