"""Runs side by side: the settings that differ, how each ended on held-out queries, and what it took."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from launch.console.configuration import Value
from launch.display.tables import MAIN
from launch.evaluation.intervals import Estimate, over_queries
from launch.report.runs import MEAN, Run, differing
from launch.run_folder.records import Evaluation, Figures

LAST = "last answer"
"""Who answers last in a chain, as one of those whose figures are shown."""
Ends = dict[str, dict[str, Estimate]]
"""By who answered, each figure; an interval is over queries, and absent where single responses are not kept."""


def ends(run: Run) -> Ends:
    """Returns a run's held-out figures at its end: of each policy, their mean, and the chain's last answer."""
    found = run.result.final
    if found is None:
        return {}
    if run.last_look is None:
        known: dict[str, Figures] = {MEAN: found["mean"], **found["policy"]}
        if "last_answer" in found:
            known[LAST] = found["last_answer"]
        plain = {who: {name: _alone(figures.get(name)) for name in MAIN} for who, figures in known.items()}
        return _ordered(plain, run)
    policies = run.last_look["policy"]
    estimates = {who: _over_queries([responses]) for who, responses in policies.items()}
    if all(module in policies for module in run.settings.modules):
        estimates[MEAN] = _over_queries([policies[module] for module in run.settings.modules])
    if "last_answer" in run.last_look:
        estimates[LAST] = _over_queries(list(run.last_look["last_answer"].values()))
    return _ordered(estimates, run)


def _ordered(found: Ends, run: Run) -> Ends:
    """Puts the mean first; that of one policy says nothing."""
    order = [MEAN, *(who for who in found if who not in (MEAN, LAST)), LAST]
    return {who: found[who] for who in order if who in found and (who != MEAN or len(run.settings.modules) > 1)}


def _alone(value: float | None) -> Estimate:
    return Estimate(math.nan if value is None else value, None, None, 0)


def _over_queries(answers: Sequence[Sequence[Evaluation]]) -> dict[str, Estimate]:
    """Returns the mean over those who answered, at each query that all of them answered, and its interval."""
    rows = [_rows(each) for each in answers]
    queries = [query for query in rows[0] if all(query in each for each in rows)]
    if not queries:
        return {name: _alone(None) for name in MAIN}
    values = np.array([np.mean([each[query] for each in rows], axis=0) for query in queries])
    return dict(zip(MAIN, over_queries(values, seed=0), strict=True))


def _rows(responses: Sequence[Evaluation]) -> dict[int, NDArray[np.float64]]:
    """Returns the figures by query; None becomes NaN."""
    return {each["query"]: np.array([each["metrics"][name] for name in MAIN], dtype=np.float64) for each in responses}


def settings_that_differ(runs: Sequence[Run]) -> Mapping[str, list[Value]]:
    """Returns each setting in which runs differ, with the value of each run."""
    told = [run.settings.told() for run in runs]
    return {key: [each[key] for each in told] for key in differing(runs)}
