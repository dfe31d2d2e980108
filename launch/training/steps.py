"""The steps of `cory train` and `cory_rllib.train`: check what can be checked, make or reopen the run, train it."""

import os
import sys

from launch.cluster import session
from launch.cluster.gpus import check_gpus
from launch.console.errors import IN_JOB, CommandError
from launch.run_folder.layout import RUNS, SOURCES
from launch.run_folder.locations import add_module_folders, located
from launch.run_folder.run import Run
from launch.run_folder.sources import Sources, function_names, sources_of
from launch.run_folder.storage import check_location
from launch.training import preflight, tracking
from launch.training.comparable import check_sources, consequence
from launch.training.start import create_run, latest_valid_checkpoint, starting_policies
from policies.settings.settings import Settings


def train_run(
    settings: Settings,
    origin: str,
    *,
    run: Run | None = None,
    place: str | None = None,
    name: str = "",
    allow_changes: bool = False,
    max_failures: int = 0,
    quiet: bool = False,
    debug: bool = False,
) -> tuple[Run, int]:
    """Trains a run to the end, or until the user stops it.

    Args:
        settings: of all of the run.
        origin: what asked for it; `config.yaml` begins with that.
        run: continue it from its latest checkpoint; None: a new one.
        place: of a new one: its folder or URI; None: a fresh folder under `runs/`.
        name: of such a folder.
        allow_changes: continue although its queries, model, tokenizer or templates are not what it began with.
        max_failures, quiet, debug: as of `training.train`.

    Returns:
        The run, and the exit code as of `training.train`; 0 where it was done already.

    Raises:
        SettingsError: a setting contradicts another.
        CommandError: something cannot be used, or the run cannot go on. Of a new run nothing is left then.
        StorageError: storage cannot be read or written.
    """
    tracking.check(settings)
    before = None if run is None else Sources.read(run.path)
    present = settings
    if before is not None:  # the files may be where the run began, as its reward, credit and task may be
        add_module_folders(function_names(settings, settings.reward_spec), before.paths)
        present = located(settings, before.paths)
    if run is None:
        check_location(place or str(RUNS / name))
    task, tokenizers = preflight.check(present)
    sources = sources_of(present, task, tokenizers)
    if run is not None and before is not None:
        reached = run.latest_checkpoint()
        changes = check_sources(before, settings, task, sources, run.place, allow_changes)
        for change in changes:
            print(consequence(change, reached), file=sys.stderr)
        sources = sources.continuing(before, settings, changes, reached)
    elif run is not None and not allow_changes:
        raise CommandError(
            f"{run.place} has no {SOURCES}, so nothing tells whether its data and model are those that it began with. "
            "Restore it, or resume with --allow-changes."
        )
    if IN_JOB not in os.environ:  # a job's driver may have a GPU of its own; `cory submit` checks
        session.check_driver(settings)
    check_gpus(settings)
    done = None
    if run is not None:
        done = reopen(run, settings, origin)
        if done >= settings.num_updates:
            print_done(run, done)
            return run, 0
        sources.write(run.path)
    else:
        starting_policies(settings)  # before there is a folder
        settings = present = settings.with_chat_date()
        run = create_run(place, name, settings, sources, origin)

    from launch.training.training import train_locked_run

    try:
        return run, train_locked_run(run, present, done, max_failures=max_failures, quiet=quiet, debug=debug)
    except CommandError:
        run.abort()
        raise
    finally:
        run.unlock()


def reopen(run: Run, settings: Settings, origin: str) -> int:
    """Locks a run and sets it back to its latest checkpoint, of which it returns the update.

    One that is done stays as it is.

    Raises:
        CommandError: it has no checkpoint.
    """
    run.lock()
    run.download_checkpoint()
    done = latest_valid_checkpoint(run, lambda text: print(text, file=sys.stderr))
    if done is None:
        raise CommandError(f"{run.place} has no checkpoint to go on from. Start a new run.")
    if done >= settings.num_updates:
        return done
    run.cut_after(done)
    if settings != run.settings():
        run.write_settings(settings, origin)
    return done


def print_done(run: Run, done: int) -> None:
    """Says that a run is done; of one in storage, which has all of it, nothing stays here."""
    run.remove_local()
    print(
        f"{run.place} is done: it has all of its {done} updates. To lengthen it: {run.resume_command()} "
        f"num_updates={2 * done}"
    )
