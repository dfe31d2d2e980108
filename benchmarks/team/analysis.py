"""Statistics of the study: the best rates, and the contrasts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from benchmarks.feedback.design import PILOT_SEEDS
from benchmarks.team.design import CONTRASTS, KINDS, OWN_WAYS, RATES, SWAP, Contrast
from benchmarks.team.runs import Job, Result
from launch.display.statistics import Difference, Estimate, estimate_difference, holm, mean_ci

Results = Mapping[tuple[str, float], Mapping[int, Result]]
"""By kind and rate, by seed."""


class ContrastResult(NamedTuple):
    """The result of a contrast, at each side's best rate or at equal rates."""

    name: str
    rates: tuple[float, float]
    sides: tuple[float, float]
    """Mean scores; of `SWAP` the two losses."""
    difference: Difference
    p: float | None = None
    """Of the sign-flip test, corrected by Holm's method; None for contrasts at other rates, which are not corrected."""


def read_results(jobs: Iterable[Job]) -> dict[tuple[str, float], dict[int, Result]]:
    """Reads the results that are there."""
    results: dict[tuple[str, float], dict[int, Result]] = {}
    for job in jobs:
        result = job.read()
        if result is not None:
            results.setdefault((job.arm.kind, job.arm.lr), {})[job.seed] = result
    return results


def score(result: Result, way: str) -> float:
    """Returns the score of a way; 0 for a run that diverged."""
    return result["ways"][way]["score"] if result["ways"] else 0.0


def mean_score(results: Mapping[int, Result], way: str) -> Estimate:
    """Returns the mean over seeds."""
    return mean_ci(score(result, way) for result in results.values())


def best_rates(results: Results) -> dict[str, float] | None:
    """Returns the best rate of each kind, by the way in which it was trained; None if pilot runs are missing."""
    if any({*PILOT_SEEDS} - {*results.get((kind, lr), {})} for kind in KINDS for lr in RATES):
        return None
    return {kind: max(RATES, key=lambda lr: mean_score(results[kind, lr], OWN_WAYS[kind]).mean) for kind in KINDS}


def evaluate_contrasts(results: Results, rates: Mapping[str, float]) -> list[ContrastResult]:
    """Returns the planned contrasts at the best rates, with corrected p-values; then those at equal rates.

    Contrasts without common seeds are left out. Those at equal rates are needed where the best rates differ.
    """
    planned = [*(_contrast(results, contrast, rates) for contrast in CONTRASTS), _swap(results, rates)]
    best = [contrast for contrast in planned if contrast is not None]
    corrected = holm([contrast.difference.p for contrast in best], len(planned))
    best = [contrast._replace(p=p) for contrast, p in zip(best, corrected, strict=True)]
    equal = [
        _contrast(results, contrast, dict.fromkeys(KINDS, lr))
        for contrast in CONTRASTS
        if rates[contrast.kind] != rates[contrast.against]
        for lr in sorted({rates[contrast.kind], rates[contrast.against]})
    ]
    if rates["fixed"] != rates["exchange"]:
        equal += [_swap(results, dict.fromkeys(KINDS, lr)) for lr in sorted({rates["fixed"], rates["exchange"]})]
    return [*best, *filter(None, equal)]


def _contrast(results: Results, contrast: Contrast, rates: Mapping[str, float]) -> ContrastResult | None:
    ours = results.get((contrast.kind, rates[contrast.kind]), {})
    theirs = results.get((contrast.against, rates[contrast.against]), {})
    pairs = {
        seed: (score(ours[seed], contrast.way), score(theirs[seed], contrast.against_way))
        for seed in ours
        if seed in theirs
    }
    return _summarize(contrast.name, (rates[contrast.kind], rates[contrast.against]), pairs)


def _swap(results: Results, rates: Mapping[str, float]) -> ContrastResult | None:
    fixed, exchange = (results.get((kind, rates[kind]), {}) for kind in ("fixed", "exchange"))
    losses = {seed: (_loss(fixed[seed]), _loss(exchange[seed])) for seed in fixed if seed in exchange}
    return _summarize(SWAP, (rates["fixed"], rates["exchange"]), losses)


def _loss(result: Result) -> float:
    return score(result, "chain") - score(result, "swapped")


def _summarize(
    name: str, rates: tuple[float, float], pairs: Mapping[int, tuple[float, float]]
) -> ContrastResult | None:
    difference = estimate_difference({seed: one - other for seed, (one, other) in pairs.items()})
    if difference is None:
        return None
    one, other = (mean_ci(pair[side] for pair in pairs.values()).mean for side in (0, 1))
    return ContrastResult(name, rates, (one, other), difference)
