"""The measures of a study, pure functions of its results.

A run's figure is the mean over its policies (PPO has one, CORY as many as agents), each alone on the bare held-out
queries after the last update; `of_policies` has each one's, and `best` the best one's. Over seeds, a mean has a 95 %
interval by Student's t, which takes runs for independent draws from a normal distribution. Differences between arms are
of runs with the same seed, which see the same queries where their number per update is the same. What is measured after
training, or over it, is None for a run that did not do all updates, as one that diverged, or of which a policy lacks
the figure (`records.mean_over_policies`); it drops out with its partner, so read differences beside the collapse rate.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from launch.evaluation.intervals import Estimate, over_seeds
from launch.experiments.results import StudyRun
from launch.run_folder.records import Figures, Update, mean_over_policies
from policies.health import Sign, signs_of_collapse
from policies.models.model_names import AVERAGE

EXACT = 14
"""Pairs up to which all signs are tried."""
DRAWN = 20_000
"""Signs that are drawn for more pairs."""

SHOWS_COLLAPSE = {"repetition", "eos_rate", "kl", "response_length"}
"""The figures of a policy in which collapse shows."""
Measure = Callable[[StudyRun], float | None]
"""A figure of a run; None where the run has none."""


class Difference(NamedTuple):
    """One arm less another, over the seeds that both have."""

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    """Per seed."""
    estimate: Estimate
    p: float | None
    """Of the exact sign-flip test, two-sided; see `sign_flip_p`."""
    effect: float | None
    """Hedges' g of paired values; see `hedges_g`."""


class InPlane(NamedTuple):
    """A policy, or the mean of several, in the Pareto view."""

    task_reward: float
    kl: float


def at_end(name: str) -> Measure:
    """Returns the measure of a figure after the last update, the mean over the run's policies."""
    return lambda run: None if run.final is None else run.final["mean"].get(name)


def last_answer(name: str) -> Measure:
    """Returns the measure of a figure of the chain's last answer after the last update."""
    return lambda run: None if run.final is None else run.final.get("last_answer", {}).get(name)


def of_policies(run: StudyRun, name: str) -> dict[str, float]:
    """Returns a figure after the last update by policy; the mean of all LLMs is none of them."""
    policies = {} if run.final is None else run.final["policy"]
    return {
        module: value
        for module, figures in policies.items()
        if module != AVERAGE and (value := figures[name]) is not None
    }


def of_average(name: str) -> Measure:
    """Returns the measure of a figure, after the last update, of the LLM whose weights are the mean of the others'."""
    return lambda run: None if run.final is None else run.final["policy"].get(AVERAGE, {}).get(name)


def generated(run: StudyRun) -> int:
    """Returns the response tokens that a run generated in all its updates."""
    return sum(line.get("tokens", 0) for line in run.metrics)


def within(name: str, of: str, tokens: Mapping[int, int]) -> Measure:
    """Returns the measure of a held-out figure in training, when a run had generated at most so many tokens.

    Args:
        name: of the figure.
        of: `bare`, the mean of the policies; `last`, the chain's last answer; `mean`, the LLM that is their mean.
        tokens: by seed, the most tokens.
    """

    def measure(run: StudyRun) -> float | None:
        spent, found = 0, None
        for line in run.metrics:
            spent += line.get("tokens", 0)
            if spent > tokens[run.seed]:
                break
            if "evaluation" in line:
                policies = line["evaluation"]
                figures = {"bare": policies["mean"], "last": line.get("last_answer"), "mean": policies.get(AVERAGE)}[of]
                found = None if figures is None else figures[name]
        return found

    return measure


def influence(run: StudyRun) -> float | None:
    """Returns the share of the variance of the second agent's reward that the pioneer's response explains."""
    return None if run.final is None or "influence" not in run.final else run.final["influence"]["share"]


def best(name: str) -> Measure:
    """Returns the measure of a figure of the run's policy that has the highest combined reward.

    It is chosen by the queries that it is reported on, so the more policies a run has, the more chance adds to it.
    """

    def measure(run: StudyRun) -> float | None:
        combined = of_policies(run, "combined_reward")
        return of_policies(run, name).get(max(combined, key=lambda module: combined[module])) if combined else None

    return measure


def area(name: str = "combined_reward") -> Measure:
    """Returns the measure of the area under a held-out curve, by trapezoids, per update: the curve's mean height.

    It runs over the evaluations during training, the mean of the policies.
    """

    def measure(run: StudyRun) -> float | None:
        points = curve(run, name)
        if len(points) < 2 or not whole(run):
            return None
        updates, values = zip(*points, strict=True)
        return float(np.trapezoid(values, updates)) / (updates[-1] - updates[0])

    return measure


def curve(run: StudyRun, name: str) -> list[tuple[int, float]]:
    """Returns a held-out figure, the mean of the policies, at every evaluation: (update, value)."""
    return [
        (line["update"], value)
        for line in run.metrics
        if "evaluation" in line and (value := line["evaluation"]["mean"][name]) is not None
    ]


def whole(run: StudyRun) -> bool:
    """Returns whether a run did all its updates."""
    return bool(run.metrics) and run.metrics[-1]["update"] == run.settings.updates


def before(name: str) -> Measure:
    """Returns the measure of a held-out figure before training, the mean over the run's policies."""
    return lambda run: dict(curve(run, name)).get(0)


def trained(name: str, last: int) -> Measure:
    """Returns the measure of a figure of the last updates' responses in training, the mean over roles.

    Args:
        name: of the figure.
        last: so many updates.
    """

    def measure(run: StudyRun) -> float | None:
        return _mean([line["role"] for line in run.metrics if "role" in line][-last:], name) if whole(run) else None

    return measure


def critic_loss(run: StudyRun) -> float | None:
    """Returns the critic's loss (`token_ppo.value_loss`), the mean over updates and policies; None without a critic.

    Half the mean square of what values leave of the returns: noise to the advantages, whoever's reward it is from.
    """
    return _mean([line["policy"] for line in run.metrics if "policy" in line], "value_loss") if whole(run) else None


def untrained(name: str) -> Measure:
    """Returns the measure of a figure of the first update's responses, before anything is learned, over roles."""
    return lambda run: _mean([line["role"] for line in run.metrics if "role" in line][:1], name)


def _mean(lines: Sequence[Mapping[str, Figures]], name: str) -> float | None:
    """Returns the mean over updates of the mean over policies, or roles."""
    means = [mean_over_policies(list(figures.values())).get(name) for figures in lines]
    known = [mean for mean in means if mean is not None]
    return float(np.mean(known)) if known else None


def gain(name: str) -> Measure:
    """Returns the measure of a held-out figure's change from before training to the last evaluation in training."""

    def measure(run: StudyRun) -> float | None:
        points = curve(run, name)
        return points[-1][1] - points[0][1] if len(points) > 1 and whole(run) else None

    return measure


def unsteadiness(run: StudyRun) -> float | None:
    """Returns the deviation of the training task reward from one update to the next, the mean over policies.

    The root mean square of successive differences over √2, which a steady trend hardly adds to (von Neumann 1941).
    Differences across a role exchange are left out: there a policy's prompts change, in some arms and not in others.
    """
    lines = [line for line in run.metrics if "policy" in line]
    found = []
    for module in run.settings.modules:
        steps = [
            later - value
            for line, following in pairwise(lines)
            if line["roles"] == following["roles"]
            and (value := line["policy"][module]["task_reward"]) is not None
            and (later := following["policy"][module]["task_reward"]) is not None
        ]
        if steps:
            found.append(math.sqrt(float(np.mean(np.square(steps))) / 2))
    return float(np.mean(found)) if len(found) == len(run.settings.modules) and whole(run) else None


def values(runs: Iterable[StudyRun], measure: Measure) -> dict[int, float]:
    """Returns a measure by seed, of the runs that have it."""
    return {run.seed: value for run in runs if (value := measure(run)) is not None and math.isfinite(value)}


def variance(runs: Iterable[StudyRun], name: str) -> float | None:
    """Returns the variance over seeds of a figure after the last update, the mean of the policies' variances.

    Not of their mean: a mean of several policies varies less than one policy, however they were trained.

    Returns:
        With n - 1 in the denominator; None for fewer than two runs that have it.
    """
    found: dict[str, list[float]] = {}
    for run in runs:
        for module, value in of_policies(run, name).items():
            found.setdefault(module, []).append(value)
    several = [float(np.var(some, ddof=1)) for some in found.values() if len(some) > 1]
    return float(np.mean(several)) if several else None


def paired(
    one: Iterable[StudyRun], other: Iterable[StudyRun], measure: Measure, of_other: Measure | None = None
) -> Difference | None:
    """Returns one arm's measure less another's, or less another measure of it, seed by seed; None without a seed that
    both have.
    """
    ours, theirs = values(one, measure), values(other, of_other or measure)
    return differences({seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())})


def differences(by_seed: dict[int, float]) -> Difference | None:
    """Returns what several differences say together; None where there are none."""
    found = tuple(by_seed.values())
    estimate = over_seeds(found)
    if estimate is None:
        return None
    return Difference(tuple(by_seed), found, estimate, sign_flip_p(found), hedges_g(found))


def sign_flip_p(numbers: Sequence[float]) -> float | None:
    """Tests whether paired differences have mean 0: under the hypothesis each could have had the other sign.

    All 2^n signs are tried, so n differences give p ≥ 2 / 2^n: 0.0625 for five, 0.25 for three. Five seeds can never be
    "significant at 5 %", whatever they show. For more than `EXACT` differences, `DRAWN` of them are drawn, always the
    same ones.

    Returns:
        The two-sided p; None for fewer than two differences.
    """
    if len(numbers) < 2:
        return None
    from scipy.stats import permutation_test

    found = permutation_test(
        (np.asarray(numbers), np.zeros(len(numbers))),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf if len(numbers) <= EXACT else DRAWN,
        rng=0,
    )
    return float(found.pvalue)


def hedges_g(numbers: Sequence[float]) -> float | None:
    """Returns the effect size of paired differences: mean over standard deviation, times 1 - 3 / (4 (n - 1) - 1).

    The factor takes out the upward bias of few pairs (Hedges 1981). None for fewer than three pairs, or without spread.
    """
    n = len(numbers)
    deviation = float(np.std(numbers, ddof=1)) if n > 2 else 0.0
    return float(np.mean(numbers)) / deviation * (1 - 3 / (4 * (n - 1) - 1)) if deviation > 0 else None


def collapse(run: StudyRun) -> list[Sign]:
    """Returns the signs of collapse that a run's policies show at its last held-out evaluation, by health's limits.

    A policy has collapsed where its responses repeat themselves (`max_repetition`), their end-of-sequence rate has
    fallen below `min_eos_share` of that before training, or their KL per token is above `max_token_kl`. A run whose
    gradient was no longer finite has collapsed too.
    """
    evaluated: list[Update] = [line for line in run.metrics if "evaluation" in line]
    signs: list[Sign] = []
    if evaluated:
        first, last = evaluated[0]["evaluation"], dict(evaluated[-1]["evaluation"])
        if run.final is not None:
            last |= run.final["policy"]
        for module in run.settings.modules:
            figures = {name: value for name, value in last[module].items() if value is not None}
            if figures.keys() >= SHOWS_COLLAPSE:  # runs of before had fewer
                rate = first[module].get("eos_rate") or 0.0
                signs += signs_of_collapse(run.settings, module, figures, rate, run.settings.eval_queries)
    if run.status == "diverged":
        signs.append(Sign("diverged", "the run", run.reason or ""))
    return signs


def collapses(runs: Iterable[StudyRun]) -> int:
    """Returns the number of runs in which a policy has collapsed."""
    return sum(bool(collapse(run)) for run in runs)


def point(run: StudyRun) -> InPlane | None:
    """Returns where a run ends in the Pareto view."""
    reward, kl = at_end("task_reward")(run), at_end("kl")(run)
    return None if reward is None or kl is None else InPlane(reward, kl)


def pareto_front(points: Iterable[InPlane]) -> list[InPlane]:
    """Returns the points to which no other is better or equal in both task reward and KL, by growing KL."""
    front: list[InPlane] = []
    for candidate in sorted(set(points), key=lambda found: (found.kl, -found.task_reward)):
        if not front or candidate.task_reward > front[-1].task_reward:
            front.append(candidate)
    return front
