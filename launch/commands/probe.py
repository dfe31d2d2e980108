"""`cory probe`: measures, without training, whether a second answer pays."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from cory_env.tasks.task import Split
from launch.console.cli import CheckpointOption, Debug, Quiet, SolvedAt, Target, local_path
from launch.console.errors import CommandError


def probe(
    context: typer.Context,
    target: Target,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="PRESET|FILE|KEY=VALUE", help="For a model, a preset or YAML file; and settings."),
    ] = None,
    temperatures: Annotated[
        str, typer.Option(metavar="T,...", help="Sampling temperatures, each above 0.")
    ] = "0.7,1.0,1.3",
    queries: Annotated[int, typer.Option(min=2, metavar="N", help="Number of queries, the first of the split.")] = 300,
    samples: Annotated[int, typer.Option(min=3, metavar="N", help="First answers per query.")] = 4,
    split: Annotated[Split, typer.Option(help="Split of the queries.")] = "test",
    solved_at: SolvedAt = None,
    checkpoint: CheckpointOption = None,
    roles: Annotated[
        str | None, typer.Option(metavar="P,P", help="Policies of the two agents. [default: as after training]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=local_path, help="New folder. [default: in RUN/probe or ./probes]"),
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure, without training, whether a second answer pays: with feedback, without, or just another sample.

    The tables show p1, first answers that are right; p1', second samples that are right where the first is wrong; p2,
    answers of a second agent that are right where the first answer is wrong, without and with feedback; right answers
    that the second agent keeps; best-of-2 and best-of-3; a vote of three; the chain of two. All have 95 % intervals,
    which resample queries; the generated tokens per query are shown too. The last lines say what to train
    (docs/probe.md).

    `feedback=task` uses the task's own feedback function, `feedback=module:function` yours; its None means "solved"
    and ends best-of-n and the chain. An answer is right from the task reward `--solved-at`.

    Settings: a run uses its own; a model those of a preset or file, or else the defaults, except those that define
    the policies. KEY=VALUE changes them. `data=FILE` takes the queries from FILE; `seed` seeds sampling.

    The policies' weights are read from the checkpoint, no pickles.

    Examples:
      cory probe drafts-llama-tiny drafts-tiny
      cory probe smollm2 code-smollm2 feedback=task max_prompt_tokens=352 --queries 100
      cory probe Qwen/Qwen2.5-0.5B-Instruct task=gsm8k feedback=mine:check --temperatures 0.7,1.0
      cory probe ./my-model task=custom data=my.jsonl reward=mine:score feedback=mine:check --solved-at 1
      cory probe runs/NAME feedback=task --roles llm_1,llm_2
    """
    from launch.cluster import session

    session.quiet_libraries(debug)
    from launch.console.configuration import parse_overrides, split_arguments
    from launch.display.tables import print_tables
    from launch.evaluation.target import default_folder
    from launch.probing.plan import plan_probe
    from launch.probing.probe import RESULT, run_probe
    from launch.probing.tables import probe_tables, text_lines

    arguments = split_arguments(words or ())
    plan = plan_probe(
        target,
        parse_overrides(arguments.pairs),
        lambda text: print(f"Warning: {text}", file=sys.stderr),
        preset=arguments.preset,
        files=arguments.files,
        checkpoint=checkpoint,
        roles=None if roles is None else roles.split(","),
        split=split,
        queries=queries,
        samples=samples,
        temperatures=_parse_temperatures(temperatures),
        solved_at=solved_at,
    )
    out = out or default_folder("probe", target, plan.policies.folder if plan.policies else None)
    if not quiet:
        print(
            f"Probing {target} on task {plan.task.name}: {plan.queries} {split} queries × {samples} answers, "
            f"{'with feedback' if plan.task.feedback else 'without a feedback function'}."
        )
    command = shlex.join(["cory", "probe", *context.meta["words"]])
    result = run_probe(plan, out, command, quiet=quiet, debug=debug)
    if result.dropped:
        print(
            f"Warning: {result.dropped} of {plan.queries} queries are left out: rewards or feedback failed on them.",
            file=sys.stderr,
        )
    if not quiet:
        print()
        print_tables(sys.stdout, *probe_tables(result.figures))
        print(*text_lines(result.figures, result.advice), sep="\n")
    print(f"Results     {out / RESULT}")


def _parse_temperatures(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise CommandError(f"--temperatures {text}: write numbers with commas, such as 0.7,1.0,1.3.") from error
