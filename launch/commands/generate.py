"""`cory generate RUN [QUERY]`: the trained chain at work, pioneer first, each response as it is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from launch.console.cli import AsJson, Checkpoint, Debug, RunArgument, local_path
from launch.console.errors import CommandError

if TYPE_CHECKING:
    from cory_env.message import Message
    from launch.models.trained_chain import TrainedChain


def generate(
    run: RunArgument,
    query: Annotated[str | None, typer.Argument(help="What is asked.")] = None,
    checkpoint: Checkpoint = None,
    roles: Annotated[
        str | None,
        typer.Option(metavar="P,...", help="The policies in the order they answer. [default: as training left them]"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, metavar="T", help="0: the likeliest token, always. [default: the run's]")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Answers to each query.")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, metavar="N", help="Of sampling. [default: the run's]")] = None,
    as_json: AsJson = False,
    source: Annotated[str | None, typer.Option("--in", metavar="FILE", help="Answer all rows of this file.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", parser=local_path, help="With --in: write the answers here (.jsonl).")
    ] = None,
    backend: Annotated[
        Literal["vllm", "transformers"] | None, typer.Option(help="With --in. [default: vllm if it is installed]")
    ] = None,
    debug: Debug = False,
) -> None:
    """Let the policies of a run answer queries, in the chain's order.

    Without QUERY, queries are read from the standard input, one per line; at a terminal they are asked for. Of a run
    with chat=true that is a conversation: each query continues what was said; /new begins another one.

    --in FILE answers all rows of a file of data into the file of --out, many at once: by vLLM if it is installed, and
    never half a file. FILE?query_column=COLUMN names the column of the query (default: query), which may be a list of
    messages
    if the run has chat=true; other columns are copied, and fill in prompts that hold them. Killed or stopped, the same
    command continues. A line of it: {"row": 0, "sample": 0, "query": ..., "responses": [{"role": ..., "policy": ...,
    "text": ...}, ...]}; the last of the responses is the chain's.

    Only the policies' weights are read from the checkpoint, never its pickles. The base model is loaded as in training,
    its own code included if the run has trust_remote_code.

    Examples:
      cory generate runs/demo "This movie"
      cory generate runs/demo "This movie" --roles llm_2         one policy alone
      cory generate runs/demo "This movie" --roles mean          the mean of the weights of all (docs/averaging.md)
      cory generate runs/demo --roles llm_2,llm_1 --json < queries.txt
      cory generate runs/demo --in questions.csv --out answers.jsonl --samples 4 --temperature 0.7
    """
    from launch.cluster import session

    session.quiet_libraries(debug)
    from launch.models.answer_file import write_answers, check_output_free
    from launch.models.generators import choose_backend
    from launch.models.trained import open_trained
    from launch.models.trained_chain import TrainedChain

    if (source is None) != (out is None) or (source is not None and (query is not None or as_json)):
        raise CommandError("--in FILE requires --out FILE and excludes QUERY and --json; --out requires --in.")
    if backend is not None and source is None:
        raise CommandError("--backend requires --in: single queries are answered by transformers.")
    if query is not None and not query.strip():
        raise CommandError("The query is empty. Write what is asked, or leave it out to be asked for it.")
    if out is not None:
        check_output_free(out)
    trained = open_trained(run, checkpoint)
    settings = trained.settings
    policy_ids = trained.policy_ids if roles is None else trained.named(roles.split(","))
    print(f"{' then '.join(policy_ids)}, after update {trained.update} of {run}", file=sys.stderr)
    engine = "transformers" if source is None else choose_backend(backend, settings)
    temperature = settings.temperature if temperature is None else temperature
    chain = TrainedChain(trained, policy_ids, temperature, settings.seed if seed is None else seed, engine)
    for change in trained.changes():
        print(f"Warning: {change}", file=sys.stderr)
    if source is None or out is None:
        return _answer_queries(chain, query, samples, as_json)
    from cory_env.tasks.rows import read_queries

    queries = read_queries(source, chain.columns)
    chain.check(queries)
    write_answers(trained, chain, queries, out, samples=samples, bar=not debug)
    print(f"{out}: {len(queries) * samples:,} answers, by {engine}.")


def _answer_queries(chain: TrainedChain, query: str | None, samples: int, as_json: bool) -> None:
    """Answers the query, or what the user types at a terminal until Ctrl-D, or the lines of the standard input."""
    from cory_env.chain import PromptError
    from launch.models.trained_chain import TokenPrinter

    is_asking = query is None and sys.stdin.isatty() and sys.stdout.isatty()
    printer = None if as_json else TokenPrinter(sys.stdout, repeat=not is_asking)
    history: list[Message] | None = None
    if is_asking and chain.chain.chat is not None:
        history = []
        print("Each query continues what was said; /new begins anew.")
    chain.generator  # noqa: B018 - loads the policies before anything is asked
    for number, text in enumerate(_read_queries(is_asking) if query is None else [query]):
        if history is not None and text.strip() == "/new":
            history = []
            continue
        try:
            for sample in range(samples):
                answered = chain.answer(number, text, printer, history=history, sample=sample)
                if as_json:
                    print(json.dumps(answered), flush=True)
        except PromptError as error:
            if not is_asking:
                raise
            print(error)
        except KeyboardInterrupt:
            print()  # a response may be half written
            raise
        else:
            if history is not None:
                history.append({"role": "user", "content": text})
                history.append({"role": "assistant", "content": answered["responses"][-1]["text"]})


def _read_queries(is_asking: bool) -> Iterator[str]:
    if is_asking:
        import readline  # noqa: F401 - gives `input` arrow keys and a history
    while True:
        try:
            line = input("query: " if is_asking else "")
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise CommandError(f"The standard input is not UTF-8 text: {error}.") from error
        if line.strip():
            yield line
