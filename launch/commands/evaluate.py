"""`cory evaluate`: evaluates a run's policies, or a model, on held-out queries, with the untrained base."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from cory_env.tasks.task import Split
from launch.console.cli import CheckpointOption, Debug, Quiet, SolvedAt, Target, local_path
from launch.console.errors import CommandError


def evaluate(
    context: typer.Context,
    target: Target,
    words: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings.")] = None,
    checkpoint: CheckpointOption = None,
    agents: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of agents in the chain. [default: the run's]")
    ] = None,
    split: Annotated[Split, typer.Option(help="Split of the queries.")] = "test",
    queries: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N queries.")] = None,
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Responses per query.")] = 4,
    solved_at: SolvedAt = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Opponent in an environment: a run, or `base`, the run's untrained policies."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", parser=local_path, help="New folder. [default: in RUN/evaluation or ./evaluations]"
        ),
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Evaluate a run's policies, or a model, on held-out queries, with the untrained base for comparison.

    Evaluated policies:
      RUN: every policy of a checkpoint, on the bare query and in each later role of the chain.
      MODEL: the model, on the bare query.
      If chains can stop (stop_when), also each chain's last answer, with the tokens that it took per query.
      If policies start from different models, the base of each is evaluated in the same roles and orders.

    Metrics: task reward, KL to the base, combined reward, length, EOS rate, and pass@k if the task defines correct
    responses; with 95 % intervals.

    In an environment: every policy as each agent that it may be, with its return in place of the task reward. --against
    plays episodes in which one agent has the run's policy, and all others have the opponent's; in games whose rewards
    add up to 0, it also counts wins, draws and losses.

    Settings: a run uses its own, a model the defaults, so set its task. KEY=VALUE changes them, except those that
    define the policies. `data=FILE` evaluates on all of FILE. Chains are generated in batches as large as those of an
    update; `seed` seeds the sampling of responses.

    The results are written when all responses are evaluated, never a part of them. Only the policies' weights are read
    from the checkpoint, no pickles. Rewards run code: those of the run, also one pickled in its config.yaml. Evaluate
    only your own runs.

    Examples:
      cory evaluate runs/NAME
      cory evaluate runs/NAME --samples 16 --checkpoint latest
      cory evaluate runs/NAME data=other.jsonl temperature=0.7
      cory evaluate runs/duel --against base
      cory evaluate runs/PPO --agents 2            # a policy trained without a chain, as its own observer
      cory evaluate ./my-model task=custom data=my.jsonl reward=mine:score max_response_tokens=12 --solved-at 1
    """
    from launch.cluster import session
    from launch.console.configuration import parse_overrides
    from launch.display.tables import print_tables
    from launch.evaluation import evaluation
    from launch.evaluation.figures import score_tables
    from launch.evaluation.target import default_folder, find_run, target_settings
    from launch.run_folder.layout import POLICIES

    session.quiet_libraries(debug)
    run = find_run(target)
    if checkpoint and run is None:
        raise CommandError(f"--checkpoint requires a run, but {target} is a model.")
    run_checkpoint = run.checkpoints.choose(checkpoint, POLICIES) if run else None
    if against is not None:
        options = {"--agents": agents, "--solved-at": solved_at}
        if unused := [*(words or ()), *(name for name, value in options.items() if value is not None)]:
            raise CommandError(f"--against plays both runs with their own settings, so it can't use {unused[0]}.")
        return _evaluate_against(context, target, against, checkpoint, split, queries, samples, out, quiet, debug)
    settings = target_settings(target, run, parse_overrides(words or ()), agents)
    plan = evaluation.plan_evaluation(settings, run, run_checkpoint, split, queries, samples, _warn)
    out = out or default_folder("evaluation", target, run_checkpoint and run_checkpoint[1])
    if not quiet:
        print(f"Evaluating {target} on task {plan.task.name}: {plan.queries} {split} queries × {samples} responses.")
    command = shlex.join(["cory", "evaluate", *context.meta["words"]])
    scores = evaluation.evaluate(plan, out, command, solved_at=solved_at, quiet=quiet, debug=debug, warn=_warn)
    if not quiet:
        print_tables(sys.stdout, *score_tables(scores))
    print(f"Results     {out / evaluation.RESULT}")


def _evaluate_against(
    context: typer.Context,
    target: str,
    against: str,
    checkpoint: str | None,
    split: Split,
    queries: int | None,
    samples: int,
    out: Path | None,
    quiet: bool,
    debug: bool,
) -> None:
    """Lets a run's policies play against another run's, or against their base."""
    from launch.display.tables import print_tables
    from launch.evaluation.figures import BASE
    from launch.evaluation.target import default_folder
    from launch.models.against import RESULT, against_table, evaluate_against, make_sides
    from launch.models.trained import open_trained

    first = open_trained(target, checkpoint)
    sides = make_sides(first, None if against == BASE else open_trained(against))
    out = out or default_folder("evaluation", target, first.folder)
    command = shlex.join(["cory", "evaluate", *context.meta["words"]])
    result = evaluate_against(sides, out, command, split, queries, samples, quiet=quiet, debug=debug)
    if not quiet:
        print_tables(sys.stdout, against_table(result, sides))
    print(f"Results     {out / RESULT}")


def _warn(text: str) -> None:
    print(f"Warning: {text}", file=sys.stderr)
