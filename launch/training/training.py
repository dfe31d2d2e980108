"""Trains a run in its folder: starts Ray and the algorithm, trains, records metrics, saves and prints results."""

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cory_env.tasks import Task, tasks_reused
from launch.cluster import session
from launch.console import output
from launch.console.errors import CommandError
from launch.console.interrupts import Interrupts, hangup_blocked
from launch.display.terminal import Terminal
from launch.run_folder import final
from launch.run_folder.layout import REJECTED_BATCH_FILE
from launch.run_folder.records import Update, to_json
from launch.run_folder.run import Run
from launch.run_folder.sources import Sources, digest_queries
from launch.run_folder.storage import StorageError, WriterChangedError
from launch.training.description import describe_run
from launch.training.saving import CheckpointWriter
from launch.training.start import is_retryable, lacks_final, latest_valid_checkpoint, starting_policies
from launch.training.summary import last_answer_note, print_summary
from launch.training.tracking import Trackers, flat_metrics, open_trackers
from policies.compat.imports import gc_paused
from policies.files import atomic_file
from policies.settings.processes import processes
from policies.settings.settings import Settings

if TYPE_CHECKING:
    from policies.cory import Cory

HELD_OUT_SAMPLES = 3
"""Number of held-out queries whose responses are recorded before and after training."""


def train_locked_run(
    run: Run, settings: Settings, done: int | None, *, max_failures: int = 0, quiet: bool, debug: bool
) -> int:
    """Trains in a locked run folder, to the end or until the user stops it.

    Args:
        done: Continue from the checkpoint of this update; None: start from update 0.
        max_failures: Number of retryable failures (`is_retryable`) after which training resumes from the latest
            checkpoint.

    Returns:
        0; 128 + signal number if a signal stopped it.
    """
    terminal = Terminal(settings, output.dup_stdout(), done=done or 0, quiet=quiet, bar=not debug)

    def confirm() -> None:
        terminal.print("Finishing this update, then saving. Press Ctrl-C again to abort immediately.", True)
        if interrupts.requested is not None and not debug:
            print(f"{interrupts.requested.name}: the run stops after this update.", file=sys.stderr)  # in its log

    interrupts = Interrupts(confirm)
    terminal.print(describe_run(settings, terminal.arrow))
    terminal.print(f"Run folder: {run.location}" + (f" (resuming after update {done})" if done is not None else ""))
    terminal.print()
    with interrupts:
        try:
            with _explain_failure(run):
                log = contextlib.nullcontext() if debug else output.redirect_output(run.log)
                with log, output.forward_warnings(lambda text: terminal.print(text, True)), terminal:
                    last_update = Trainer(run, settings, terminal, interrupts, debug).train(done, max_failures)
                return _finish_run(run, settings, terminal, interrupts, last_update)
        except KeyboardInterrupt:
            terminal.print(f"Aborted. {_how_to_resume(run)}", True)
            return interrupts.exit_code


def _finish_run(run: Run, settings: Settings, terminal: Terminal, interrupts: Interrupts, last_update: int) -> int:
    """Plots and summarises a run that is saved up to `last_update`, finishes its upload, and returns its exit code.

    The first signal is ignored, because this takes only seconds.
    """
    from launch.display.plot import draw_run

    stopped = last_update < settings.num_updates
    if stopped:
        terminal.print(f"Stopped. {_how_to_resume(run)}", True)
    else:
        draw_run(run.metrics, settings, run.curves)
        print_summary(run, settings, terminal)
    run.finish_upload()
    if not run.keep_local:
        run.remove_local()
    return interrupts.exit_code if stopped else 0


@contextlib.contextmanager
def _explain_failure(run: Run) -> Iterator[None]:
    """Uploads a failed run, and adds notes to its exception: saved files and how to resume."""
    try:
        yield
    except WriterChangedError:
        raise  # resuming would take the run back
    except Exception as error:
        batch = _save_rejected_batch(run, error)
        if not isinstance(error, StorageError):
            try:
                run.finish_upload()
            except (StorageError, WriterChangedError) as storage_error:
                error.add_note(str(storage_error))
        if batch is not None:
            error.add_note(f"The rejected batch is saved in {batch}. Load it with safetensors.torch.load_file.")
        error.add_note(_how_to_resume(run))
        raise


@dataclass
class Trainer:
    """Trains an algorithm in a run's folder, with retries after retryable failures."""

    run: Run
    settings: Settings
    terminal: Terminal
    interrupts: Interrupts
    debug: bool
    trackers: Trackers = field(default_factory=Trackers)

    def train(self, done: int | None, max_failures: int) -> int:
        """Trains with retries; returns the number of completed and saved updates."""
        failures = 0
        while True:
            try:
                return self._attempt(done, again=failures > 0)
            except Exception as error:
                failures += 1
                if failures > max_failures or self.interrupts.requested is not None or not is_retryable(error):
                    raise
                done = latest_valid_checkpoint(self.run, self._warn)
                if done is None and not self.run.checkpoints.empty():  # all are damaged: leave them for inspection
                    raise
                message = (str(error).strip() or type(error).__name__).splitlines()[0]
            restart = "Starting again from update 0." if done is None else f"Resuming after update {done}."
            self._warn(f"Failure {failures} of at most {max_failures}: {message} {restart}")
            self.terminal.rewind(done or 0)
            self.run.cut_after(-1 if done is None else done)
            self.interrupts.training = False
            gc.collect()  # free the models of the failed attempt before the next one loads them

    def _attempt(self, done: int | None, again: bool) -> int:
        """Trains from the checkpoint of update `done`, or from the start, to the end."""
        settings, run = self.settings, self.run
        with contextlib.ExitStack() as stack:
            if again or settings.num_runners:  # the data may have changed since it was checked
                stack.enter_context(tasks_reused())
            # Lost machines get as much time to return as lost runners.
            retry_seconds = 2 * settings.generation_timeout if again else 0.0
            on_start = partial(self.terminal.stage, "Starting Ray")
            kinds = processes(settings)
            stack.enter_context(session.run_session(kinds, self.debug, retry_seconds, on_start=on_start))
            self.interrupts.install()  # Ray replaced the SIGTERM handler

            self.terminal.stage("Loading the models")
            with hangup_blocked():  # engines may start processes too
                algo = self._build(is_new=done is None)
            stack.push(partial(_stop_after_failure, algo))
            self.check_queries(algo.task)
            latest = run.checkpoints.latest()
            if done is not None and latest is not None:
                algo.restore_from_path(str(latest[1].resolve()))

            self.trackers = stack.enter_context(open_trackers(run.path, settings, after=done))
            for location in self.trackers.locations():
                self.terminal.print(location)
            checkpoints = stack.enter_context(CheckpointWriter(run, settings.keep_checkpoints, self._warn))
            if done is None:
                self._evaluate_start(algo, checkpoints)
            if not lacks_final(run, settings):  # otherwise it ended while it was evaluated
                self._loop(algo, checkpoints)
            if lacks_final(run, settings):
                assert settings.test_queries is not None
                final.write_final(run.final, final.evaluate_final(algo, settings.test_queries))
            algo.stop()
            return algo.updates

    def _build(self, is_new: bool) -> "Cory":
        """Builds the algorithm; policies of a resumed run are restored from its checkpoint later."""
        with gc_paused():
            from policies.cory import CoryConfig

        start = starting_policies(self.settings) if is_new else None
        return CoryConfig().cory(**self.settings.model_dump()).cory(start_from=start and str(start)).build_algo()

    def check_queries(self, task: Task) -> None:
        """Checks that queries, which are read again after a failure, are unchanged."""
        sources = Sources.read(self.run.path)
        if sources is not None and sources.queries != digest_queries(task):
            raise CommandError(
                f"The data of task {task.name} changed during training. Restore the data, then resume the run."
            )

    def _evaluate_start(self, algo: "Cory", checkpoints: CheckpointWriter) -> None:
        """Evaluates and saves the untrained policies, as the baseline and the first checkpoint."""
        self.terminal.stage("Evaluating the untrained policies")
        report = {"update": 0, **algo.evaluator.evaluate()}
        if warnings := algo.health.observe_start(report):
            report["health"] = warnings
        self._record(report, algo.evaluator.samples(algo.mapping, HELD_OUT_SAMPLES))
        if note := last_answer_note(cast(Update, to_json(report)), arrow=self.terminal.arrow):
            self.terminal.print(note)
        checkpoints.start(algo)

    def _loop(self, algo: "Cory", checkpoints: CheckpointWriter) -> None:
        """Trains until all updates are done or the user stops the run; saves the last update in both cases.

        Metrics are written before the checkpoint of the same update, so a resumed run never misses a line. The final
        evaluation follows, so a run killed there has lost no update.
        """
        settings = self.settings
        self.interrupts.training = True
        # Otherwise `_finish_run` would load Matplotlib while the user waits.
        threading.Thread(target=import_module, args=("launch.display.plot",), daemon=True).start()
        saved_at = time.monotonic()
        if self.terminal.has_bar:
            self.terminal.stage("Training")
        while algo.updates < settings.num_updates and self.interrupts.requested is None:
            report: dict[str, Any] = algo.train()["cory"]
            update = algo.updates
            is_last = update == settings.num_updates
            self._record(report, algo.evaluator.samples(algo.mapping, HELD_OUT_SAMPLES) if is_last else ())
            is_best = "evaluation" in report and self.run.best_update == update
            minutes = (time.monotonic() - saved_at) / 60
            is_old = settings.checkpoint_minutes is not None and minutes >= settings.checkpoint_minutes
            if is_best or is_old or update % settings.checkpoint_every == 0:
                checkpoints.start(algo)
                saved_at = time.monotonic()
            checkpoints.poll()
        # A signal may have ended the loop between two periodic checkpoints.
        if not self.run.checkpoints.path_of(algo.updates).exists():
            checkpoints.start(algo)
        checkpoints.finish()

    def _record(self, report: Mapping[str, Any], held_out: Sequence[object]) -> None:
        """Records and prints an update: metrics, samples if it was evaluated, and samples of held-out queries."""
        line, update = cast(dict[str, Any], to_json({**report})), report["update"]
        samples = line.pop("samples", [])
        if "evaluation" not in line:
            samples = []
        for is_held_out, rows in ((False, samples), (True, cast(list[Any], to_json(held_out)))):
            for row in rows:
                self.run.samples_file.append({"update": update, "held_out": is_held_out, **row})
            if rows:
                self.trackers.log_samples(update, rows, is_held_out)
        self.run.record(cast(Update, line))
        self.trackers.log(update, flat_metrics(cast(Update, line)))
        self.terminal.update(cast(Update, line))
        self.terminal.samples(samples)

    def _warn(self, text: str) -> None:
        self.terminal.print(text, True)


def _stop_after_failure(algo: "Cory", kind: type[BaseException] | None, *_: object) -> None:
    """Stops the processes of a failed algorithm, ignoring further errors."""
    if kind is not None and not issubclass(kind, KeyboardInterrupt):
        with contextlib.suppress(Exception):
            algo.stop()


def _save_rejected_batch(run: Run, error: Exception) -> Path | None:
    """Saves the batch of an update that was rejected for a non-finite gradient, and returns the file."""
    from safetensors.torch import save_file

    from policies.learning.rows import NonFiniteUpdate

    if not isinstance(error, NonFiniteUpdate):
        return None
    file = run.path / REJECTED_BATCH_FILE.format(error.update, error.name)
    with atomic_file(file) as unfinished:
        save_file({name: column.contiguous() for name, column in error.rows.columns().items()}, unfinished)
    return file


def _how_to_resume(run: Run) -> str:
    if not run.path.exists():
        if run.location != str(run.path):
            return f"The run is in {run.location}."
        return "Its folder was moved or removed. If it was moved, resume with `cory train --resume` and the new path."
    latest = run.checkpoints.latest()
    if latest is None:
        return "No checkpoint was saved."
    return f"Update {latest[0]} is saved. Resume with:\n  {run.resume_command()}"
