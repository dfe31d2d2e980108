"""Statistics of the study: the choice of the pilot, best-of-n at equal tokens, and the contrasts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from benchmarks.feedback.design import (
    CONTRASTS,
    CREDITS,
    ESTIMATORS,
    LEARNING_RATES,
    NUM_FINALISTS,
    PILOT_SEEDS,
    SOURCES,
    TEMPERATURES,
    Choice,
    Contrast,
    Source,
)
from benchmarks.feedback.runs import Measured, Result, Way
from launch.display.statistics import Difference, estimate_difference, holm

Results = Mapping[str, Mapping[int, Result]]
"""By arm and seed."""


class ContrastResult(NamedTuple):
    """The result of a contrast."""

    contrast: Contrast
    difference: Difference
    p: float | None
    """Of the sign-flip test, corrected by Holm's method."""


def at_tokens(ways: Sequence[Way], tokens: float) -> Way:
    """Returns best-of-n with this many generated tokens per query, interpolated between two numbers n.

    Args:
        ways: Best-of-1, best-of-2, and so on.
        tokens: Generated tokens per query. Above those of the last way, that way is returned, which then has fewer;
            below those of the first, the first.
    """
    if tokens <= ways[0]["tokens"]:
        return ways[0]
    for smaller, larger in pairwise(ways):
        if tokens <= larger["tokens"]:
            weight = (tokens - smaller["tokens"]) / (larger["tokens"] - smaller["tokens"])
            score, spent, prompts = (
                (1 - weight) * smaller[key] + weight * larger[key] for key in ("score", "tokens", "prompt_tokens")
            )
            return Way(score=score, tokens=spent, prompt_tokens=prompts)
    return ways[-1]


def measured_at(result: Result, temperature: float) -> Measured | None:
    """Returns what was measured at a temperature; None if the run diverged."""
    return None if result["probe"] is None else result["probe"][f"{temperature:g}"]


def way_of(result: Result, source: str, temperature: float, tokens: float) -> Way | None:
    """Returns how a run answers; None if it diverged.

    Args:
        result: The run's.
        source: `one_answer`, `best_of` or `chain`.
        temperature: Of sampling.
        tokens: Of `best_of`: generated tokens per query.
    """
    measured = measured_at(result, temperature)
    if measured is None:
        return None
    if source == "chain":
        return measured["chain"]
    return measured["best_of"][0] if source == "one_answer" else at_tokens(measured["best_of"], tokens)


def mean_score(results: Iterable[Result], source: str, temperature: float, tokens: float = 0.0) -> float:
    """Returns the mean score over runs; a run that diverged scores 0."""
    ways = [way_of(result, source, temperature, tokens) for result in results]
    return float(np.mean([0.0 if way is None else way["score"] for way in ways]))


def common_seeds(results: Results, arms: Sequence[str]) -> list[int]:
    """Returns the seeds that all these arms have."""
    return sorted(set.intersection(*({*results.get(arm, {})} for arm in arms)))


def best_score(results: Iterable[Result], source: Source) -> float:
    """Returns the mean score at the best temperature."""
    runs = list(results)
    return max(mean_score(runs, source, temperature) for temperature in TEMPERATURES)


def find_finalists(results: Results, names: Sequence[str], source: Source) -> list[str]:
    """Returns the arms with the best scores of the first pilot seed, best first; none if runs are missing."""
    first = PILOT_SEEDS[0]
    if first not in common_seeds(results, names):
        return []
    ranked = sorted(names, key=lambda name: best_score([results[name][first]], source), reverse=True)
    return ranked[:NUM_FINALISTS]


def single_names() -> dict[str, tuple[str, float]]:
    """Returns the estimator and the learning rate of the pilot's single agents."""
    return {f"single-{estimator}-{lr:g}": (estimator, lr) for estimator in ESTIMATORS for lr in LEARNING_RATES}


def chain_names(estimator: str) -> dict[str, tuple[str, float]]:
    """Returns the rewards and the learning rate of the pilot's chains."""
    return {f"chain-{credit}-{estimator}-{lr:g}": (credit, lr) for credit in CREDITS for lr in LEARNING_RATES}


def choose_single(results: Results) -> tuple[str, float] | None:
    """Returns the estimator and the learning rate of the single agent whose one answer is right most often.

    Each is measured at its best temperature.

    Args:
        results: Of the pilot.

    Returns:
        None if runs are missing.
    """
    names = single_names()
    best = _best(results, list(names), "one_answer")
    return None if best is None else names[best]


def choose(results: Results) -> Choice | None:
    """Returns what the pilot chose; None if runs are missing.

    The chain with the highest score wins. Then each way to answer gets its best temperature; best-of-n with as many
    tokens as the chain at its temperature.
    """
    single = choose_single(results)
    if single is None:
        return None
    estimator, single_lr = single
    names = chain_names(estimator)
    best = _best(results, list(names), "chain")
    if best is None or not {*PILOT_SEEDS} <= {*results.get("untrained-pilot", {})}:
        return None
    credit, chain_lr = names[best]
    runs = {"single": f"single-{estimator}-{single_lr:g}", "chain": best, "untrained": "untrained-pilot"}
    chosen = {key: [results[arm][seed] for seed in PILOT_SEEDS] for key, arm in runs.items()}
    temperatures = {key: _best_temperature(runs_of_arm, SOURCES[key]) for key, runs_of_arm in chosen.items()}
    tokens = mean_tokens(chosen["chain"], temperatures["chain"])
    temperatures["best_of"] = _best_temperature(chosen["single"], "best_of", tokens)
    return Choice(estimator, single_lr, credit, chain_lr, temperatures)


def _best_temperature(results: Sequence[Result], source: Source, tokens: float = 0.0) -> float:
    return max(TEMPERATURES, key=lambda temperature: mean_score(results, source, temperature, tokens))


def mean_tokens(results: Iterable[Result], temperature: float) -> float:
    """Returns the mean generated tokens per query of the chain, over runs that did not diverge."""
    ways = [way_of(result, "chain", temperature, 0.0) for result in results]
    return float(np.mean([way["tokens"] for way in ways if way is not None]))


def _best(results: Results, names: Sequence[str], source: Source) -> str | None:
    """Returns the best of the finalists; None if runs are missing."""
    finalists = find_finalists(results, names, source)
    if not finalists or not {*PILOT_SEEDS} <= {*common_seeds(results, finalists)}:
        return None
    return max(finalists, key=lambda name: best_score([results[name][seed] for seed in PILOT_SEEDS], source))


def evaluate_contrasts(
    results: Results, choice: Choice, contrasts: Sequence[Contrast] = CONTRASTS
) -> list[ContrastResult]:
    """Returns the contrasts whose arms share a seed, paired by seed; p-values are corrected for all of them."""
    differences = []
    for contrast in contrasts:
        by_seed = {}
        for seed in common_seeds(results, [contrast.arm, contrast.against]):
            score, other = (
                score_of(results, choice, arm, source, seed)
                for arm, source in ((contrast.arm, contrast.source), (contrast.against, contrast.against_source))
            )
            if not math.isnan(score - other):
                by_seed[seed] = score - other
        difference = estimate_difference(by_seed)
        if difference is not None:
            differences.append((contrast, difference))
    corrected = holm([difference.p for _, difference in differences], len(contrasts))
    return [ContrastResult(*pair, p) for pair, p in zip(differences, corrected, strict=True)]


def score_of(results: Results, choice: Choice, arm: str, source: str, seed: int) -> float:
    """Returns the score of a run; NaN if it, or the chain whose tokens it gets, is missing or diverged.

    Args:
        results: Of the main runs.
        choice: Of the pilot.
        arm: Name of the arm.
        source: How it answers; `best_of` with as many tokens per query as the trained chain of the same seed.
        seed: Of the run.
    """
    tokens, result = 0.0, results.get(arm, {}).get(seed)
    if source == "best_of":
        chain = results.get("chain", {}).get(seed)
        way = None if chain is None else way_of(chain, "chain", choice.temperatures["chain"], 0.0)
        if way is None:
            return math.nan
        tokens = way["tokens"]
    way = None if result is None else way_of(result, source, choice.temperatures[temperature_key(arm, source)], tokens)
    return math.nan if way is None else way["score"]


def temperature_key(arm: str, source: str) -> str:
    """Returns the key of `Choice.temperatures` for a way to answer."""
    if source == "chain":
        return "untrained" if arm == "untrained" else "chain"
    return "best_of" if source == "best_of" else "single"


def token_ratio(results: Results) -> float | None:
    """Returns the chains' generated tokens in training divided by the single agents' of the same seeds."""
    seeds = common_seeds(results, ["chain", "single"])
    totals = [
        sum(training["tokens"] for seed in seeds if (training := results[arm][seed]["train"]) is not None)
        for arm in ("chain", "single")
    ]
    return totals[0] / totals[1] if seeds and totals[1] else None
