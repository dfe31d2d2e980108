"""Asynchronous checkpointing: one checkpoint at a time is written during training and published when complete.

A run in storage is then uploaded in a thread, so that slow storage does not delay updates. One upload runs at a time;
if checkpoints are published meanwhile, one more follows, with all that is new.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

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

    On exit, the pending checkpoint is published and uploaded, even after a failure if possible. If the user aborts, it
    is dropped, and an upload stops after its current file.
    """

    def __init__(self, run: Run, keep: int, warn: Callable[[str], None]) -> None:
        """Creates the writer for a locked run; it keeps the latest `keep` checkpoints, and the best."""
        self._run = run
        self._keep = keep
        self._warn = warn
        self._pending: _PendingCheckpoint | None = None
        self._best: int | None = None  # the best update when the last published checkpoint was started
        self._thread = ThreadPoolExecutor(1, "upload")
        self._upload: Future[None] | None = None
        self._uploading: list[int] = []  # the checkpoints that the upload may read
        self._is_outdated = False  # a checkpoint was published after the upload had started
        self._aborted = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
            elif issubclass(kind, Exception):
                with contextlib.suppress(Exception):  # for example, the run's folder was renamed
                    self.finish()
            else:
                self._aborted.set()
                if self._pending is not None:
                    self._pending.publishing.__exit__(kind, error, traceback)
        finally:
            self._thread.shutdown()  # waits: the run is unlocked next

    def start(self, algo: Cory) -> None:
        """Starts saving the current update, unless it is saved or pending; first publishes the previous checkpoint."""
        from policies.checkpoint import Checkpoint

        if self._pending is not None and self._pending.update == algo.updates:
            return
        self._publish()
        best = self._run.best_update
        if self._run.checkpoints.path_of(algo.updates).exists():
            self._after_publish(best)
            return
        with contextlib.ExitStack() as publishing:
            folder = publishing.enter_context(self._run.checkpoints.saving(algo.updates))
            checkpoint = Checkpoint(algo, folder.resolve())
            self._pending = _PendingCheckpoint(algo.updates, best, checkpoint, publishing.pop_all())
        self.poll()

    def poll(self) -> None:
        """Publishes the pending checkpoint if it is completely written, and reports an upload that has failed."""
        if self._pending is not None and self._pending.checkpoint.written():
            self._publish()
        if self._upload is not None and self._upload.done():
            self._continue_upload()

    def finish(self) -> None:
        """Waits for the pending checkpoint, publishes it, and waits for the upload."""
        self._publish()
        while self._upload is not None:
            self._continue_upload(wait=True)

    def _publish(self) -> None:
        """Waits for the pending checkpoint and publishes it."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            with pending.publishing:
                pending.checkpoint.finish()
            self._after_publish(pending.best)

    def _after_publish(self, best: int | None) -> None:
        """Updates `best`, and uploads the run."""
        if best is not None:
            self._run.checkpoints.name_best(best)
        self._best, self._is_outdated = best, True
        self._continue_upload()

    def _continue_upload(self, *, wait: bool = False) -> None:
        """Reports an upload that has ended, deletes old checkpoints, and starts to upload what was published since."""
        if self._upload is not None and (wait or self._upload.done()):
            upload, self._upload, self._uploading = self._upload, None, []
            try:
                upload.result()
            except StorageError as error:
                self._warn(f"Warning: {error} Training continues, and the next save uploads the missing files.")
        self._run.checkpoints.prune(self._keep, self._uploading)
        if self._upload is None and self._is_outdated:
            self._is_outdated = False
            self._uploading = self._run.checkpoints.updates()
            self._upload = self._thread.submit(self._run.upload, self._best, self._aborted.is_set)
