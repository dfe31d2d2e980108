"""`cory train`: trains a chain of language models into a run's folder, or continues a run."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launch.console.errors import CommandError
from launch.console.parser import Parser, local_path, path_or_uri, run
from launch.console.shell import one_line
from policies.settings.settings import BY_CONTENT, RESUMABLE

if TYPE_CHECKING:
    from launch.run_folder.run import Run
    from policies.settings.settings import Settings

CHANGEABLE = (*RESUMABLE, *BY_CONTENT)
"""Settings that may change in a run that resumes."""
USAGE = """cory train [PRESET|FILE] [-c FILE ...] [key=value ...] [options]
       cory train --resume RUN [key=value ...] [options]"""

EPILOG = """presets:
{presets}

settings:
  Any setting, as key=value; `cory train --print-config` lists them all with their meaning. Later ones win:
  defaults, then the preset, or the preset imdb-tiny and FILE, then each -c file in order, then key=value. Values are
  YAML scalars (1.2). A word that is a preset's name is that preset, whatever files there are.

examples:
  cory train
  cory train imdb-tiny lr=3e-5 seed=1 --out runs/low-lr
  cory train mine.yaml model=./my-model
  cory train --resume runs/low-lr updates=120

exit codes:
  0 all updates are done; 2 a mistake that you can correct; 3 stop_on_collapse ended the run; 129, 130, 143 you did.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0; 2 after a user's mistake; 3 when `stop_on_collapse` ended the run; 129, 130 or 143 when a signal did.
    """
    words = sys.argv[1:] if argv is None else argv
    options = parse(words)
    return run(lambda: _command(options, words), debug=options.debug)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Reads the command's words; a word that is none of them ends the process."""
    return _parser(help_wanted=not {"-h", "--help"}.isdisjoint(words)).parse_intermixed_args(words)


def _parser(help_wanted: bool) -> Parser:
    epilog = None
    if help_wanted:
        from policies.settings.files import presets

        found = presets()
        width = max(map(len, found))
        epilog = EPILOG.format(presets="\n".join(f"  {name:<{width}}  {text}" for name, text in found.items()))
    parser = Parser(
        prog="cory train",
        usage=USAGE,
        description="Train a chain of language models that teach each other; continue a run.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="PRESET|FILE, key=value",
        help="a preset (default: imdb-tiny) or a YAML; settings",
    )
    parser.add_argument(
        "-c", "--config", action="append", default=[], type=local_path, metavar="FILE", help="YAML of settings"
    )
    parser.add_argument(
        "--out",
        type=path_or_uri,
        metavar="DIR|URI",
        help="the run's folder, or s3://, gs://, file:// (default: runs/NAME-TIME)",
    )
    parser.add_argument(
        "--continue", action="store_true", dest="go_on", help="if --out holds this run already, go on with it"
    )
    parser.add_argument(
        "--resume",
        type=path_or_uri,
        metavar="RUN",
        help="continue a run from its latest checkpoint; settings may change that say how long, what is written, and "
        "how it is computed, and where its data and model are now. Checkpoints are pickles, which can run code: resume "
        "your own runs only",
    )
    parser.add_argument(
        "--max-failures",
        type=_count,
        default=0,
        metavar="N",
        help="when processes or machines die that the run cannot do without, go on from the latest checkpoint, up to N "
        "times (default: 0)",
    )
    parser.add_argument(
        "--allow-changes",
        action="store_true",
        help="continue a run although its queries, model, tokenizer or templates are not what it began with",
    )
    parser.add_argument("--print-config", action="store_true", help="print all settings as YAML, and exit")
    parser.add_argument("--quiet", action="store_true", help="print only where the results are")
    parser.add_argument("--debug", action="store_true", help="show libraries' logs and tracebacks")
    return parser


def _command(options: argparse.Namespace, words: Sequence[str]) -> int:
    with contextlib.ExitStack() as stack:
        return _train(options, words, stack)


def _train(options: argparse.Namespace, words: Sequence[str], stack: contextlib.ExitStack) -> int:
    """Does what the words say; `stack` unlocks the run when it is closed."""
    from launch.cluster import session
    from launch.console.configuration import as_yaml, asked
    from launch.console.output import print_utf8
    from launch.run_folder import environment
    from launch.run_folder.run import Run
    from launch.run_folder.storage import check_place

    request = asked(options.words, options.config)
    if options.resume and (request.preset or request.files or options.out):
        raise CommandError("--resume takes its settings from the run: leave out the preset, files and --out.")
    if options.go_on and not options.out:
        raise CommandError("--continue needs the run's folder: name it with --out.")
    if options.allow_changes and not (options.resume or options.go_on):
        raise CommandError("--allow-changes requires --resume or --continue.")

    place = options.resume or options.out
    run: Run | None = None
    if options.resume:
        check_place(place)
        run = Run.open(place)
        stack.callback(run.unlock)
        settings = _resumed(run, request.pairs)
    else:
        settings = request.settings()
    if options.print_config:
        print_utf8(as_yaml(settings))
        return 0
    session.quiet_libraries(options.debug)
    origin = f"{one_line(['cory', 'train', *words])}  # {environment.in_words()}"

    from launch.training.steps import tell_done, train_run

    if options.go_on:
        check_place(place)
        if run := _find(place):
            stack.callback(run.unlock)
            settings = _same(run, settings)
            if (reached := run.reached()) >= settings.updates:  # without its checkpoint, which may be far away
                tell_done(run, reached)
                return 0
    _, code = train_run(
        settings,
        origin,
        run=run,
        place=place,
        name=request.name,
        allow_changes=options.allow_changes,
        max_failures=options.max_failures,
        quiet=options.quiet,
        debug=options.debug,
    )
    return code


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not 0 or a larger whole number")
    return int(text)


def _find(place: str) -> "Run | None":
    """Returns the run in a folder or in storage, if there is one of which something is saved.

    One in storage is waited for as long as a process that was killed may seem to train it: nobody may be there to ask
    again.
    """
    from launch.console.patience import patiently
    from launch.run_folder.lease import STALE, Held
    from launch.run_folder.run import Run, is_begun

    def tell(error: Exception) -> None:
        print(f"Warning: {error} Trying again until then.", file=sys.stderr, flush=True)

    return patiently(lambda: Run.open(place), STALE, Held, tell) if is_begun(place) else None


def _same(run: "Run", settings: "Settings") -> "Settings":
    """Returns a run's settings with those of `settings` that may change; the others must be equal."""
    from cory_env.pickled import shown
    from policies.settings.core_yaml import as_word
    from policies.settings.settings import changed_settings, make_settings

    kept = run.settings()
    old, new = kept.model_dump(), settings.model_dump()
    other = [f"{key}={shown(as_word(old[key]))}" for key in changed_settings(kept, settings) if key not in CHANGEABLE]
    if other:
        raise CommandError(
            f"{run.place} holds a run with {', '.join(other)}, and that cannot change in a run that goes on, only "
            f"{', '.join(CHANGEABLE)} can. Go on with it by `{run.resume_command()}`, or start a new run."
        )
    return make_settings({**old, **{key: new[key] for key in CHANGEABLE}})


def _resumed(run: "Run", pairs: Sequence[str]) -> "Settings":
    """Returns the settings of a run, with the few that may change changed."""
    from launch.console.configuration import read_words
    from policies.settings.settings import make_settings

    return _same(run, make_settings({**run.settings().model_dump(), **read_words(pairs)}))
