"""The steps of `cory train` and `cory_rllib.train`: check, create or reopen the run, train."""

import sys

from cory_env.tasks import tasks_reused
from launch.cluster import session
from launch.cluster.gpus import check_gpus
from launch.cluster.memory import check_run_memory
from launch.console.errors import CommandError
from launch.run_folder.layout import RUNS, SOURCES
from launch.run_folder.locations import locate_files
from launch.run_folder.run import Run
from launch.run_folder.sources import Sources, collect_sources
from launch.run_folder.storage import check_location
from launch.training import preflight, tracking
from launch.training.description import describe_settings
from launch.training.source_check import check_sources, incomparable_warning
from launch.training.start import create_run, lacks_final, latest_valid_checkpoint, starting_policies
from policies.settings.settings import Settings


@tasks_reused()
def train_run(
    settings: Settings,
    origin: str,
    *,
    run: Run | None = None,
    location: str | None = None,
    name: str = "",
    allow_changes: bool = False,
    max_failures: int = 0,
    quiet: bool = False,
    debug: bool = False,
    keep_local: bool = False,
) -> tuple[Run, int]:
    """Trains a run to the end, or until the user stops it.

    Args:
        origin: The command that started the training; the first line of `config.yaml`.
        run: The run to continue from its latest checkpoint; None: a new run.
        location: Folder or URI of a new run; None: a new folder under `runs/`.

    Returns:
        The run, and the exit code of `training.train_locked_run`; 0 if it was already done.
    """
    tracking.check_trackers(settings)
    set_names = settings.model_fields_set
    before = None if run is None else Sources.read(run.path)
    located_settings = settings
    if before is not None:  # paths may be relative to the folder in which the run was started
        located_settings = locate_files(settings, before.paths)
    if run is None:
        check_location(location or str(RUNS / name))
        settings = located_settings = preflight.fill_in_settings(settings)
    task, tokenizers = preflight.check_run_settings(located_settings)
    for warning in preflight.data_warnings(located_settings, task) if run is None else ():
        print(f"Warning: {warning}", file=sys.stderr)
    sources = collect_sources(located_settings, task, tokenizers)
    if run is not None and before is not None:
        last_update = run.latest_checkpoint()
        changes = check_sources(before, sources, located_settings, run.location, allow_changes)
        for change in changes:
            print(incomparable_warning(change, last_update), file=sys.stderr)
        sources = sources.after_resume(before, changes, last_update)
    elif run is not None and not allow_changes:
        raise CommandError(
            f"{run.location} has no {SOURCES}, so its data and model cannot be checked for changes. "
            "Restore the file, or resume with --allow-changes."
        )
    session.check_driver(settings)
    check_gpus(settings)
    done = None
    if run is not None:
        done = reopen(run, settings, origin)
        if is_done(run, settings, done):
            print_done(run, done)
            return run, 0
        sources.write(run.path)
    else:
        check_run_memory(settings)
        starting_policies(settings)  # fail before the folder is created
        run = create_run(location, name, settings, sources, origin)
        run.keep_local = keep_local

    if not quiet:
        print(describe_settings(located_settings, set_names, task), flush=True)
    from launch.training.training import train_locked_run

    try:
        return run, train_locked_run(run, located_settings, done, max_failures=max_failures, quiet=quiet, debug=debug)
    except CommandError:
        run.abort()
        raise
    finally:
        run.unlock()


def reopen(run: Run, settings: Settings, origin: str) -> int:
    """Locks a run, takes it over, rewinds it to its latest checkpoint unless it is done, and returns that update."""
    run.lock()
    run.take_over()
    done = latest_valid_checkpoint(run, lambda text: print(text, file=sys.stderr))
    if done is None:
        raise CommandError(f"{run.location} has no checkpoint to resume from. Start a new run.")
    if is_done(run, settings, done):
        return done
    run.cut_after(done)
    if settings != run.settings:
        run.write_settings(settings, origin)
    return done


def is_done(run: Run, settings: Settings, done: int) -> bool:
    """Returns whether a run with a checkpoint of update `done` has nothing left to do."""
    return done >= settings.num_updates and not lacks_final(run, settings)


def print_done(run: Run, done: int) -> None:
    """Prints that a run is done, and removes the local copy of a run in storage."""
    run.remove_local()
    print(
        f"{run.location} is done: all {done} updates are completed. To train longer: {run.resume_command()} "
        f"num_updates={2 * done}"
    )
