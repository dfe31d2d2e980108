"""`cory study`: many trainings that are compared, arms over seeds, and a small file of results for each."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from launch.console.errors import CommandError
from launch.console.parser import Parser, local_path, run

if TYPE_CHECKING:
    from cory_env.tasks import Task
    from launch.display.terminal import Voice
    from launch.experiments.results import StudyRun
    from launch.experiments.study import Arm, Study
    from launch.experiments.study_runs import Job, Performer
    from launch.run_folder.locks import FolderHandle
    from policies.settings.settings import Settings, Tokenizers

USAGE = """cory study NAME|FILE [key=value ...] --out DIR [options]
       cory study [NAME|FILE] --list"""

EPILOG = """studies:
{studies}

What is done already is not done again, and a run that was stopped goes on, so the same command continues a study.
DIR/results/ARM/seed_N.json keeps of each run what tables and plots need; DIR/runs/ARM/seed_N is its folder, which
`cory watch` follows, and seed_N.txt beside it what it printed. Settings as key=value are those of all arms.
The same command in several terminals, or on several machines with the folder in common, shares the runs out.

examples:
  cory study imdb --list
  cory study imdb --tier 1 --out runs/study
  cory study imdb --only cory ppo --seeds 0,1,2 --out runs/study
  cory study mine.yaml --out runs/mine

exit codes:
  0 nothing is left to begin; 1 some runs failed; 2 a mistake that you can correct; 129, 130, 143 you stopped it.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0 when nothing is left to begin; 1 when runs failed; 2 after a user's mistake; 129, 130 or 143 after a signal.
    """
    words = sys.argv[1:] if argv is None else argv
    options = _parser(help_wanted=not {"-h", "--help"}.isdisjoint(words)).parse_intermixed_args(words)
    return run(lambda: _command(options), debug=options.debug)


def _parser(help_wanted: bool) -> Parser:
    epilog = None
    if help_wanted:
        epilog = EPILOG.format(studies=_shipped())
    parser = Parser(
        prog="cory study",
        usage=USAGE,
        description="Train arms that differ in what they say and in nothing else, over seeds, and compare them.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="NAME|FILE, key=value", help="a study; settings of all its arms")
    parser.add_argument("--out", type=local_path, metavar="DIR", help="the study's folder")
    parser.add_argument("--only", nargs="+", metavar="ARM", help="these arms alone")
    parser.add_argument("--tier", type=int, metavar="N", help="the arms of one tier alone")
    parser.add_argument("--seeds", type=_seeds, metavar="N|N,N", help="of all arms: a count, or these (one: `3,`)")
    parser.add_argument("--retry", action="store_true", help="do those again that failed")
    parser.add_argument("--list", action="store_true", help="print the studies, or a study's arms, and exit")
    parser.add_argument("--dry-run", action="store_true", help="print what there is to do, and exit")
    parser.add_argument(
        "--allow-changes",
        action="store_true",
        help="continue a study although its queries, models, tokenizers or templates are not what it began with",
    )
    parser.add_argument("--quiet", action="store_true", help="print only what was found")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _command(options: argparse.Namespace) -> int:
    from launch.cluster import session
    from launch.console.output import own_output
    from launch.display.terminal import Voice
    from launch.experiments.results import kept_results, write
    from launch.experiments.study import load
    from launch.experiments.study_runs import Job, Performer, jobs
    from launch.experiments.tables import arms_table, plan_table
    from launch.run_folder.layout import SOURCES
    from launch.run_folder.locks import folder_watched
    from launch.run_folder.storage import check_place
    from launch.training.comparable import check_comparable, write_comparable
    from policies.models.cached_folder import locked

    where = [word for word in options.words if "=" not in word]
    if options.list and not where:
        print(_shipped())
        return 0
    if len(where) != 1:
        raise CommandError("Name one study, such as imdb, or a file; `cory study --list` lists those that there are.")
    study = load(where[0], [word for word in options.words if "=" in word])
    arms = _chosen(study, options.only, options.tier)
    if options.list:
        voice = Voice(own_output(), 0)
        voice.say(study.about)
        voice.say(arms_table(study, arms))
        return 0
    if options.out is None:
        raise CommandError("Name the study's folder with --out. Results of earlier runs in it are kept.")
    check_place(str(options.out), "study")
    if not options.dry_run:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"The study's folder {options.out} cannot be made: {error.strerror}.") from error
    for kept in kept_results(options.out):
        if kept.arm not in study.arms:
            continue
        # Whatever is asked for now: results of other settings are no part of this study.
        job = Job(study, study.arms[kept.arm], kept.seed, options.out)
        if job.found() != kept and not options.dry_run and (claim := job.claim()) is not None:
            with claim:  # the study says other things of its arm today
                if (found := job.found()) is not None:
                    write(job.result, found)
    able = [arm for arm in arms if arm.missing is None]
    asked = jobs(study, options.out, able, options.seeds)
    done = {job: job.found() for job in asked}
    todo = [job for job, run in done.items() if run is None or (options.retry and run.status == "failed")]
    voice = Voice(own_output(), len(asked), done=len(asked) - len(todo), quiet=options.quiet)
    voice.say(f"{study.about}\nStudy folder: {options.out}")
    for arm in arms:
        if arm.missing is not None:
            voice.say(f"Left out: {arm.missing}", True)
    voice.say(plan_table(done, todo))
    if options.dry_run:
        return 0
    session.quiet_libraries(options.debug)
    kinds = {job.arm.name: study.settings(job.arm, job.seed) for job in todo}.values()
    with locked(options.out / f".{SOURCES}.lock"):  # other processes may share the study
        sources = check_comparable(
            options.out, kinds, _prepared, lambda text: voice.say(text, True), options.allow_changes
        )
        write_comparable(options.out, sources)
    paths = {name: path for each in sources.values() for name, path in each.paths.items()}
    stopping = "Finishing this update, then saving. Ctrl-C again aborts at once."
    performer = Performer(lambda: voice.say(stopping, True), paths, options.allow_changes)
    with folder_watched(options.out, lambda path: f"Give the same command with --out {path}.") as folder:
        return _perform(todo, done, performer, voice, folder)


def _prepared(settings: "Settings") -> "tuple[Task, Tokenizers] | None":
    """Returns the task and tokenizers of an arm; None where they cannot be made: its run fails, others need not."""
    from launch.console.errors import is_defect
    from launch.training.preflight import load_task

    try:
        return load_task(settings)
    except Exception as error:
        if is_defect(error):
            raise
        return None


def _perform(
    todo: "Sequence[Job]",
    before: "Mapping[Job, StudyRun | None]",
    performer: "Performer",
    voice: "Voice",
    folder: "FolderHandle",
) -> int:
    """Does what is to be done and no other process does, and shows what was found.

    Args:
        todo: runs to be done.
        before: all runs that were asked for, with the results that they have had so far.
        performer: does them.
        voice: tells of it.
        folder: the study's.

    Raises:
        FolderError: the study's folder was renamed or removed.
    """
    from launch.display.tables import shown
    from launch.experiments.contrasts import FIGURE, answers
    from launch.experiments.tables import contrasts_table, result_line, summary_table

    elsewhere = 0
    with voice, performer:
        voice.begin()
        for job in todo:
            claim = job.claim()
            if claim is None:
                elsewhere += 1
                continue
            with claim:
                if job.found() != before[job]:  # another process did it meanwhile
                    voice.advance()
                    continue
                voice.stage(f"{job.arm.name}, seed {job.seed}")
                if (aside := job.set_aside(performer.paths)) is not None:
                    voice.say(f"{job.run} held a run that this one cannot go on with. It is now {aside.name}.", True)
                made = performer.perform(job, folder)
            if made is not None:
                voice.say(f"{result_line(made)}  {voice.advance()}")
            if performer.stopped is not None:
                break
    runs = [run for job in before if (run := job.found()) is not None]
    if runs:
        voice.say()
        voice.say(summary_table(runs), True)
        asked = next(iter(before)).study.contrasts
        if found := answers(asked, runs):
            voice.say(
                f"Contrasts, {shown(FIGURE).heading}, paired by seed; p by sign flips, after Holm for {len(asked)}:"
            )
            voice.say(contrasts_table(found), True)
    failed = [run for run in runs if run.status == "failed"]
    for run in failed:
        voice.say(f"{run.arm}, seed {run.seed}, failed: {run.reason}", True)
    if performer.stopped is not None:
        voice.say(f"Stopped: {len(runs)} of {len(before)} runs are done. The same command goes on.", True)
        return performer.stopped
    if elsewhere:
        voice.say(
            f"Nothing is left to begin: other processes of this study had {elsewhere} of the runs in hand. Once "
            "they have ended, the same command does what they have left.",
            True,
        )
    return 1 if failed else 0


def _chosen(study: "Study", names: Sequence[str] | None, tier: int | None) -> "list[Arm]":
    """Returns the arms that are asked for."""
    for name in names or ():
        if name not in study.arms:
            raise CommandError(f"{study.name} has no arm {name}. It has: {', '.join(study.arms)}.")
    arms = [
        arm
        for arm in study.arms.values()
        if (names is None or arm.name in names) and (tier is None or arm.tier == tier)
    ]
    if not arms:
        raise CommandError(f"{study.name} has no such arm. Its tiers: {sorted({a.tier for a in study.arms.values()})}.")
    return arms


def _shipped() -> str:
    from launch.experiments.study import studies

    return "\n".join(f"  {name:<12}{about}" for name, about in studies().items())


def _seeds(text: str) -> tuple[int, ...]:
    from launch.experiments.study import read_seeds

    numbers = text.removesuffix(",").split(",")
    found = [int(number) for number in numbers if number.isdecimal()]
    if len(found) < len(numbers) or ("," not in text and found == [0]):
        raise argparse.ArgumentTypeError(f"`{text}` is neither a count, such as 5, nor seeds, such as 0,1,2 or 3,")
    return read_seeds(found if "," in text else found[0], "--seeds")
