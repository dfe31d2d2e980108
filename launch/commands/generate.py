"""`cory generate RUN [QUERY]`: the trained chain at work, pioneer first, each response as it is written."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator

from launch.console.errors import CommandError
from launch.console.parser import Parser, run

EPILOG = """Without QUERY, queries are read from the standard input, one per line; at a terminal they are asked for.

Resuming a run can execute what is in its checkpoint; this cannot: it reads the policies' weights and nothing else. The
base model is loaded as in training, its own code included if the run has trust_remote_code.

examples:
  cory generate runs/demo "This movie"
  cory generate runs/demo "This movie" --roles llm_2         one policy alone
  cory generate runs/demo "This movie" --roles mean          the mean of the weights of all (docs/averaging.md)
  cory generate runs/demo --roles llm_2,llm_1 --json < queries.txt
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0, 2 after a user's mistake, 130 after Ctrl-C.
    """
    parser = Parser(
        prog="cory generate",
        description="Let the policies of a run answer queries, in the chain's order.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder, or its URI")
    parser.add_argument("query", metavar="QUERY", nargs="?", help="what is asked")
    parser.add_argument(
        "--checkpoint", metavar="C", help="best, latest or an update's number (default: best, or else latest)"
    )
    parser.add_argument(
        "--roles", metavar="P,...", help="the policies in the order they answer (default: as training left them)"
    )
    parser.add_argument(
        "--temperature",
        type=_at_least_zero,
        metavar="T",
        help="of sampling; 0: the likeliest token, always (default: the run's)",
    )
    parser.add_argument("--seed", type=_whole, metavar="N", help="of sampling (default: the run's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per query")
    parser.add_argument("--debug", action="store_true", help="show libraries' logs and tracebacks")
    options = parser.parse_intermixed_args(argv)
    return run(lambda: generate(options), debug=options.debug)


def generate(options: argparse.Namespace) -> int:
    """Answers the queries.

    Raises:
        CommandError: no such run, checkpoint or policy, an empty query, or prompts that need more than a query.
        QueryTooLong: a query does not fit the prompt that the policies were trained with.
    """
    from launch.cluster import session
    from launch.models.trained import open_trained

    session.quiet_libraries(options.debug)
    if options.query is not None and not options.query.strip():
        raise CommandError("The query is empty. Write what is asked, or leave it out to be asked for it.")
    trained = open_trained(options.run, options.checkpoint)
    settings = trained.settings
    players = trained.named(options.roles.replace(" ", "").split(",")) if options.roles else trained.players
    print(f"{' then '.join(players)}, after update {trained.update} of {options.run}", file=sys.stderr)

    from cory_env.chain import QueryTooLong
    from launch.models.token_printer import TokenPrinter
    from launch.models.trained_chain import TrainedChain

    chain = TrainedChain(
        trained,
        players,
        settings.temperature if options.temperature is None else options.temperature,
        settings.seed if options.seed is None else options.seed,
    )
    asking = options.query is None and sys.stdin.isatty() and sys.stdout.isatty()
    printer = TokenPrinter(sys.stdout, repeat=not asking)
    for number, text in enumerate(_queries(options.query, asking)):
        try:
            answered = chain.answer(number, text, None if options.json else printer)
        except QueryTooLong as error:
            if not asking:
                raise
            printer.line(str(error))
        except KeyboardInterrupt:
            printer.line("")  # a response may be half written
            raise
        else:
            if options.json:
                printer.line(json.dumps(answered))
    return 0


def _queries(query: str | None, asking: bool) -> Iterator[str]:
    """Yields the query, or else what the user types at a terminal until Ctrl-D, or the lines of the standard input.

    Raises:
        CommandError: one is not text.
    """
    try:
        for text in _lines(asking) if query is None else [query]:
            text.encode()  # Python lets bytes that are not UTF-8 pass, as halves of characters
            yield text
    except UnicodeError as error:
        raise CommandError(f"A query is not UTF-8 text: {error}.") from error


def _lines(asking: bool) -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` arrow keys and a history
    try:
        while True:
            line = input("query: " if asking else "")
            if line.strip():
                yield line
    except EOFError:
        if asking:
            print()


def _at_least_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"it is {text}, but must be a number, 0 or more")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"it is {text}, but must be a whole number, 0 or more")
    return int(text)
