"""`cory train`: trains a chain of language models in a run's folder, or continues a run."""

import contextlib
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from launch.console.cli import AllowChanges, ConfigFiles, Continue, Debug, Quiet, Words, path_or_uri
from launch.console.errors import CommandError
from policies.compat.imports import UNUSED_BY_TRANSFORMERS, gc_paused, packages_hidden
from policies.settings.settings import BY_CONTENT, RESUMABLE

if TYPE_CHECKING:
    from launch.run_folder.run import Run
    from policies.settings.settings import Settings

CHANGEABLE = (*RESUMABLE, *BY_CONTENT)


def train(
    ctx: typer.Context,
    words: Words = None,
    config: ConfigFiles = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|URI",
            parser=path_or_uri,
            help="Folder of the run, or a URI: s3://, gs://, file://. [default: runs/NAME-TIME]",
        ),
    ] = None,
    continue_: Continue = False,
    resume: Annotated[
        str | None,
        typer.Option(metavar="DIR|URI", parser=path_or_uri, help="Continue a run from its latest checkpoint."),
    ] = None,
    max_failures: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="If processes die, restart from the latest checkpoint up to N times."),
    ] = 0,
    allow_changes: AllowChanges = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print all settings as YAML, and exit.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Train a chain of language models that learn from each other, or continue a run.

    The first argument is a preset or a file of settings. Settings are written as KEY=VALUE, with values as in YAML;
    `cory train --print-config` lists all settings with their meaning. Later values override earlier ones: defaults,
    then the preset or FILE, then each -c file in order, then KEY=VALUE.

    --resume takes the settings from the run. Only settings for the length of training, output, computation, and the
    locations of data and model may change. Checkpoints are pickles, which can run code: resume only your own runs.
    A run in a bucket is taken over: a process that trains it on another machine ends at its next upload.

    Examples:
      cory train imdb-tiny
      cory train imdb-tiny lr=3e-5 seed=1 --out runs/low-lr
      cory train mine.yaml model=./my-model
      cory train --resume runs/low-lr num_updates=120

    Exit codes:
      0 all updates are done; 2 user error; 129, 130, 143 stopped by a signal.
    """
    from launch.console.configuration import settings_to_yaml, split_arguments

    request = split_arguments(words or (), config or ())
    if resume and (request.preset or request.files or out):
        raise CommandError("--resume conflicts with a preset, files and --out, because it takes them from the run.")
    if continue_ and not out:
        raise CommandError("--continue requires --out, the run's folder.")
    if allow_changes and not (resume or continue_):
        raise CommandError("--allow-changes requires --resume or --continue.")
    with contextlib.ExitStack() as stack:
        run = _open_run(resume, stack) if resume else None
        settings = request.settings() if run is None else _resume_settings(run, request.pairs)
        if print_config:
            print(settings_to_yaml(settings), end="")
            return 0
        if not resume:
            request.check_task()
        with gc_paused(), packages_hidden(*UNUSED_BY_TRANSFORMERS):
            from launch.cluster import session
            from launch.run_folder import environment
            from launch.training.steps import is_done, print_done, train_run

        session.quiet_libraries(debug)
        if continue_ and out and (run := _open_run(out, stack, must_exist=False)):
            settings = _merge_resumable(run, settings)
            last_update = run.latest_checkpoint()
            if is_done(run, settings, last_update):  # avoids downloading the checkpoint
                if not run.checkpoints.empty():
                    run.take_over()  # uploads what storage lacks
                print_done(run, last_update)
                return 0
        _, code = train_run(
            settings,
            f"{shlex.join(['cory', 'train', *ctx.meta['words']])}  # {environment.describe_environment()}",
            run=run,
            location=resume or out,
            name=request.name,
            allow_changes=allow_changes,
            max_failures=max_failures,
            quiet=quiet,
            debug=debug,
        )
        return code


def _open_run(location: str, stack: contextlib.ExitStack, *, must_exist: bool = True) -> "Run | None":
    """Opens and locks a run, which `stack` unlocks; None if it has no checkpoint and need not exist."""
    from launch.run_folder.storage import check_location
    from launch.run_folder.stored_run import run_type

    check_location(location)
    kind = run_type(location)
    if not (must_exist or kind.is_started(location)):
        return None
    run = kind.open(location)
    stack.callback(run.unlock)
    return run


def _merge_resumable(run: "Run", settings: "Settings") -> "Settings":
    """Applies the resumable settings of `settings` to a run's settings."""
    from cory_env.pickled import display_name
    from policies.settings.resolve import updates_of_passes
    from policies.settings.settings import OPEN_VALUES, changed_settings, make_settings
    from policies.settings.yaml12 import to_cli

    run_settings = run.settings
    old, new = run_settings.model_dump(), settings.model_dump()
    if settings.num_passes is not None:
        new |= {"num_passes": None, "num_updates": updates_of_passes(settings, _count_training_queries(run))}
        settings = make_settings(new)
    fixed = [
        f"{key}={display_name(to_cli(old[key]))}"
        for key in changed_settings(run_settings, settings)
        if key not in CHANGEABLE
    ]
    if fixed:
        raise CommandError(
            f"{run.location} is a run with {', '.join(fixed)}, which cannot change when it resumes; only "
            f"{', '.join(CHANGEABLE)} can. Resume it with `{run.resume_command()}`, or start a new run."
        )
    return make_settings(old | {key: new[key] for key in CHANGEABLE if (key, new[key]) not in OPEN_VALUES.items()})


def _count_training_queries(run: "Run") -> int:
    from launch.run_folder.layout import SOURCES
    from launch.run_folder.sources import Sources

    sources = Sources.read(run.path)
    if sources is None:
        raise CommandError(f"{run.location} has no {SOURCES}, so num_passes is unknown. Set num_updates instead.")
    return sources.queries["train"].count


def _resume_settings(run: "Run", pairs: Sequence[str]) -> "Settings":
    """Returns the settings of a run with changes to resumable settings applied."""
    from launch.console.configuration import parse_overrides
    from policies.settings.settings import make_settings

    return _merge_resumable(run, make_settings({**run.settings.model_dump(), **parse_overrides(pairs)}))
