"""Our figures for the claims about CORY, each with a verdict: small rules on a study's results.

A claim is decided by the 95 % interval of our figure over seeds (Student's t): *reproduced* if the whole interval is in
the claimed range, *not reproduced* if the whole interval is outside it, otherwise *inconclusive*. It is always
inconclusive if an arm has fewer than `FEWEST` runs. Claims about collapsed runs are decided by their number. The
thresholds for "similar", "almost" and "far" are our choice: `SIMILAR`, `NEARLY` and `FAR`.

A figure's text includes the number of runs if some have no value, such as diverged ones.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from benchmarks.reproduction.measures import (
    before,
    curve,
    gain,
    hedges_g,
    in_roles,
    paired_runs,
    policies_at_end,
    values,
    variance,
)
from benchmarks.reproduction.sweeps import hypervolumes, larger, matched
from launch.display.statistics import Difference, Estimate, estimate_difference, mean_ci
from launch.experiments.measures import Measure, final_value, metrics_of, run_collapse_signs
from launch.experiments.results import StudyRun

Verdict = Literal["reproduced", "not reproduced", "inconclusive", "not run"]
Arms = Mapping[str, Sequence[StudyRun]]
"""The runs of a study, by arm."""
FINAL_REWARD, FIRST_REWARD, FINAL_KL = final_value("task_reward"), before("task_reward"), final_value("kl")

FEWEST = 3
"""Minimum number of runs per arm to decide a claim."""
SIMILAR = 0.1
"""Two results are similar if they differ by at most this share of the gain in training."""
FAR = 1.5
"""Minimum ratio of two KLs for one to be far above, or much higher than, the other."""
LATE = 5
"""Number of last updates over which a training metric is averaged."""
MUCH_MORE = 10
"""Factor over the repetition before training from which a policy repeats itself much more often."""
SOON = 0.1
"""A run converges early if it reaches `NEARLY` of its gain within this share of the updates."""
NEARLY = 0.9


class Finding(NamedTuple):
    """Our figure for a claim."""

    text: str
    """The figure with its interval over seeds."""
    verdict: Verdict
    p: float | None = None
    """p of the sign-flip test, with the null hypothesis of no difference; None if runs are not paired."""
    effect: float | None = None
    """Hedges' g of paired runs; None otherwise."""


def above(estimate: Estimate, bound: float) -> Verdict:
    """Judges the claim that a figure is larger than `bound`."""
    return between(estimate, bound, math.inf)


def below(estimate: Estimate, bound: float) -> Verdict:
    """Judges the claim that a figure is smaller than `bound`."""
    return between(estimate, -math.inf, bound)


def between(estimate: Estimate, lower: float, upper: float) -> Verdict:
    """Judges the claim that a figure lies between two bounds."""
    if estimate.low is None or estimate.high is None or estimate.n < FEWEST:
        return "inconclusive"
    if lower < estimate.low and estimate.high < upper:
        return "reproduced"
    return "not reproduced" if estimate.high < lower or estimate.low > upper else "inconclusive"


def quoted(estimate: Estimate, figure: float, no_effect: float) -> Verdict:
    """Judges a quoted figure: reproduced if the interval contains it and excludes `no_effect`."""
    if estimate.low is None or estimate.high is None or estimate.n < FEWEST or estimate.low == estimate.high:
        return "inconclusive"
    if not estimate.low <= figure <= estimate.high:
        return "not reproduced"
    return "inconclusive" if estimate.low <= no_effect <= estimate.high else "reproduced"


# Figures over seeds.


def difference(arms: Arms, one: str, other: str, measure: Measure, name: str, bound: float = 0.0) -> Finding | None:
    """Claims that an arm's figure is larger than another's, by more than `bound`."""
    estimate = paired_runs(arms.get(one, ()), arms.get(other, ()), measure)
    if estimate is None:
        return None
    text = f"{name}: {_shown(estimate.estimate, _pairs(arms, one, other))}"
    return Finding(text, above(estimate.estimate, bound), estimate.p, hedges_g(estimate.values))


def ratio(arms: Arms, one: str, other: str, bound: float, kl: Measure = FINAL_KL) -> Finding | None:
    """Claims that an arm's KL is more than `bound` times another's."""
    estimate = paired_runs(arms.get(one, ()), arms.get(other, ()), lambda metrics: _log(kl(metrics)))
    return None if estimate is None else _times(estimate, bound, _pairs(arms, one, other))


def _times(logarithms: Difference, bound: float, runs: int) -> Finding:
    mean, low, high, n = logarithms.estimate
    estimate = Estimate(
        math.exp(mean), None if low is None else math.exp(low), None if high is None else math.exp(high), n
    )
    text = f"KL × {_shown(estimate, runs, sign='')}"
    return Finding(text, above(estimate, bound), logarithms.p, hedges_g(logarithms.values))


def _pairs(arms: Arms, one: str, other: str) -> int:
    """Returns the number of seeds with which both arms were run."""
    return len({run.seed for run in arms.get(one, ())} & {run.seed for run in arms.get(other, ())})


def _share_of_gain(
    arms: Arms, one: str, other: str, reward: Measure = FINAL_REWARD, start_of: Measure = FIRST_REWARD
) -> Difference | None:
    """Returns the difference of two arms' task rewards, as a share of the second arm's gain in training."""
    ours, theirs = (values(arms.get(name, ()), reward) for name in (one, other))
    start = values(arms.get(other, ()), start_of)
    seeds = [seed for seed in sorted(ours.keys() & theirs.keys() & start.keys()) if theirs[seed] > start[seed]]
    return estimate_difference({seed: (ours[seed] - theirs[seed]) / (theirs[seed] - start[seed]) for seed in seeds})


def similar_reward(
    arms: Arms,
    one: str,
    other: str,
    upper: float,
    reward: Measure = FINAL_REWARD,
    start_of: Measure = FIRST_REWARD,
) -> Finding | None:
    """Claims that an arm's task reward exceeds another's by at most the share `most` of the other's gain."""
    estimate = _share_of_gain(arms, one, other, reward, start_of)
    if estimate is None:
        return None
    text = _percent(estimate.estimate, _pairs(arms, one, other), " of the gain")
    return Finding(text, between(estimate.estimate, -SIMILAR, upper), estimate.p, hedges_g(estimate.values))


def changes(arms: Arms, arm: str, rises: bool) -> Finding | None:
    """Claims that the held-out combined reward `rises` in training, or else that it falls."""
    mean = mean_ci(values(arms.get(arm, ()), gain("combined_reward")).values())
    if not mean.n:
        return None
    text = f"combined reward {_shown(mean, len(arms[arm]))}"
    return Finding(text, above(mean, 0.0) if rises else below(mean, 0.0))


def equal_agents(arms: Arms) -> Finding | None:
    """Claims that CORY's policies end with almost the same combined reward."""
    metrics = metrics_of(arms.get("cory", ()))
    combined, reward = policies_at_end(metrics, "combined_reward"), gain("task_reward")(metrics)
    shares = (combined.max(axis=1) - combined.min(axis=1))[combined.count(axis=1) > 1] / reward[reward > 0]
    mean = mean_ci(shares)
    if not mean.n:
        return None
    text = f"combined rewards differ by {_percent(mean, len(arms['cory']), ' of the gain')}"
    return Finding(text, below(mean, SIMILAR))


def observer_below_pioneer(arms: Arms) -> Finding | None:
    """Claims that, without role exchange, the pioneer's KL ends far above the observer's."""
    metrics = metrics_of(arms.get("no-exchange", ()))
    late = metrics.complete(in_roles(metrics, "kl")).groupby("run").tail(LATE).groupby("run").sum()
    if late.empty:
        return None
    estimate = estimate_difference(metrics.by_seed(lambda _: _log(late["pioneer"]) - _log(late["observer"])).to_dict())
    return None if estimate is None else _times(estimate, FAR, len(arms["no-exchange"]))


def pareto(arms: Arms) -> Finding | None:
    """Claims that over the sweep of `kl_coef` CORY's hypervolume is larger than PPO's."""
    ppo, cory = hypervolumes(arms)
    estimate = larger(cory, ppo)
    if estimate is None:
        return None
    return Finding(
        f"hypervolume {_shown(estimate.estimate, estimate.estimate.n)} (PPO {sum(ppo.values()) / len(ppo):.3g})",
        above(estimate.estimate, 0.0),
        estimate.p,
        hedges_g(estimate.values),
    )


def learning_rates(arms: Arms) -> Finding | None:
    """Claims that at one learning rate every PPO run collapses and no CORY run.

    Not reproduced if PPO's runs mostly collapse at one rate, and at no rate collapse more often than CORY's. It is not
    required that all runs of both collapse at one rate, because a single run close to a limit would decide that.
    """
    pairs = matched(arms, "lr")
    if len(pairs) < 2:
        return None
    counts = {
        rate: (count_collapsed(ppo), len(ppo), count_collapsed(cory), len(cory)) for rate, (ppo, cory) in pairs.items()
    }
    text = "; ".join(f"{rate:g}: PPO {a} of {n}, CORY {b} of {m}" for rate, (a, n, b, m) in sorted(counts.items()))
    decided = [(a / n, b / m) for a, n, b, m in counts.values() if n >= FEWEST and m >= FEWEST]
    if (1.0, 0.0) in decided:
        return Finding(text, "reproduced")
    # If PPO never collapses, the rates were too low for a decision.
    mostly, more = any(ppo > 0.5 for ppo, _ in decided), any(ppo > cory for ppo, cory in decided)
    return Finding(text, "not reproduced" if mostly and not more else "inconclusive")


def collapse_is_endless(arms: Arms) -> Finding | None:
    """Claims that most collapsed PPO runs rarely end their responses."""
    runs = _collapsed(arms)
    if runs is None:
        return None
    endless = sum("eos" in _signatures(run) for run in runs)
    text = f"{endless} of the {len(runs)} runs of PPO that collapsed"
    return Finding(text, _most(endless, runs, "not reproduced"))


def collapse_repeats(arms: Arms) -> Finding | None:
    """Claims that most collapsed PPO runs repeat themselves beyond the limit (docs/faq.md).

    Not reproduced if most do not even repeat themselves `MUCH_MORE` times as often as before training.
    """
    runs = _collapsed(arms)
    if runs is None:
        return None
    beyond = sum("repetition" in _signatures(run) for run in runs)
    end, start = (
        [values([run], measure("repetition")).get(run.seed, 0.0) for run in runs] for measure in (final_value, before)
    )
    more = sum(late > MUCH_MORE * early for late, early in zip(end, start, strict=True))
    text = f"{beyond} of the {len(runs)} runs of PPO that collapsed; {more} repeat {MUCH_MORE} times as much as before"
    return Finding(text, _most(beyond, runs, "inconclusive" if 2 * more > len(runs) else "not reproduced"))


def _collapsed(arms: Arms) -> list[StudyRun] | None:
    """Returns the collapsed PPO runs of all arms; None without PPO runs."""
    ppo = [run for runs in arms.values() for run in runs if run.settings.num_agents == 1 and run.settings.critic]
    return [run for run in ppo if run_collapse_signs(run)] if ppo else None


def count_collapsed(runs: Sequence[StudyRun]) -> int:
    """Returns the number of collapsed runs."""
    return sum(bool(run_collapse_signs(run)) for run in runs)


def _signatures(run: StudyRun) -> set[str]:
    return {sign.signature for sign in run_collapse_signs(run)}


def _most(count: int, runs: Sequence[StudyRun], otherwise: Verdict) -> Verdict:
    if len(runs) < FEWEST:
        return "inconclusive"
    return "reproduced" if 2 * count > len(runs) else otherwise


def declines(arms: Arms, arm: str) -> Finding | None:
    """Claims that held-out task reward is lower at the end than in the middle of training."""
    changes = []
    for run in arms.get(arm, ()):
        points = curve(run, "task_reward")
        half = [value for update, value in points if update >= run.settings.num_updates / 2]
        if len(half) > 1:
            changes.append(half[-1] - half[0])
    mean = mean_ci(changes)
    if not mean.n:
        return None
    return Finding(f"task reward {_shown(mean, len(arms[arm]))} in the second half", below(mean, 0.0))


def early(arms: Arms, arm: str) -> Finding | None:
    """Claims that most of the best gain in held-out task reward comes early."""
    shares = []
    for run in arms.get(arm, ()):
        points = curve(run, "task_reward")
        soon = [value for update, value in points if update >= SOON * run.settings.num_updates and update > 0]
        best = max((value for _, value in points), default=0.0)
        if soon and best > points[0][1]:
            shares.append((soon[0] - points[0][1]) / (best - points[0][1]))
    mean = mean_ci(shares)
    if not mean.n:
        return None
    return Finding(_percent(mean, len(arms[arm]), " of the gain"), above(mean, NEARLY))


# The quoted figures.


def optimality(arms: Arms) -> Finding | None:
    """Judges the quoted +12.3 % "optimality", as task reward, because the source does not define it."""
    estimate = _share_of_gain(arms, "cory", "ppo")
    if estimate is None:
        return None
    text = _percent(estimate.estimate, _pairs(arms, "cory", "ppo"))
    return Finding(text, quoted(estimate.estimate, 0.123, 0.0), estimate.p, hedges_g(estimate.values))


def fewer_collapses(arms: Arms) -> Finding | None:
    """Judges the quoted -67 % collapses, over all settings with both arms: those of tier 1, and both sweeps.

    Whether runs collapse depends on the setting far more than on the seed, so the interval is over the settings in
    which any run did.
    """
    settings = {ppo[0].arm: (ppo, cory) for key in ("lr", "kl_coef") for ppo, cory in matched(arms, key).values()}
    if not settings:
        return None
    counts = [(count_collapsed(ppo), len(ppo), count_collapsed(cory), len(cory)) for ppo, cory in settings.values()]
    theirs, ppo_runs, ours, cory_runs = map(sum, zip(*counts, strict=True))
    shares = [(a / n, b / m) for a, n, b, m in counts if a or b]
    text = f"PPO {theirs} of {ppo_runs}, CORY {ours} of {cory_runs}, in {len(shares)} of {len(settings)} settings"
    usual = sum(share for share, _ in shares) / max(len(shares), 1)
    estimate = mean_ci([(mine - share) / usual for share, mine in shares] if usual else [])
    if not estimate.n:
        return Finding(text, "inconclusive")
    return Finding(f"{_percent(estimate, estimate.n)} ({text})", quoted(estimate, -0.67, 0.0))


def less_variance(arms: Arms) -> Finding | None:
    """Judges the quoted -41 % variance, as the variance over seeds of one policy.

    The interval is by the F distribution, which assumes normal values. It treats CORY's variance as that of one policy
    although it is the mean of two, so it is rather too wide.
    """
    from scipy.stats import f

    ppo, cory = arms.get("ppo", ()), arms.get("cory", ())
    theirs, ours = (variance(metrics_of(runs), "combined_reward") for runs in (ppo, cory))
    if not theirs > 0 or math.isnan(ours):
        return None
    counts = [len(values(runs, final_value("combined_reward"))) for runs in (cory, ppo)]
    low, high = (ours / theirs / float(f.ppf(q, counts[0] - 1, counts[1] - 1)) for q in (0.975, 0.025))
    estimate = Estimate(ours / theirs - 1, low - 1, high - 1, min(counts))
    return Finding(_percent(estimate, min(len(cory), len(ppo))), quoted(estimate, -0.41, 0.0))


def _log(values: "pd.Series[float]") -> "pd.Series[float]":
    """Returns the logarithms of positive values, NaN for others."""
    return np.log(values.where(values > 0))


def _shown(estimate: Estimate, runs: int, sign: str = "+") -> str:
    return f"{estimate.format(f'{{:{sign}.3g}}')}, {_count(estimate.n, runs)}"


def _percent(estimate: Estimate, runs: int, unit: str = "") -> str:
    mean, bracket, interval = estimate.format("{:+z.0%}").partition(" [")
    return f"{mean}{unit}{bracket}{interval}, {_count(estimate.n, runs)}"


def _count(n: int, runs: int) -> str:
    return f"n = {n}" if n == runs else f"n = {n} of {runs}"
