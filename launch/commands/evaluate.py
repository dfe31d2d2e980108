"""`cory evaluate`: measures a run's policies, or a model, on held-out queries, beside the untouched base."""

import argparse
import contextlib
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from cory_env.tasks.task import Split
from launch.console.errors import CommandError
from launch.console.parser import Parser, local_path, path_or_uri, positive_int, run

if TYPE_CHECKING:
    from launch.display.terminal import Voice
    from launch.evaluation.evaluation import EvaluationFolder, Plan
    from launch.evaluation.figures import Scoring
    from launch.run_folder.run import Run
    from policies.settings.core_yaml import Value
    from policies.settings.settings import Settings

DRAWN = ("digits", "operations")
"""Settings that say which queries a task draws, where no data brings them."""
WIDTH = 100
"""The widest table."""

USAGE = "cory evaluate RUN|MODEL [key=value ...] [options]"

EPILOG = """what is measured:
  RUN (a run's folder or URI): every policy of a checkpoint, on the bare query and in each later role of the chain. Of
  chains of three or more the table shows later roles with all policies together; evaluation.json has each.
  MODEL (a folder, hub id or bundled name): the model, on the bare query.
  Where LLMs start from different models, their bases play the same roles in the same orders.
  Beside the untouched base: task reward, KL to the base, combined reward, length, EOS rate, distinct-1 and -2
  (over all responses to a query), and pass@k where the task says what is correct; with 95 % intervals.

settings:
  A run brings its own, a model those of the preset imdb-tiny; -c files and key=value change them, but not what the
  policies are. `data=FILE` evaluates on all of FILE. As many chains as in
  an update are played at once, `seed` draws the responses.

examples:
  cory evaluate runs/NAME
  cory evaluate runs/NAME --samples 16 --k 1,4,16 --checkpoint latest
  cory evaluate runs/NAME data=other.jsonl temperature=0.7
  cory evaluate runs/ALONE --agents 2          # a policy never trained in a chain, as the observer of itself
  cory evaluate ./my-model task=custom data=questions.jsonl reward=my_rewards:score max_response=12 --solved-at 1
  cory evaluate runs/NAME --lm-eval hellaswag,gsm8k --limit 200   # other people's tasks (docs/evaluations.md)

A killed evaluation goes on when the same command is given again. Checkpoints are pickles, which can run code: evaluate
your own runs only.

exit codes:
  0 evaluated; 2 a mistake that you can correct; 129, 130, 143 you ended it.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0; 2 after a user's mistake; 129, 130 or 143 when a signal ended it.
    """
    words = sys.argv[1:] if argv is None else argv
    options = _parser().parse_intermixed_args(words)
    return run(lambda: _command(options, words), debug=options.debug)


def _parser() -> Parser:
    parser = Parser(
        prog="cory evaluate",
        usage=USAGE,
        description="Measure a run's policies, or a model, on held-out queries, beside the untouched base.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target",
        type=path_or_uri,
        metavar="RUN|MODEL",
        help="a run's folder or URI; or a model's folder, hub id, bundled name",
    )
    parser.add_argument("words", nargs="*", metavar="[key=value]", help="settings, as for `cory train`")
    parser.add_argument("--task", metavar="T", help="the same as task=T (default: the run's)")
    parser.add_argument(
        "-c", "--config", action="append", default=[], type=local_path, metavar="FILE", help="YAML of settings"
    )
    parser.add_argument("--checkpoint", metavar="C", help="latest, best or an update (default: best, if there is one)")
    parser.add_argument(
        "--agents",
        type=positive_int,
        metavar="N",
        help="let the policies play a chain of N agents (default: the run's)",
    )
    parser.add_argument("--split", choices=get_args(Split), default="test", help="queries to ask (default: test)")
    parser.add_argument("--queries", type=positive_int, metavar="N", help="only the first N of them (default: all)")
    parser.add_argument("--samples", type=positive_int, default=4, metavar="N", help="responses per query (default: 4)")
    parser.add_argument(
        "--k",
        type=_numbers,
        metavar="K,K",
        help="of pass@k (default: 1, 2, 4, … up to --samples)",
    )
    parser.add_argument(
        "--solved-at",
        type=float,
        metavar="X",
        help="task reward from which a response is correct (default: the task's)",
    )
    parser.add_argument(
        "--lm-eval", metavar="T,...", help="run these tasks of lm-evaluation-harness instead, base and policies"
    )
    parser.add_argument(
        "--lm-eval-tasks-folder", type=local_path, metavar="DIR", help="a folder of task files for --lm-eval"
    )
    parser.add_argument("--limit", type=positive_int, metavar="N", help="of --lm-eval: N documents of each task")
    parser.add_argument(
        "--out",
        type=local_path,
        metavar="DIR",
        help="the evaluation's folder (default: in RUN/evaluation; of a run in storage, and of a model, "
        "in evaluations)",
    )
    parser.add_argument("--quiet", action="store_true", help="print only where the results are")
    parser.add_argument("--debug", action="store_true", help="show libraries' logs and tracebacks")
    return parser


def _command(options: argparse.Namespace, words: Sequence[str]) -> int:
    from launch.cluster import session
    from launch.cluster.gpus import check_gpus
    from launch.console import output
    from launch.display.terminal import Voice
    from launch.evaluation.evaluation import EvaluationFolder, changes_since, evaluate, make_plan, own_folder
    from launch.models.trained import POLICIES
    from launch.run_folder.sources import sources_of
    from launch.run_folder.storage import check_place
    from launch.training import preflight

    if options.lm_eval is not None:
        return _lm_eval(options)
    if options.limit or options.lm_eval_tasks_folder:
        raise CommandError("--limit and --lm-eval-tasks-folder belong to --lm-eval TASKS. For a run's task: --queries.")
    run_directory = _run_in(options.target)
    if options.checkpoint and run_directory is None:
        raise CommandError(f"--checkpoint chooses among those of a run, but {options.target} is a model.")
    checkpoint = run_directory.checkpoints.choose(options.checkpoint, POLICIES) if run_directory else None
    settings = _settings(options, run_directory)
    session.quiet_libraries(options.debug)
    try:
        asked, tokenizers = preflight.check(settings)
    except CommandError as error:
        if run_directory is None and not Path(options.target).exists() and repr(options.target) in str(error):
            error.add_note(f"There is no folder {options.target} here, so it was taken for a model on the hub.")
        raise
    settings = settings.with_chat_date()
    check_gpus(settings)
    sources = sources_of(settings, asked, tokenizers)
    if run_directory is not None:
        for text in changes_since(run_directory, settings, asked, sources):
            print(f"Warning: {text}", file=sys.stderr)
    plan = make_plan(settings, asked, sources, options.split, options.queries, options.samples, checkpoint)
    solved_at = asked.solved_at if options.solved_at is None else options.solved_at
    scoring = plan.scoring(solved_at, _ks(options, solved_at))
    if run_directory is not None and checkpoint is not None:
        path = own_folder(run_directory, checkpoint[1], plan.fingerprint)
    else:
        path = Path("evaluations", f"{Path(options.target).resolve().name}-{plan.fingerprint}")
    path = options.out or path
    check_place(str(path), "evaluation")
    folder = EvaluationFolder(path, plan)
    total, done = len(folder.batches.work), folder.batches.done
    voice = Voice(output.own_output(), total, done=done, quiet=options.quiet, bar=not options.debug)
    voice.say(_what(options.target, plan))
    voice.say(f"Folder: {folder.path}" + (f" ({done} of {total} batches were done before)" if done else ""))
    code = evaluate(plan, folder, voice, debug=options.debug)
    if code == 0:
        _report(plan, scoring, folder, voice, shlex.join(["cory", "evaluate", *words]))
    return code


def _lm_eval(options: argparse.Namespace) -> int:
    """Runs lm-evaluation-harness on the base and the policies of a run.

    Raises:
        CommandError: no such run, checkpoint or task, or the harness is not installed.
    """
    from launch.cluster import session
    from launch.console import output

    session.quiet_libraries(options.debug)
    from launch.display.tables import print_whole
    from launch.evaluation.evaluation import own_folder
    from launch.harness import lm_eval
    from launch.models.trained import open_trained
    from launch.run_folder.locks import lock_folder

    if options.words or options.config or options.task:
        raise CommandError("--lm-eval brings its own tasks and sampling: leave out settings, --task and -c.")
    lm_eval.check_installed()
    folder = options.lm_eval_tasks_folder
    if folder is not None and not folder.is_dir():
        raise CommandError(f"There is no folder {folder}, which --lm-eval-tasks-folder names.")
    trained = open_trained(options.target, options.checkpoint)
    for change in trained.changes():
        print(f"Warning: {change}", file=sys.stderr)
    wanted = lm_eval.Wanted(lm_eval.tasks_of(options.lm_eval), folder, options.limit)
    name = f"lm-eval-{wanted.fingerprint(trained)}"
    place: Path = options.out or own_folder(trained.run, trained.folder, name)
    place.mkdir(parents=True, exist_ok=True)
    told = output.own_output()
    quiet = contextlib.nullcontext() if options.debug else output.output_into(place / "log.txt")
    with lock_folder(place), quiet:
        found = lm_eval.measure(trained, wanted, place, told, options.quiet)
    if not options.quiet:
        print_whole(sys.stdout, lm_eval.shown(found))
    print(f"Results     {place}")
    return 0


def _run_in(target: str) -> "Run | None":
    """Returns the run in a folder or in storage, or None where the target is a model.

    Raises:
        CommandError: it is a path, but there is neither; or a URI, but there is no run.
        StorageError: storage cannot be read.
    """
    from launch.run_folder.run import Run
    from launch.run_folder.status import read_run
    from launch.run_folder.storage import is_uri

    if is_uri(target):
        return read_run(target)
    path = Path(target)
    run_directory = Run(path)
    if run_directory.exists():
        return run_directory
    local = path.exists() or target.startswith((".", "/", "~")) or (len(path.parts) > 1 and path.parent.is_dir())
    if (path / "adapter_config.json").is_file():
        raise CommandError(f"{target} is an adapter. Evaluate the run that it is from, or export it with --merge.")
    if local and not (path / "config.json").is_file():
        raise CommandError(
            f"There is neither a run nor a model in {target}. Runs lie under runs/ unless --out said else."
        )
    return None


def _settings(options: argparse.Namespace, run_directory: "Run | None") -> "Settings":
    """Puts the settings together: the run's or the default preset's, then files, then words."""
    from launch.console.configuration import DEFAULT_PRESET, read_file, read_preset, read_words
    from launch.evaluation.evaluation import located_settings
    from policies.settings.overrides import apply_overrides
    from policies.settings.settings import deciding, make_settings

    words = read_words(options.words)
    for key in words:
        if key in deciding("policy"):
            raise CommandError(f"`{key}` cannot be set here: what the policies are comes with {options.target}.")
    if options.task is not None:
        words["task"] = options.task
    if ("data" in words) != ("eval_data" in words):  # one file, all of it
        words["data"] = words["eval_data"] = words.get("data", words.get("eval_data"))
        words["validation"] = False
    own: Mapping[str, Value] = read_preset(DEFAULT_PRESET)
    policy: dict[str, Value] = {"model": options.target, "num_agents": 1}
    given: dict[str, Value] = {}
    for path in options.config:
        given |= read_file(path)
    given |= words
    if run_directory is not None:
        own = located_settings(run_directory, given).model_dump()
        policy = {key: own[key] for key in deciding("policy")}
    if options.agents is not None:  # critics, which a chain of another length would not fit, play no part
        policies = policy.get("num_policies") or policy["num_agents"]
        policy |= {"num_agents": options.agents, "num_policies": policies, "critic_inputs": "tokens"}
    if given.get("task", own["task"]) != own["task"]:
        if "max_response" not in given:
            raise CommandError(
                f"How long may responses to task {given['task']} be? Add max_response=TOKENS; {options.target} brings "
                f"{own.get('max_response')}, from another task."
            )
        own = {key: value for key, value in own.items() if key == "task" or key not in deciding("task")}
    if "data" in given:
        own = {key: value for key, value in own.items() if key not in DRAWN}
    values = {key: value for key, value in {**own, **given}.items() if key not in deciding("policy")}
    if "queries" in given or options.agents is not None:
        values |= {"minibatch": 1, "num_learners": 0, "shards_per_policy": None}  # nothing is trained or divided
        agents = cast(int, policy["num_agents"])
        teams = max(cast(int, policy.get("num_policies") or agents) // agents, 1)
        values["queries"] = math.ceil(cast(int, values["queries"]) / teams) * teams
    asked = {key: values[key] for key in given if key in values}
    return make_settings(apply_overrides(values, {**asked, **policy, "min_response": None}))


def _ks(options: argparse.Namespace, solved_at: float | None) -> list[int]:
    """Returns the k of pass@k."""
    from launch.evaluation.figures import every_k

    if options.k is None:
        return every_k(options.samples, solved_at)
    if solved_at is None:
        raise CommandError(
            "--k asks for pass@k, but this task does not say which responses are correct. Add --solved-at."
        )
    if max(options.k) > options.samples:
        raise CommandError(f"pass@{max(options.k)} needs as many responses per query. Set --samples {max(options.k)}.")
    return sorted(set(options.k))


def _what(target: str, plan: "Plan") -> str:
    which = f", update {plan.checkpoint[0]}," if plan.checkpoint else ""
    return (
        f"Evaluating {target}{which} on task {plan.task.name}: {plan.queries} {plan.split} queries × "
        f"{plan.samples} responses. Generation: {plan.settings.backend}."
    )


def _report(plan: "Plan", scoring: "Scoring", folder: "EvaluationFolder", voice: "Voice", command: str) -> None:
    """Writes `evaluation.json` and prints the tables."""
    from launch.evaluation.evaluation import results
    from launch.evaluation.figures import tables

    standings, dropped = results(plan, scoring, folder, command)
    for table in tables(standings, scoring.names, min(voice.console.width, WIDTH)):
        voice.say()
        voice.say(table)
    voice.say()
    if dropped:
        asked = len(plan.lineups) * plan.queries * plan.samples
        voice.say(f"Warning: the reward failed on {dropped} of {asked} chains; they are left out.", True)
    voice.say(f"Results     {folder.results}", True)
    voice.say(f"Responses   {folder.batches.path}", True)


def _numbers(text: str) -> list[float]:
    return [positive_int(part) for part in text.split(",")]
