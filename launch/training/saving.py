"""Asynchronous checkpointing: one checkpoint at a time is written during training and published when complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from launch.run_folder.lease import LeaseLostError
from launch.run_folder.run import Run
from launch.run_folder.storage import StorageError

if TYPE_CHECKING:
    from policies.checkpoint import Checkpoint
    from policies.cory import Cory


class _PendingCheckpoint(NamedTuple):
    update: int
    best: int | None
    """The best update when saving started."""
    checkpoint: Checkpoint
    publishing: contextlib.ExitStack
    """On exit, the temporary folder gets its final name; after an exception it is removed."""


class CheckpointWriter:
    """Writes the checkpoints of a training run. A context manager.

    On exit, the pending checkpoint is published, even after a failure if possible. It is dropped if the user aborts.
    """

    def __init__(self, run: Run, keep: int, warn: Callable[[str], None]) -> None:
        """Creates the writer.

        Args:
            run: The locked run.
            keep: Number of checkpoints to keep in addition to the best.
            warn: Called with each warning.
        """
        self._run = run
        self._keep = keep
        self._warn = warn
        self._pending: _PendingCheckpoint | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        elif issubclass(kind, Exception):
            self.try_finish()
        elif self._pending is not None:
            self._pending.publishing.__exit__(kind, error, traceback)

    def start(self, algo: Cory) -> None:
        """Starts saving the current update, unless it is saved or pending; first waits for the previous checkpoint.

        Raises:
            OSError, LearnerError: This or the previous checkpoint could not be written.
        """
        from policies.checkpoint import Checkpoint

        if self._pending is not None and self._pending.update == algo.updates:
            return
        self.finish()
        best = self._run.best_update()
        if self._run.checkpoints.path_of(algo.updates).exists():
            self._after_publish(best)
            return
        with contextlib.ExitStack() as publishing:
            folder = publishing.enter_context(self._run.checkpoints.saving(algo.updates))
            checkpoint = Checkpoint(algo, folder.resolve())
            self._pending = _PendingCheckpoint(algo.updates, best, checkpoint, publishing.pop_all())
        self.poll()

    def poll(self) -> None:
        """Publishes the pending checkpoint if it is completely written.

        Raises:
            OSError, LearnerError: It could not be written.
        """
        if self._pending is not None and self._pending.checkpoint.written():
            self.finish()

    def finish(self) -> None:
        """Waits for the pending checkpoint and publishes it.

        Raises:
            OSError, LearnerError: It could not be written.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            with pending.publishing:
                pending.checkpoint.finish()
            self._after_publish(pending.best)

    def try_finish(self) -> None:
        """Publishes the pending checkpoint if possible; it is not if, for example, the run's folder was renamed."""
        with contextlib.suppress(Exception):
            self.finish()

    def _after_publish(self, best: int | None) -> None:
        """Updates `best`, deletes old checkpoints, and uploads the run."""
        if best is not None:
            self._run.checkpoints.name_best(best)
        self._run.checkpoints.prune(self._keep)
        try:
            self._run.upload()
        except LeaseLostError:
            raise
        except StorageError as error:
            self._warn(f"Warning: {error} Training continues, and the next save uploads the missing files.")
