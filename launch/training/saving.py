"""How a run saves: one checkpoint at a time is written, while training goes on, and published when it is whole."""

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
    """The update that was the best then."""
    checkpoint: Checkpoint
    publishing: contextlib.ExitStack
    """When it is left, the folder gets its name; or goes, after an exception."""


class CheckpointWriter:
    """Writes the checkpoints of a run that is trained, while it is entered as a context.

    When that is left, the one that was begun is published, after a failure too if it can still be; not so where the
    user aborts.
    """

    def __init__(self, run: Run, keep: int, tell: Callable[[str], None]) -> None:
        """Takes the locked run, how many checkpoints it keeps beside the best, and what is told of warnings."""
        self._run = run
        self._keep = keep
        self._tell = tell
        self._begun: _PendingCheckpoint | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        elif issubclass(kind, Exception):
            self.abandon()
        elif self._begun is not None:
            self._begun.publishing.__exit__(kind, error, at)

    def begin(self, algo: Cory) -> None:
        """Saves the present update, unless that is done or begun; the one that was begun before is waited for.

        Raises:
            OSError, LearnerError: this one could not be written, or the one before.
        """
        from policies.checkpoint import Checkpoint

        if self._begun is not None and self._begun.update == algo.updates:
            return
        self.finish()
        best = self._run.best_update()
        if self._run.checkpoints.place(algo.updates).exists():
            self._published(best)
            return
        with contextlib.ExitStack() as publishing:
            folder = publishing.enter_context(self._run.checkpoints.saving(algo.updates))
            checkpoint = Checkpoint(algo, folder.resolve())
            self._begun = _PendingCheckpoint(algo.updates, best, checkpoint, publishing.pop_all())
        self.poll()

    def poll(self) -> None:
        """Publishes the checkpoint that was begun, if it is written.

        Raises:
            OSError, LearnerError: it could not be.
        """
        if self._begun is not None and self._begun.checkpoint.written():
            self.finish()

    def finish(self) -> None:
        """Waits for the checkpoint that was begun, and publishes it.

        Raises:
            OSError, LearnerError: it could not be written.
        """
        if self._begun is not None:
            begun, self._begun = self._begun, None
            with begun.publishing:
                begun.checkpoint.finish()
            self._published(begun.best)

    def abandon(self) -> None:
        """Publishes the checkpoint that was begun if it still can be, as not if the run's folder was renamed."""
        with contextlib.suppress(Exception):
            self.finish()

    def _published(self, best: int | None) -> None:
        if best is not None:
            self._run.checkpoints.name_best(best)
        self._run.checkpoints.prune(self._keep)
        try:
            self._run.upload()
        except LeaseLostError:
            raise
        except StorageError as error:
            self._tell(f"Warning: {error} Training goes on; the next save copies what is missing.")
