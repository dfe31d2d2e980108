"""What a second answer is worth: figures with 95 % intervals from the outcomes of first and second answers.

p1    share of right first answers
p1'   share of right second samples of the first agent, where its first sample was wrong
p2    share of right answers of the second agent, where the first answer was wrong

p1' and p2 have the same wrong first answers in the denominator, so their difference is paired. Every figure is a ratio
of two sums over queries; intervals resample queries. A first answer is compared with all other samples of its query,
not only with the next one, so that no sample is wasted.
"""

import math
from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from launch.display.statistics import TAIL, Estimate, Floats, Z, column_cis, wilson

MIN_SAMPLES = 3
"""First answers per query: a best-of-3 requires three."""
VOTERS, MAX_VOTERS = 3, 12
NO_ANSWER = -1
"""Number of an answer that cannot be compared."""
MIN_EVENTS = 10
"""Fewest queries with an event for which resampling gives the interval."""
TINY = 1e-9
"""Differences below this are rounding errors."""

Bools = NDArray[np.bool_]


class SecondAnswers(NamedTuple):
    """Answers of the second agent, one to each first answer, and their tokens: arrays `[queries, samples]`."""

    right: Bools
    length: Floats


class Outcomes(NamedTuple):
    """First and second answers at one temperature: arrays `[queries, samples]`.

    Attributes:
        answers: Numbers of the first answers: equal ones to a query have the same; `NO_ANSWER` cannot be compared.
        second: Without feedback.
        accepted: Whether the feedback on the first answer is None ("solved"); None if there is no feedback function.
        second_feedback: With feedback, also after accepted answers; None if there is no feedback function.
    """

    right: Bools
    length: Floats
    answers: NDArray[np.integer]
    second: SecondAnswers
    accepted: Bools | None = None
    second_feedback: SecondAnswers | None = None


class SingleAnswers(NamedTuple):
    """Independent answers of one agent: arrays `[queries, samples]`, as in `Outcomes`."""

    right: Bools
    length: Floats
    answers: NDArray[np.integer]
    accepted: Bools | None = None


class Figure(NamedTuple):
    """A figure with its interval; if it is the score of a way to answer, with the mean tokens per query."""

    estimate: Estimate
    tokens: float | None = None


class Ratio(NamedTuple):
    """A figure before its sums are taken: arrays `[queries]`."""

    numerator: Floats
    denominator: Floats

    @property
    def mean(self) -> float:
        """The ratio of the sums."""
        return float(self.numerator.sum() / self.denominator.sum())

    @property
    def residuals(self) -> Floats:
        """`[queries]`, deviations of the linearized ratio from its mean; 0 for queries without a case."""
        scale = self.denominator[self.denominator > 0].mean()
        residuals: Floats = (self.numerator - self.mean * self.denominator) / scale
        return np.where(np.abs(residuals) > TINY, residuals, 0.0)

    @property
    def linearized(self) -> Floats:
        """`[queries]`, values with the ratio's mean and spread; NaN for queries without a case."""
        has_case = self.denominator > 0
        if not has_case.any():
            return np.full(len(has_case), np.nan)
        return np.where(has_case, self.mean + self.residuals, np.nan)

    @property
    def num_events(self) -> int:
        """Number of queries with a numerator above 0."""
        return int((self.numerator > TINY).sum())

    @property
    def is_rare(self) -> bool:
        """Whether fewer than `MIN_EVENTS` queries have an event, or fewer have the opposite one."""
        opposite = Ratio(self.denominator - self.numerator, self.denominator)
        return min(self.num_events, opposite.num_events) < MIN_EVENTS

    def minus(self, other: "Ratio") -> "Ratio":
        """Returns the paired difference of two ratios with the same denominator."""
        return Ratio(self.numerator - other.numerator, self.denominator)


class Strategy(NamedTuple):
    """A way to answer queries: estimated probability of a right final answer, and expected tokens, `[queries]`."""

    score: Floats
    tokens: Floats


def compute_figures(outcomes: Outcomes, seed: int = 0) -> dict[str, Figure]:
    """Computes all figures at one temperature.

    Args:
        outcomes: Of at least one query, with at least `MIN_SAMPLES` samples.

    Returns:
        By name: shares (`p1`, `p1_again`, `p2`, `p2_feedback`, `kept`, `kept_feedback`, `wrongly_accepted`,
        `not_accepted`), scores of strategies with their tokens (`strategies`), and differences (`differences`).
        Without feedback, the names with feedback are absent. Shares without any case are NaN.
    """
    by_name, samples = strategies(outcomes), outcomes.right.shape[1]
    shares = conditional_shares(outcomes)
    everything = {
        **shares,
        **{name: _mean(strategy.score, samples) for name, strategy in by_name.items()},
        **differences(outcomes, shares, by_name),
    }
    return {
        name: Figure(estimate, float(by_name[name].tokens.mean()) if name in by_name else None)
        for name, estimate in ratio_cis(everything, seed).items()
    }


def conditional_shares(outcomes: Outcomes) -> dict[str, Ratio]:
    """Returns the shares of right first answers, repaired and kept answers, and errors of the check."""
    right, wrong, samples = outcomes.right, ~outcomes.right, outcomes.right.shape[1]
    shares = {
        "p1": _mean(right.mean(1), samples),
        "p1_again": Ratio(wrong.sum(1) * right.sum(1) / (samples - 1), wrong.sum(1).astype(float)),
        "p2": _share(outcomes.second.right, wrong),
        "kept": _share(outcomes.second.right, right),
    }
    if outcomes.accepted is not None and outcomes.second_feedback is not None:
        shares |= {
            "p2_feedback": _share(outcomes.second_feedback.right, wrong),
            "kept_feedback": _share(outcomes.second_feedback.right, right),
            "wrongly_accepted": _share(wrong, outcomes.accepted),
            "not_accepted": _share(~outcomes.accepted, right),
        }
    return shares


def strategies(outcomes: Outcomes) -> dict[str, Strategy]:
    """Returns the ways to answer.

    `one_answer`; `best_of_2` and `best_of_3`, the first sample that the check accepts, else the last one;
    `vote_of_3`; `chain`, the second agent's answer. With feedback also `chain_stop` and `chain_feedback`: the first
    answer if the check accepts it, else the second agent's, which saw no feedback or the feedback. Without a feedback
    function, the check of best-of-n is the reward itself, an upper bound, and no chain stops.
    """
    first, length = outcomes.right, outcomes.length
    result = {
        "one_answer": Strategy(first.mean(1), length.mean(1)),
        "best_of_2": best_of(outcomes, 2),
        "best_of_3": best_of(outcomes, 3),
        "chain": Strategy(outcomes.second.right.mean(1), (length + outcomes.second.length).mean(1)),
    }
    if (votes := vote(outcomes.answers, first)) is not None:
        result["vote_of_3"] = Strategy(votes, VOTERS * length.mean(1))
    accepted = outcomes.accepted
    if accepted is not None and outcomes.second_feedback is not None:
        for name, second in (("chain_stop", outcomes.second), ("chain_feedback", outcomes.second_feedback)):
            score = np.where(accepted, first, second.right).mean(1)
            result[name] = Strategy(score, (length + np.where(accepted, 0.0, second.length)).mean(1))
    return result


def differences(outcomes: Outcomes, shares: dict[str, Ratio], by_name: dict[str, Strategy]) -> dict[str, Ratio]:
    """Returns the paired differences that decide what to train.

    `p2 - p1_again`, `p2_feedback - p1_again`, `p2_feedback - p2`; `chain - one_answer`, `chain - vote_of_3`; and for
    chains that stop, the difference to best-of-n with as many tokens: `chain_feedback - best_of_n`,
    `chain_stop - best_of_n`.
    """
    samples = outcomes.right.shape[1]
    result = {"p2 - p1_again": shares["p2"].minus(shares["p1_again"])}
    result["chain - one_answer"] = _mean(by_name["chain"].score - by_name["one_answer"].score, samples)
    if "vote_of_3" in by_name:
        result["chain - vote_of_3"] = _mean(by_name["chain"].score - by_name["vote_of_3"].score, samples)
    if "p2_feedback" in shares:
        result["p2_feedback - p1_again"] = shares["p2_feedback"].minus(shares["p1_again"])
        result["p2_feedback - p2"] = shares["p2_feedback"].minus(shares["p2"])
        for name in ("chain_stop", "chain_feedback"):
            rival = best_of_tokens(outcomes, float(by_name[name].tokens.mean()))
            result[f"{name} - best_of_n"] = _mean(by_name[name].score - rival.score, samples)
    return result


def best_of(outcomes: Outcomes | SingleAnswers, n: int) -> Strategy:
    """Returns best-of-n with a check: samples are drawn until the check accepts one, at most n.

    The answer is the accepted sample, or the last one if none is accepted. All orders of the samples are averaged, in
    closed form: a sample is drawn in place k + 1 if k others were drawn before it and the check accepted none of them.

    Args:
        outcomes: The samples. Without a feedback function, the check is the reward.
    """
    right = outcomes.right
    accepted = right if outcomes.accepted is None else outcomes.accepted
    samples = right.shape[1]
    others_rejected = (~accepted).sum(1, keepdims=True) - ~accepted  # among the other samples
    score, tokens = np.zeros(len(right)), np.zeros(len(right))
    not_accepted_yet = np.ones(right.shape)  # probability that the k samples drawn before this one were all rejected
    for k in range(n):
        drawn = not_accepted_yet / samples
        tokens += (drawn * outcomes.length).sum(1)
        score += (drawn * right * (accepted if k < n - 1 else True)).sum(1)
        if k < n - 1:
            not_accepted_yet = not_accepted_yet * np.maximum(others_rejected - k, 0) / (samples - 1 - k)
    return Strategy(score, tokens)


def best_of_tokens(outcomes: Outcomes | SingleAnswers, tokens: float) -> Strategy:
    """Returns best-of-n with a given mean number of tokens per query, interpolated between two numbers n.

    If all samples together have fewer tokens, it is best-of-n with all samples; if one has more, it is one sample.
    """
    smaller = best_of(outcomes, 1)
    for n in range(2, outcomes.right.shape[1] + 1):
        larger = best_of(outcomes, n)
        low, high = smaller.tokens.mean(), larger.tokens.mean()
        if tokens < high:
            weight = max((tokens - low) / (high - low), 0.0)
            return Strategy(
                *(weight * after + (1 - weight) * before for before, after in zip(smaller, larger, strict=True))
            )
        smaller = larger
    return smaller


def vote_of_tokens(single: SingleAnswers, tokens: float) -> Strategy | None:
    """Returns the vote of n samples with a given mean number of tokens per query, interpolated between two numbers n.

    It has at most as many voters as there are samples, of which the first `MAX_VOTERS` are used. None if no query has
    two equal answers.
    """
    answers, right = single.answers[:, :MAX_VOTERS], single.right[:, :MAX_VOTERS]
    length = single.length.mean(1)
    wanted = min(max(tokens / float(length.mean()), 1.0), answers.shape[1])
    low = int(wanted)
    votes = {n: vote(answers, right, n) if n > 1 else right.mean(1) for n in {low, math.ceil(wanted)}}
    scores = [votes[n] for n in (low, math.ceil(wanted))]
    if scores[0] is None or scores[1] is None or (low == 1 and wanted == 1):
        return None
    weight = wanted - low
    return Strategy((1 - weight) * scores[0] + weight * scores[1], wanted * length)


def vote(answers: NDArray[np.integer], right: Bools, voters: int = VOTERS) -> Floats | None:
    """Returns the score of a majority vote of samples, averaged over all sets of so many voters, `[queries]`.

    If no two of their answers are equal, one of those that can be compared wins, each with the same probability; if
    none can be compared, any of them. None if no query has two equal answers, so that there is nothing to count.
    """
    total, most_votes = np.zeros(len(answers)), 0
    sets = list(combinations(range(answers.shape[1]), voters))
    for members in sets:
        chosen, is_right = answers[:, members], right[:, members].astype(float)
        votes = (chosen[:, :, None] == chosen[:, None, :]).sum(2) * (chosen != NO_ANSWER)
        most_votes = max(most_votes, int(votes.max()))
        wins = votes == votes.max(1, keepdims=True)
        total += (is_right * wins).sum(1) / wins.sum(1)
    return total / len(sets) if most_votes > 1 else None


def ratio_cis(ratios: Mapping[str, Ratio], seed: int = 0) -> dict[str, Estimate]:
    """Returns ratios of sums over queries with their 95 % intervals.

    The ratio is linearized, so that it is the mean of one value per query, and its interval is that of `column_cis`,
    over the queries that have a case in the denominator. Resampling says little about events that occur in fewer than
    `MIN_EVENTS` queries: for such a share, the interval is Wilson's. A difference is a positive minus a negative part;
    if one of them is rare, their Wilson intervals are combined (Newcombe 1998).

    Args:
        ratios: By name, of the same queries. A name with `-` is a difference, from -1 to 1; others are from 0 to 1.

    Returns:
        By name, an estimate; `n` is the number of queries with a case. NaN without cases.
    """
    values = np.stack([ratio.linearized for ratio in ratios.values()], axis=1)
    estimates = dict(zip(ratios, column_cis(values, "bootstrap", seed), strict=True))
    for name, ratio in ratios.items():
        mean, low, high, count = estimates[name]
        if not count:
            continue
        smallest = -1.0 if "-" in name else 0.0
        positive, negative = (Ratio(np.maximum(sign * ratio.numerator, 0), ratio.denominator) for sign in (1, -1))
        if not smallest and ratio.is_rare:
            low, high = share_bounds(ratio)
        elif smallest and min(positive.num_events, negative.num_events) < MIN_EVENTS:
            low, high = newcombe(positive, negative)
        assert low is not None and high is not None  # None only for one query, whose events are rare
        estimates[name] = Estimate(mean, max(low, smallest), min(high, 1.0), count)
    return estimates


def newcombe(positive: Ratio, negative: Ratio) -> tuple[float, float]:
    """Returns the interval of the difference of two shares of the same queries from Wilson's intervals of both."""
    products = [
        float((first.residuals * second.residuals).sum())
        for first, second in ((positive, negative), (positive, positive), (negative, negative))
    ]
    correlation = products[0] / math.sqrt(products[1] * products[2]) if min(products[1:]) > TINY else 0.0
    (gain_low, gain_high), (loss_low, loss_high) = share_bounds(positive), share_bounds(negative)

    def margin(gain: float, loss: float) -> float:
        return math.sqrt(max(gain**2 + loss**2 - 2 * correlation * gain * loss, 0.0))

    mean = positive.mean - negative.mean
    return (
        mean - margin(positive.mean - gain_low, loss_high - negative.mean),
        mean + margin(gain_high - positive.mean, negative.mean - loss_low),
    )


def share_bounds(ratio: Ratio) -> tuple[float, float]:
    """Returns Wilson's interval of a share, with the number of independent cases that explains its variance.

    That number is at most the number of cases. It may be below the number of queries with a case, if a few queries have
    most of the cases. It is then itself uncertain, so the quantile is Student's (Korn and Graubard 1998).
    """
    from scipy.special import stdtrit

    mean, queries = ratio.mean, int((ratio.denominator > 0).sum())
    variance, z = float((ratio.residuals**2).sum()) / queries**2, Z
    cases = min(mean * (1 - mean) / max(variance, TINY), max(float(ratio.denominator.sum()), queries))
    if variance < TINY:
        cases = queries
    elif cases < queries:
        cases *= (queries - 1) / queries  # the variance is of a sample
        z = float(stdtrit(queries - 1, 1 - TAIL))
    low, high = wilson(np.array(mean), np.array(cases), z)
    return float(low), float(high)


def _share(events: Bools, cases: Bools) -> Ratio:
    """Returns the share of cases that are events too."""
    return Ratio((events & cases).sum(1).astype(float), cases.sum(1).astype(float))


def _mean(values: Floats, samples: int) -> Ratio:
    """Returns the mean over queries of a value from this many samples per query."""
    return Ratio(values * samples, np.full(len(values), float(samples)))
