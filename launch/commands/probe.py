"""`cory probe`: measures, without training, whether a second answer pays."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cory_env.tasks.task import Split
from launch.console.cli import CheckpointOption, Debug, Quiet, SolvedAt, local_path, path_or_uri
from launch.console.errors import CommandError

if TYPE_CHECKING:
    from launch.probing.endpoint import Endpoint


def probe(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|MODEL", parser=path_or_uri, help="A run's folder, or a model; not with --endpoint."
        ),
    ] = None,
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
        str | None, typer.Option(metavar="P,P", help="Policies of the agents. [default: as after training]")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="An OpenAI-compatible API, which responds instead of a RUN|MODEL.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name in the API.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Maximum number of requests at once. [default: 8]")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds that one request may take. [default: 300]")
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

    With `roles`, the team is compared with one of its agents that has as many tokens, and each role's contribution is
    shown; with `env`, whole episodes are compared with starting anew after one turn.

    With --endpoint, the model of an OpenAI-compatible API responds: no weights, no GPU. OPENAI_API_KEY in the
    environment is the key. Prompts are sent as messages and never truncated; the server's defaults, such as its top_p,
    apply. `cory serve` puts each message into its run's prompt, so let one of the two add nothing (prompt={query}).

    Examples:
      cory probe drafts-llama-tiny drafts-tiny
      cory probe smollm2 code-smollm2 feedback=task max_prompt_tokens=352 --queries 100
      cory probe Qwen/Qwen2.5-0.5B-Instruct task=gsm8k feedback=mine:check --temperatures 0.7,1.0
      cory probe ./my-model task=custom data=my.jsonl reward=mine:score feedback=mine:check --solved-at 1
      cory probe runs/NAME feedback=task --roles llm_1,llm_2
      cory probe --endpoint http://localhost:8000/v1 --model Qwen/Qwen3-8B task=gsm8k --temperatures 1
    """
    from launch.cluster import session

    session.quiet_libraries(debug)
    from launch.console.configuration import parse_overrides, split_arguments
    from launch.display.tables import print_tables
    from launch.evaluation.target import default_folder
    from launch.probing.plan import plan_probe
    from launch.probing.probe import RESULT, run_probe
    from launch.probing.tables import describe_odd_answers, probe_tables, text_lines

    api = _make_endpoint(endpoint, model, concurrency, timeout)
    if api is not None:
        words, target = [*([] if target is None else [target]), *(words or ())], api.model
        _reject_targets(words)
    if target is None or ("=" in target and not Path(target).exists()):
        raise CommandError("Name a run or a model, or set --endpoint and --model.")
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
        endpoint=api,
    )
    out = out or default_folder("probe", target, plan.policies.folder if plan.policies else None)
    if not quiet:
        subject = target if endpoint is None else f"{target} at {endpoint}"
        feedback = "with feedback" if plan.task.feedback else "without a feedback function"
        unit = f"answers, {feedback}" if plan.settings.env is None else "episodes"
        print(f"Probing {subject} on task {plan.task.name}: {plan.queries} {split} queries × {samples} {unit}.")
    command = shlex.join(["cory", "probe", *context.meta["words"]])
    result = run_probe(plan, out, command, quiet=quiet, debug=debug)
    if result.dropped:
        print(
            f"Warning: {result.dropped} of {plan.queries} queries are left out: rewards or feedback failed on them.",
            file=sys.stderr,
        )
    if not quiet:
        print()
        print_tables(sys.stdout, *probe_tables(result.figures, result.advice.temperature))
        has_check = plan.task.feedback is not None
        print(*text_lines(result.figures, result.advice, has_check=has_check, notes=result.notes), sep="\n")
        if text := describe_odd_answers(result.answers):
            print(text)
    print(f"Results     {out / RESULT}")


def _parse_temperatures(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise CommandError(f"--temperatures {text}: write numbers with commas, such as 0.7,1.0,1.3.") from error


def _make_endpoint(
    url: str | None, model: str | None, concurrency: int | None, timeout: float | None
) -> Endpoint | None:
    """Returns the API of the options; None if they name none."""
    if url is None:
        options = {"model": model, "concurrency": concurrency, "timeout": timeout}
        for name in (name for name, value in options.items() if value is not None):
            raise CommandError(f"--{name} requires --endpoint.")
        return None
    if model is None:
        raise CommandError("--endpoint requires --model, the model's name in the API.")
    if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
        raise CommandError(f"--timeout {timeout:g} must be above 0.")
    from launch.probing.endpoint import DEFAULT_CONCURRENCY, DEFAULT_TIMEOUT, Endpoint

    return Endpoint(url, model, concurrency or DEFAULT_CONCURRENCY, timeout or DEFAULT_TIMEOUT)


def _reject_targets(words: Sequence[str]) -> None:
    """Rejects a run or a model among the words of a probe of an API."""
    from policies.settings.files import presets

    for number, word in enumerate(word for word in words if "=" not in word):
        if number or (word not in presets() and not Path(word).is_file() and not word.endswith((".yaml", ".yml"))):
            raise CommandError(
                f"--endpoint conflicts with {word}: --model names the model, and only one preset or file of settings "
                "can be added."
            )
