"""`cory generate RUN [QUERY]`: answers queries with the trained chain."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cory_env.message import is_blank
from launch.console.cli import AsJson, CheckpointOption, Debug, RunArgument, local_path
from launch.console.errors import CommandError

if TYPE_CHECKING:
    from launch.models.trained_chain import TrainedChain
    from launch.models.trained_env import TrainedEnv
    from launch.run_folder.records import GeneratedSample


def generate(
    run: RunArgument,
    query: Annotated[str | None, typer.Argument(help="The query.")] = None,
    checkpoint: CheckpointOption = None,
    roles: Annotated[
        str | None, typer.Option(metavar="P,...", help="Policies in chain order. [default: as after training]")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, metavar="T", help="0: greedy decoding. [default: the run's]")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Answers per query.")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, metavar="N", help="Sampling seed. [default: the run's]")] = None,
    as_json: AsJson = False,
    source: Annotated[str | None, typer.Option("--in", metavar="FILE", help="Answer all rows of this file.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", parser=local_path, help="With --in: output file (.jsonl).")
    ] = None,
    backend: Annotated[
        Literal["vllm", "transformers"] | None, typer.Option(help="With --in. [default: vllm if installed]")
    ] = None,
    no_feedback: Annotated[
        bool, typer.Option("--no-feedback", help="All roles answer, without the run's feedback and stop_when.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Answer queries with the policies of a run, in chain order.

    Without QUERY, queries are read from standard input, one per line. For conversations, see `cory serve`.

    --in FILE answers all rows of a data file in large batches, with vLLM if it is installed, and writes --out
    atomically. FILE?query_column=COLUMN sets the query column (default: query), whose values may be lists of messages
    if the run has chat=true. Other columns are copied, and fill prompt templates that contain them. Format of an output
    line: {"row": 0, "sample": 0, "query": ..., "responses": [{"role": ..., "policy": ..., "text": ...}, ...]}; the last
    response is the chain's answer.
    With the setting thinking, the text is the one after the thought, which is in the entry `reasoning`.

    If the run has feedback between agents (docs/feedback-and-roles.md), its function runs here too: it sees the
    response, and the columns of --in FILE. Responses in the output have it as `feedback`, null if nothing is to be
    corrected; with stop_when the chain ends there. --no-feedback turns it off, unless prompts show feedback.

    Only the policies' weights are read from the checkpoint, no pickles. The base model is loaded as in training,
    including its own code if the run has trust_remote_code=true.

    Examples:
      cory generate runs/demo "This movie"
      cory generate runs/demo "This movie" --roles llm_2         one policy alone
      cory generate runs/demo "This movie" --roles mean          the mean of all policies' weights (docs/algorithms.md)
      cory generate runs/game 7                                  an episode of the environment's seed 7
      cory generate runs/demo --roles llm_2,llm_1 --json < queries.txt
      cory generate runs/demo --in questions.csv --out answers.jsonl --samples 4 --temperature 0.7
    """
    from launch.cluster import session

    session.quiet_libraries(debug)
    from launch.models.answer_file import check_output_free, write_answers
    from launch.models.generators import choose_backend
    from launch.models.trained import open_trained
    from launch.models.trained_chain import TrainedChain

    if (source is None) != (out is None) or (source is not None and (query is not None or as_json)):
        raise CommandError("--in FILE requires --out FILE and excludes QUERY and --json; --out requires --in.")
    if backend is not None and source is None:
        raise CommandError("--backend requires --in: single queries always use transformers.")
    if query is not None and is_blank(query):
        raise CommandError("The query is empty. Give a text, or omit QUERY to enter queries interactively.")
    if out is not None:
        check_output_free(out)
    trained = open_trained(run, checkpoint)
    policy_ids = trained.policy_ids if roles is None else trained.resolve_names(roles.split(","))
    print(f"{' then '.join(policy_ids)}, after update {trained.update} of {run}", file=sys.stderr)
    engine = "transformers" if source is None else choose_backend(backend, trained.settings)
    if trained.settings.env is not None:
        if source is not None or query is None or not query.isdecimal():
            raise CommandError("This run has an environment. Give a seed of it, a number, as QUERY.")
        from launch.models.trained_env import TrainedEnv

        for warning in trained.warnings():
            print(f"Warning: {warning}", file=sys.stderr)
        return _play(TrainedEnv(trained, policy_ids, temperature, seed, engine), int(query), samples, as_json)
    chain = TrainedChain(trained, policy_ids, temperature, seed, engine, feedback=not no_feedback)
    for warning in trained.warnings():
        print(f"Warning: {warning}", file=sys.stderr)
    if source is None or out is None:
        return _answer_queries(chain, query, samples, as_json)
    from cory_env.tasks.rows import read_queries

    queries = read_queries(source, chain.columns)
    chain.check(queries)
    write_answers(chain, queries, out, samples=samples, debug=debug)
    print(f"{out}: {len(queries) * samples:,} answers, generated by {engine}.")


def _play(env: TrainedEnv, env_seed: int, samples: int, as_json: bool) -> None:
    """Plays the episode of an environment's seed, and prints it."""
    for episode in env.play(env_seed, samples):
        if as_json:
            print(json.dumps(episode), flush=True)
        else:
            print_answer(episode, print_query=True)


def _answer_queries(chain: TrainedChain, query: str | None, samples: int, as_json: bool) -> None:
    """Answers the query; without one the lines of standard input, at a terminal until Ctrl-D."""
    from cory_env.prompt_encoder import PromptError
    from cory_env.tasks import Query

    is_interactive = query is None and sys.stdin.isatty() and sys.stdout.isatty()
    chain.check_feedback([Query(0, query or "")])
    _ = chain.generator  # loads the policies
    for number, text in enumerate(_read_queries(is_interactive) if query is None else [query]):
        try:
            for sample in range(samples):
                answer = chain.answer(number, text, sample=sample)
                if as_json:
                    print(json.dumps(answer), flush=True)
                else:
                    print_answer(answer, print_query=not is_interactive)
        except PromptError as error:
            if not is_interactive:
                raise
            print(error)


def print_answer(answer: GeneratedSample, *, print_query: bool) -> None:
    """Prints the responses of a chain, in colours at a terminal; with `print_query`, the query before them."""
    from launch.display.texts import NOTHING_TO_CORRECT, replace_control_chars

    if print_query:
        typer.secho(replace_control_chars(str(answer["query"])), italic=True)
    for response in answer["responses"]:
        if "observation" in response:
            typer.secho(replace_control_chars(response["observation"].strip()), dim=True)
        typer.secho(f"{response['role']} ({response['policy']}): ", dim=True, nl=False)
        if "reasoning" in response:
            typer.secho(f"{replace_control_chars(response['reasoning'].strip())}\n", dim=True)
        typer.echo(replace_control_chars(response["text"].lstrip()))
        if "feedback" in response:
            feedback = response["feedback"]
            text = NOTHING_TO_CORRECT if feedback is None else feedback
            typer.secho(f"feedback: {replace_control_chars(text)}", dim=True)
    if "returns" in answer:
        returns = ", ".join(f"{agent} {value:g}" for agent, value in answer["returns"].items())
        typer.secho(f"returns: {returns}", dim=True)
    sys.stdout.flush()


def _read_queries(is_interactive: bool) -> Iterator[str]:
    if is_interactive:
        import readline  # noqa: F401 - adds arrow keys and a history to `input`
    while True:
        try:
            line = input("query: " if is_interactive else "")
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise CommandError(f"Standard input is not UTF-8 text: {error}.") from error
        if not is_blank(line):
            yield line
