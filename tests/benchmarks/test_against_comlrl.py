"""How the runs of two sides are compared, phase by phase."""

from __future__ import annotations

from benchmarks.against_comlrl import TimedRun, compare
from benchmarks.time_to_reward import Curve


def timed_run(seconds: float, final_reward: float) -> TimedRun:
    phases = {"generation": 2 * seconds, "reward": seconds, "learning": seconds, "update": 5 * seconds}
    slow_start = dict.fromkeys(phases, 100.0)
    return TimedRun(
        Curve([(0, 10.0, 0.0), (3, 10.0 + 15 * seconds, final_reward)], 20.0 * seconds), [slow_start, phases, phases]
    )


def test_the_sides_of_a_round_are_compared_by_their_median_updates() -> None:
    runs = {"ours": [timed_run(1.0, 0.3), timed_run(2.0, 0.4)], "CoMLRL": [timed_run(6.0, 0.2), timed_run(4.0, 0.3)]}
    figures = {figure.label: figure for figure in compare(runs)}
    assert figures["CoMLRL: learning"].runs == (6.0, 4.0)
    assert figures["ours: held-out reward at the end"].runs == (0.3, 0.4)
    assert figures["faster: the whole command"].runs == (6.0, 2.0) and figures["faster: the whole command"].met
    assert figures["faster: learning"].target == "≥ 1.5"
