"""Sweeps over one setting, with runs of PPO and of CORY."""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.reproduction.measures import ParetoPoint, before, pareto_front, values
from launch.console.configuration import Value
from launch.display.statistics import Difference, estimate_difference
from launch.experiments.measures import final_value
from launch.experiments.results import StudyRun
from policies.health import MAX_TOKEN_KL

FEWEST = 3
"""Minimum number of swept values for a frontier."""
Matched = dict[float, tuple[list[StudyRun], list[StudyRun]]]
"""Value of the swept setting to the runs of PPO and of CORY with two agents."""


def sweep(runs: Iterable[StudyRun], key: str, agents: int) -> dict[Value, list[StudyRun]]:
    """Returns the runs that differ from the study's first arm in one setting at most, and the number of agents.

    Args:
        runs: of one study, whose first arm has two agents.
        key: the setting.
        agents: number of agents.

    Returns:
        The setting's value to its runs, in the order of the study's arms.
    """
    point: dict[Value, list[StudyRun]] = {}
    for run in sorted(runs, key=lambda run: (run.arm_index, run.seed)):
        if run.differs.keys() <= {key, "num_agents"} and run.settings.num_agents == agents:
            point.setdefault(getattr(run.settings, key), []).append(run)
    return point


def matched(arms: Mapping[str, Sequence[StudyRun]], key: str) -> Matched:
    """Returns the runs of PPO and CORY at those values of a setting at which both were trained."""
    runs = [run for of_arm in arms.values() for run in of_arm]
    ppo, cory = (sweep(runs, key, agents) for agents in (1, 2))
    return {
        float(value): (ppo[value], cory[value]) for value in ppo if value in cory and isinstance(value, int | float)
    }


def hypervolumes(arms: Mapping[str, Sequence[StudyRun]]) -> tuple[dict[int, float], dict[int, float]]:
    """Returns the hypervolumes of PPO and of CORY over the sweep of `kl_coef`, by seed.

    A seed counts if it was run at every value at which both were trained; there must be at least three such values. A
    diverged run has no point on the frontier.
    """
    pairs = matched(arms, "kl_coef")
    if len(pairs) < FEWEST:
        return {}, {}
    worst = {seed: start for ppo, _ in pairs.values() for seed, start in references(ppo).items()}
    return _hypervolumes([ppo for ppo, _ in pairs.values()], worst), _hypervolumes(
        [cory for _, cory in pairs.values()], worst
    )


def larger(one: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """Returns the paired difference of two hypervolumes, seed by seed."""
    return estimate_difference({seed: one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())})


def _hypervolumes(columns: Sequence[Sequence[StudyRun]], worst: Mapping[int, ParetoPoint]) -> dict[int, float]:
    complete_seeds = set(worst).intersection(*({run.seed for run in column} for column in columns))
    points_by_seed: dict[int, list[ParetoPoint]] = {seed: [] for seed in sorted(complete_seeds)}
    for column in columns:
        rewards, kls = (values(column, final_value(metric)) for metric in ("task_reward", "kl"))
        for seed in complete_seeds & rewards.keys() & kls.keys():
            points_by_seed[seed].append(ParetoPoint(rewards[seed], kls[seed]))
    return {seed: hypervolume(points, worst[seed]) for seed, points in points_by_seed.items()}


def references(runs: Sequence[StudyRun]) -> dict[int, ParetoPoint]:
    """Returns the reference point of hypervolumes by seed, which depends on no arm's result.

    That is the task reward before training, and the KL from which health calls a response of full length collapsed.
    """
    starts = values(runs, before("task_reward"))
    return {
        run.seed: ParetoPoint(starts[run.seed], MAX_TOKEN_KL * run.settings.max_response_tokens)
        for run in runs
        if run.seed in starts
    }


def hypervolume(points: Iterable[ParetoPoint], worst: ParetoPoint) -> float:
    """Returns the area that points dominate, bounded by the reference point `worst`.

    Args:
        points: in any order; those that are no better than `worst` in both count nothing.
        worst: the reference point.

    Returns:
        Task reward × nats.
    """
    total, height = 0.0, worst.task_reward
    for point in pareto_front(candidate for candidate in points if candidate.kl < worst.kl):
        if point.task_reward > height:
            total += (point.task_reward - height) * (worst.kl - point.kl)
            height = point.task_reward
    return total
