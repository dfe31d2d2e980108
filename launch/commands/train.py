"""`cory train`: trains a chain of language models into a run's folder, or continues a run."""

import contextlib
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from launch.console.cli import AllowChanges, ConfigFiles, Continue, Debug, Quiet, Words, path_or_uri
from launch.console.errors import CommandError
from policies.settings.settings import BY_CONTENT, RESUMABLE

if TYPE_CHECKING:
    from launch.run_folder.run import Run
    from policies.settings.settings import Settings

CHANGEABLE = (*RESUMABLE, *BY_CONTENT)
"""Settings that may change in a run that resumes."""


def _print_presets(wanted: bool) -> None:
    if wanted:
        from policies.settings.files import presets

        width = max(map(len, presets()))
        for name, about in presets().items():
            print(f"{name:<{width}}  {about}")
        raise typer.Exit


def train(
    ctx: typer.Context,
    words: Words = None,
    config: ConfigFiles = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|URI",
            parser=path_or_uri,
            help="The run's folder, or s3://, gs://, file://. [default: runs/NAME-TIME]",
        ),
    ] = None,
    continue_: Continue = False,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", parser=path_or_uri, help="Continue a run from its latest checkpoint."),
    ] = None,
    max_failures: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Restart from the latest checkpoint up to N times when processes die."),
    ] = 0,
    allow_changes: AllowChanges = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print all settings as YAML, and exit.")] = False,
    presets: Annotated[
        bool, typer.Option("--presets", callback=_print_presets, is_eager=True, help="List the presets, and exit.")
    ] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Train a chain of language models that teach each other; continue a run.

    Without arguments it trains the preset imdb-tiny. Settings are written as KEY=VALUE, with values as in YAML;
    `cory train --print-config` lists all of them with their meaning. Later ones win: defaults, then the preset (or
    imdb-tiny and FILE), then each -c file in order, then KEY=VALUE.

    --resume takes the settings from the run; those may change that say how long, what is written, how it is computed,
    and where data and model are. Checkpoints are pickles, which can run code: resume your own runs only.

    Examples:
      cory train
      cory train imdb-tiny lr=3e-5 seed=1 --out runs/low-lr
      cory train mine.yaml model=./my-model
      cory train --resume runs/low-lr num_updates=120

    Exit codes:
      0 all updates are done; 2 a user error; 3 stop_on_collapse ended the run; 129, 130, 143 a signal did.
    """
    from launch.console.configuration import as_yaml, split_words

    request = split_words(words or (), config or ())
    if resume and (request.preset or request.files or out):
        raise CommandError("--resume takes its settings from the run: leave out the preset, files and --out.")
    if continue_ and not out:
        raise CommandError("--continue needs the run's folder: name it with --out.")
    if allow_changes and not (resume or continue_):
        raise CommandError("--allow-changes requires --resume or --continue.")
    with contextlib.ExitStack() as stack:
        run: Run | None = None
        if resume:
            run = _open_run(resume, stack)
            settings = _resume_settings(run, request.pairs)
        else:
            settings = request.settings()
        if print_config:
            print(as_yaml(settings), end="")
            return 0
        from launch.cluster import session
        from launch.run_folder import environment
        from launch.training.steps import print_done, train_run

        session.quiet_libraries(debug)
        if continue_ and out and (run := _find_run(out)):
            stack.callback(run.unlock)
            settings = _merge_resumable(run, settings)
            if (
                reached := run.latest_checkpoint()
            ) >= settings.num_updates:  # without its checkpoint, which may be far away
                print_done(run, reached)
                return 0
        _, code = train_run(
            settings,
            f"{shlex.join(['cory', 'train', *ctx.meta['words']])}  # {environment.in_words()}",
            run=run,
            place=resume or out,
            name=request.name,
            allow_changes=allow_changes,
            max_failures=max_failures,
            quiet=quiet,
            debug=debug,
        )
        return code


def _open_run(place: str, stack: contextlib.ExitStack) -> "Run":
    """Opens a run to continue it; `stack` unlocks it."""
    from launch.run_folder.run import Run
    from launch.run_folder.storage import check_location

    check_location(place)
    run = Run.open(place)
    stack.callback(run.unlock)
    return run


def _find_run(place: str) -> "Run | None":
    """Returns the run in a folder or in storage, if there is one of which something is saved.

    One in storage is waited for as long as a process that was killed may seem to train it: nobody may be there to ask
    again.
    """
    from launch.console.retry import retry
    from launch.run_folder.lease import STALE, LeaseHeldError
    from launch.run_folder.run import Run, is_begun
    from launch.run_folder.storage import check_location

    def tell(error: Exception) -> None:
        print(f"Warning: {error} Trying again until then.", file=sys.stderr, flush=True)

    check_location(place)
    return retry(lambda: Run.open(place), STALE, LeaseHeldError, tell) if is_begun(place) else None


def _merge_resumable(run: "Run", settings: "Settings") -> "Settings":
    """Returns a run's settings with those of `settings` that may change; the others must be equal."""
    from cory_env.pickled import display_name
    from policies.settings.settings import changed_settings, make_settings
    from policies.settings.yaml12 import to_cli

    kept = run.settings()
    old, new = kept.model_dump(), settings.model_dump()
    other = [
        f"{key}={display_name(to_cli(old[key]))}" for key in changed_settings(kept, settings) if key not in CHANGEABLE
    ]
    if other:
        raise CommandError(
            f"{run.place} holds a run with {', '.join(other)}, and that cannot change in a run that goes on, only "
            f"{', '.join(CHANGEABLE)} can. Go on with it by `{run.resume_command()}`, or start a new run."
        )
    return make_settings({**old, **{key: new[key] for key in CHANGEABLE}})


def _resume_settings(run: "Run", pairs: Sequence[str]) -> "Settings":
    """Returns the settings of a run, with the few that may change changed."""
    from launch.console.configuration import read_words
    from policies.settings.settings import make_settings

    return _merge_resumable(run, make_settings({**run.settings().model_dump(), **read_words(pairs)}))
