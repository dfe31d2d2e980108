"""Chooses the sets to probe, and summarises the probe of each, with p-values corrected for the number of sets."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cory_env.rewards.votes import answer_reader
from launch.display.statistics import holm, sign_flip_p
from launch.probing.advice import format_percent
from launch.probing.figures import Figure, compute_figures, conditional_shares, differences, strategies
from launch.probing.outcomes import collect_outcomes
from launch.probing.sampler import ProbedSample

MIN_SHARE, MAX_SHARE = 0.05, 0.8
"""Bounds of the share of right answers of a set that is probed."""
SOLVED_AT = 1.0
REWARD, FEEDBACK = "benchmarks.suite.answers:score", "benchmarks.suite.answers:feedback"
TESTS = {
    "p2 - p1_again": "p2 − p1'",
    "p2_feedback - p1_again": "p2 with feedback − p1'",
    "chain_feedback - best_of_n": "feedback chain − best of n",
}
"""Names and labels of the differences that are tested, each in all sets."""
SHARES = {"p1": "p1", "p1_again": "p1'", "p2": "p2", "p2_feedback": "p2 with feedback"}
ALL = "~ all sets"  # the last one in alphabetical order


class SetResult(NamedTuple):
    """The probe of a set.

    Attributes:
        queries: Number of queries.
        right_answers: Number of distinct right answers to them; at two or three, feedback nearly gives them away.
        figures: See `compute_figures`.
        ps: By name in `TESTS`, the p-value of the sign-flip test over queries.
    """

    queries: int
    right_answers: int
    figures: dict[str, Figure]
    ps: dict[str, float | None]


def choose_sets(answers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the screened sets whose share of right answers is within the bounds."""
    right: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        right[answer["set"]].append(answer["score"] >= SOLVED_AT)
    return sorted(name for name, values in right.items() if MIN_SHARE <= np.mean(values) <= MAX_SHARE)


def summarise(samples: Sequence[ProbedSample], queries: Sequence[Mapping[str, Any]]) -> dict[str, SetResult]:
    """Returns the results by set, and those of all sets together under `ALL`.

    Args:
        samples: At one temperature. Queries with fewer samples than others, of an interrupted probe, are left out.
        queries: By the samples' `query`: `set` and right `answer`.
    """
    counts = Counter(sample["query"] for sample in samples)
    number = max(counts.values())
    by_set: dict[str, list[ProbedSample]] = defaultdict(list)
    for sample in samples:
        if counts[sample["query"]] == number:
            by_set[queries[sample["query"]]["set"]].append(sample)
            by_set[ALL].append(sample)
    return {name: _summarise_set(by_set[name], queries) for name in sorted(by_set)}


def _summarise_set(samples: Sequence[ProbedSample], queries: Sequence[Mapping[str, Any]]) -> SetResult:
    outcomes = collect_outcomes(samples, SOLVED_AT, answer_reader(REWARD))
    ratios = differences(outcomes, conditional_shares(outcomes), strategies(outcomes))
    right_answers = {str(queries[sample["query"]]["answer"]) for sample in samples}
    ps = {name: sign_flip_p(ratios[name].numerator[ratios[name].denominator > 0].tolist()) for name in TESTS}
    return SetResult(len(outcomes.right), len(right_answers), compute_figures(outcomes), ps)


def correct(results: Mapping[str, SetResult]) -> dict[str, dict[str, float | None]]:
    """Returns the p-values by test and set, corrected by Holm's method over the sets of each test, without `ALL`."""
    names = sorted(results.keys() - {ALL})
    return {
        test: dict(zip(names, holm([results[name].ps[test] for name in names], len(names)), strict=True))
        for test in TESTS
    }


def table(results: Mapping[str, SetResult]) -> list[str]:
    """Returns the lines of a table in Markdown: shares in %, and differences in points with p and Holm's p."""
    corrected = correct(results)
    heading = ["set", "queries", "answers", *SHARES.values()]
    heading += [part for label in TESTS.values() for part in (label, "p (Holm)")]
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for name, result in results.items():
        cells = [name, str(result.queries), str(result.right_answers)]
        cells += [format_percent(result.figures[share].estimate) for share in SHARES]
        for test in TESTS:
            p, holm_p = result.ps[test], corrected[test].get(name)
            cells.append(format_percent(result.figures[test].estimate, signed=True))
            cells.append("-" if p is None else f"{p:.2g}" if holm_p is None else f"{p:.2g} ({holm_p:.2g})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines
