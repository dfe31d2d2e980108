"""A study on the terminal: what its arms are, what is to do, and what was found."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from rich.table import Table

from launch.display.statistics import mean_ci
from launch.display.tables import FINE, MAIN, show, shown, table
from launch.display.terminal import clock
from launch.experiments.contrasts import Answer
from launch.experiments.results import StudyRun
from launch.experiments.study import Arm, Study, word
from launch.experiments.study_runs import Job


def arms_table(study: Study, arms: Sequence[Arm]) -> Table:
    """Returns what arms differ in."""
    made = table(["arm", "differs from", "in"], ["seeds", "tier"])
    made.columns[2].no_wrap = False  # the names stay whole
    for arm in arms:
        changes = ", ".join(word(*item) for item in arm.changes.items())
        made.add_row(arm.name, arm.against or "", changes, str(len(arm.seeds)), str(arm.tier))
    return made


def plan_table(found: Mapping[Job, StudyRun | None], todo: Sequence[Job]) -> Table:
    """Returns how many runs of each arm are done and missing, and how long the missing ones will take."""
    made = table(["arm"], ["done", "to do", "takes"])
    done = [run for run in found.values() if run is not None]
    total = 0.0
    for name, group in groupby(sorted(found, key=lambda job: job.study.place(job.arm)), lambda job: job.arm.name):
        of_arm = list(group)
        missing = sum(job in todo for job in of_arm)
        seconds = missing * _seconds(name, done)
        total += seconds
        made.add_row(name, str(len(of_arm) - missing), str(missing), clock(seconds) if seconds else "")
    made.add_row("all", str(len(found) - len(todo)), str(len(todo)), clock(total) if total else "")
    return made


def _seconds(arm: str, done: Sequence[StudyRun]) -> float:
    """Returns how long a run takes: as those of its arm did, or else as all did; 0 where none is done."""
    whole = [run for run in done if not run.cost["resumed"] and run.status == "done"]
    like = [run for run in whole if run.arm == arm] or whole
    return sum(run.cost["wall_seconds"] for run in like) / len(like) if like else 0.0


def result_line(run: StudyRun) -> str:
    """Returns what a run that has just ended found."""
    from launch.experiments.measures import collapse

    means = {} if run.final is None else run.final["mean"]
    figures = "  ".join(f"{shown(key).heading} {show(means.get(key), FINE[key]):>6}" for key in MAIN)
    remark = "" if run.status == "done" else f"  {run.status}"
    if run.status in ("done", "collapsed") and (signs := collapse(run)):
        remark += f"  collapse: {', '.join(sorted({sign.signature for sign in signs}))}"
    return f"{run.arm:<18} seed {run.seed}  {figures}  {clock(run.cost['wall_seconds']):>6}{remark}"


def summary_table(runs: Sequence[StudyRun]) -> Table:
    """Returns each arm's figures after training: the mean over seeds ± half its 95 % interval."""
    from launch.experiments.measures import at_end, collapses, metrics_of

    made = table(["arm"], ["seeds", *(shown(key).heading for key in MAIN), "collapsed", "minutes"])
    for _, group in groupby(sorted(runs, key=lambda run: (run.tier, run.place, run.arm)), lambda run: run.arm):
        ended = [run for run in group if run.status != "failed"]
        if not ended:
            continue
        metrics = metrics_of(ended)
        made.add_row(
            ended[0].label,
            str(len(ended)),
            *(_cell(at_end(key)(metrics), len(ended), FINE[key]) for key in MAIN),
            f"{collapses(ended)} of {len(ended)}",
            f"{sum(run.cost['seconds'] for run in ended) / len(ended) / 60:.1f}",
        )
    return made


def contrasts_table(found: Sequence[Answer]) -> Table:
    """Returns what came of a study's contrasts: differences with their 95 % intervals, and p corrected for them all."""
    made = table(["arm", "against"], ["seeds", "difference", "p", ""])
    for contrast, difference, p in found:
        made.add_row(
            _side(contrast.arm, contrast.of) + ", equal tokens" * (contrast.at == "tokens"),
            _side(contrast.against, contrast.against_of),
            str(len(difference.seeds)),
            difference.estimate.shown("{:+.3f}"),
            "" if p is None else f"{p:.2g}",
            Answer(contrast, difference, p).verdict,
        )
    return made


def _side(arm: str, of: str) -> str:
    return {"bare": arm, "last": f"{arm}, last answer", "mean": f"{arm}, mean LLM"}[of]


def _cell(values: Iterable[float], runs: int, pattern: str) -> str:
    mean, low, _, n = mean_ci(values)
    if not n:
        return ""
    half = "" if low is None else f" ± {pattern.replace('+', '').format(mean - low)}"
    return pattern.format(mean) + half + ("" if n == runs else f", {n} of {runs}")
