"""`cory generate RUN [QUERY]`: the trained chain at work, pioneer first, each response as it is written."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from launch.console.errors import CommandError
from launch.console.parser import Parser, local_path, number_type, path_or_uri, positive_int, run

if TYPE_CHECKING:
    from cory_env.message import Message
    from launch.models.trained import Stored
    from launch.models.trained_chain import TrainedChain

EPILOG = """Without QUERY, queries are read from the standard input, one per line; at a terminal they are asked for. Of
a run with chat=true that is a conversation: each query goes on with what was said; /new begins another one.

--in FILE answers all rows of a file of data into the file of --out, many at once: by vLLM where that is
installed, and never half a file. FILE?query=COLUMN names the column of the query (default: query), which may be a list
of messages if the run has chat=true; other columns are copied, and fill in prompts that hold them. Killed or stopped,
the same command goes on. A line of it: {"row": 0, "sample": 0, "query": ..., "responses": [{"role": ..., "policy": ...,
"text": ...}, ...]}; the last of the responses is the chain's.

Resuming a run can execute what is in its checkpoint; this cannot: it reads the policies' weights and nothing else. The
base model is loaded as in training, its own code included if the run has trust_remote_code.

examples:
  cory generate runs/demo "This movie"
  cory generate runs/demo "This movie" --roles llm_2         one policy alone
  cory generate runs/demo "This movie" --roles mean          the mean of the weights of all (docs/averaging.md)
  cory generate runs/demo --roles llm_2,llm_1 --json < queries.txt
  cory generate runs/demo --in questions.csv --out answers.jsonl --samples 4 --temperature 0.7
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
    parser.add_argument("run", type=path_or_uri, metavar="RUN", help="the run's folder, or its URI")
    parser.add_argument("query", metavar="QUERY", nargs="?", help="what is asked")
    parser.add_argument(
        "--checkpoint", metavar="C", help="best, latest or an update's number (default: best, or else latest)"
    )
    parser.add_argument(
        "--roles", metavar="P,...", help="the policies in the order they answer (default: as training left them)"
    )
    parser.add_argument(
        "--temperature",
        type=number_type(float),
        metavar="T",
        help="of sampling; 0: the likeliest token, always (default: the run's)",
    )
    parser.add_argument(
        "--samples", type=positive_int, default=1, metavar="N", help="answers to each query (default: 1)"
    )
    parser.add_argument("--seed", type=number_type(), metavar="N", help="of sampling (default: the run's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per query")
    parser.add_argument("--in", dest="source", metavar="FILE", help="answer all rows of this file")
    parser.add_argument("--out", type=local_path, metavar="FILE", help="with --in: write the answers here (.jsonl)")
    parser.add_argument(
        "--backend", choices=("vllm", "transformers"), help="with --in: what generates (default: vllm where installed)"
    )
    parser.add_argument("--debug", action="store_true", help="show libraries' logs and tracebacks")
    options = parser.parse_intermixed_args(argv)
    return run(lambda: generate(options), debug=options.debug)


def generate(options: argparse.Namespace) -> int:
    """Answers the queries.

    Raises:
        CommandError: no such run, checkpoint or policy, an empty query, prompts that need more than a query, or files
            that cannot be read or written.
        PromptError: a query does not fit the prompt that the policies were trained with, or holds an unknown token.
    """
    from launch.cluster import session
    from launch.models.trained import open_trained

    session.quiet_libraries(options.debug)
    if options.query is not None and not options.query.strip():
        raise CommandError("The query is empty. Write what is asked, or leave it out to be asked for it.")
    _check_files(options)
    trained = open_trained(options.run, options.checkpoint)
    settings = trained.settings
    players = trained.named(options.roles.replace(" ", "").split(",")) if options.roles else trained.players
    print(f"{' then '.join(players)}, after update {trained.update} of {options.run}", file=sys.stderr)

    from cory_env.chain import PromptError
    from launch.models.trained_chain import TokenPrinter, TrainedChain

    temperature = settings.temperature if options.temperature is None else options.temperature
    seed = settings.seed if options.seed is None else options.seed
    chain = TrainedChain(trained, players, temperature, seed, many=options.source is not None)
    for change in trained.changes():
        print(f"Warning: {change}", file=sys.stderr)
    if options.source is not None:
        return _answer_file(chain, trained, options)
    asking = options.query is None and sys.stdin.isatty() and sys.stdout.isatty()
    printer = TokenPrinter(sys.stdout, repeat=not asking)
    said: list[Message] | None = [] if asking and settings.chat else None
    if said is not None:
        printer.line("Each query goes on with what was said; /new begins anew.", style="dim")
    for number, text in enumerate(_queries(options.query, asking)):
        if said is not None and text.strip() == "/new":
            said = []
            continue
        try:
            for sample in range(options.samples):
                answered = chain.answer(number, text, None if options.json else printer, history=said, sample=sample)
                if options.json:
                    printer.line(json.dumps(answered))
        except PromptError as error:
            if not asking:
                raise
            printer.line(str(error) if not said else f"{error} /new begins a new conversation.")
        except KeyboardInterrupt:
            printer.line("")  # a response may be half written
            raise
        else:
            if said is not None:
                said += [{"role": "user", "content": text}]
                said += [{"role": "assistant", "content": answered["responses"][-1]["text"]}]
    return 0


def _check_files(options: argparse.Namespace) -> None:
    """Refuses words that do not go with files, and an output that is taken, before anything is loaded."""
    if options.source is None:
        for name in ("out", "backend"):
            if getattr(options, name) is not None:
                raise CommandError(f"--{name} is for queries from a file: name that with --in.")
        return
    from launch.models.many import check_free

    if options.query is not None or options.json:
        raise CommandError("--in brings the queries, and --out takes JSON Lines: leave out QUERY and --json.")
    if options.out is None:
        raise CommandError("Name the file for the answers with --out, such as --out answers.jsonl.")
    check_free(options.out)


def _answer_file(chain: TrainedChain, trained: Stored, options: argparse.Namespace) -> int:
    """Answers the rows of a file."""
    from cory_env.tasks import DataError
    from cory_env.tasks.rows import read_queries
    from launch.models.generators import choose_backend
    from launch.models.many import answer_file

    try:
        queries = read_queries(options.source, chain.columns)
    except DataError as error:
        raise CommandError(str(error)) from error
    chain.fits(queries)
    backend = choose_backend(options.backend, trained.settings)
    answer_file(trained, chain, queries, options.out, samples=options.samples, backend=backend, bar=not options.debug)
    print(f"{options.out}: {len(queries) * options.samples:,} answers, by {backend}.")
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
