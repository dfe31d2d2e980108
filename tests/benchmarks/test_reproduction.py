import json
import math
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.reproduction.__main__ import claims, main
from benchmarks.reproduction.claims import CLAIMS, judge_all
from benchmarks.reproduction.findings import Finding, above, below, between, quoted
from benchmarks.reproduction.measures import ParetoPoint, hedges_g, pareto_front, unsteadiness, variance
from benchmarks.reproduction.sweeps import hypervolume, hypervolumes, matched, references
from launch.display.statistics import Estimate
from launch.experiments.measures import metrics_of
from launch.experiments.results import StudyRun
from launch.run_folder.records import Update
from tests.launch.results_of_studies import policy_metrics, study_run, write_runs


def volatility(run: StudyRun) -> float:
    metrics = metrics_of([run])
    return float(unsteadiness(metrics).iloc[0])


def findings(runs: list[StudyRun]) -> dict[str, Finding]:
    return {judged.claim.text: judged.finding for judged in judge_all(runs)}


def verdicts(runs: list[StudyRun]) -> dict[str, str]:
    return {claim: finding.verdict for claim, finding in findings(runs).items()}


def arm(name: str, reward: float, kl: float, agents: int = 2, seeds: int = 5, **differs: Any) -> list[StudyRun]:
    """Runs whose figures vary a little with the seed."""
    return [
        study_run(name, seed, *[policy_metrics(reward + 0.001 * seed, kl + 0.002 * seed)] * agents, **differs)
        for seed in range(seeds)
    ]


def test_without_results_every_claim_is_not_run() -> None:
    assert set(verdicts([]).values()) == {"not run"} and len(judge_all([])) == len(CLAIMS)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.1, 2.0, "reproduced"), (0.1, 0.9, "not reproduced"), (0.9, 1.1, "inconclusive"), (None, None, "inconclusive")],
)
@pytest.mark.parametrize("n", [2, 3])
def test_a_claim_holds_where_the_whole_interval_lies_beyond_the_bound(
    low: float | None, high: float | None, verdict: str, n: int
) -> None:
    assert above(Estimate(1.0, low, high, n), 1.0) == (verdict if n == 3 else "inconclusive")


def test_other_kinds_of_claims() -> None:
    assert below(Estimate(0.0, -2.0, -1.0, 5), 0.0) == "reproduced"
    assert between(Estimate(0.0, -0.05, 0.05, 5), -0.1, 0.1) == "reproduced"
    assert between(Estimate(0.0, 0.11, 0.2, 5), -0.1, 0.1) == "not reproduced"
    assert between(Estimate(0.0, -0.2, 0.2, 5), -0.1, 0.1) == "inconclusive"
    assert quoted(Estimate(0.1, 0.05, 0.2, 5), 0.123, 0.0) == "reproduced"
    assert quoted(Estimate(0.1, -0.05, 0.2, 5), 0.123, 0.0) == "inconclusive"
    assert quoted(Estimate(0.0, -0.05, 0.05, 5), 0.123, 0.0) == "not reproduced"
    assert quoted(Estimate(0.0, -0.05, 0.05, 2), 0.123, 0.0) == "inconclusive"
    assert quoted(Estimate(0.0, 0.0, 0.0, 5), 0.123, 0.0) == "inconclusive"  # of no width: all runs, or none


def test_a_share_that_rounds_to_nothing_has_no_minus() -> None:
    ours = findings(arm("cory", 1.9999, 3.0) + arm("ppo", 2.0, 9.0, agents=1))
    assert ours["PPO and CORY reach a similar task reward"].text == "+0% of the gain [+0%, +0%], n = 5"


def test_runs_that_lack_a_figure_are_counted_where_the_others_are() -> None:
    runs = arm("cory", 2.0, 3.0) + arm("ppo", 2.0, 9.0, agents=1)
    runs[-1] = runs[-1]._replace(status="diverged", final=None)
    ours = findings(runs)
    assert ours["PPO's final KL is more than twice CORY's"].text.endswith("n = 4 of 5")
    assert " of the gain [" in ours["The two CORY agents end almost equal"].text
    assert ours["The two CORY agents end almost equal"].text.endswith("], n = 5")


def test_without_exchange_both_roles_count_as_neither_policy_trains_on_both_prompts() -> None:
    def trained(name: str, late: float, kl: float, **differs: Any) -> list[StudyRun]:
        lines = [{role: {"task_reward": at, "kl": kl} for role in ("pioneer", "observer")} for at, kl in
                 [(0.5, 0.0), *[(late, kl)] * 5]]  # fmt: skip
        metrics = [{"update": 5 + number, "role": line} for number, line in enumerate(lines)]
        return [run._replace(metrics=cast(list[Update], metrics)) for run in arm(name, -9.0, 99.0, **differs)]

    finding = verdicts(trained("cory", 2.5, 2.0) + trained("no-exchange", 2.5, 3.5, exchange_period=None))
    assert finding["Without role exchange the task reward is good"] == "reproduced"
    assert finding["Without role exchange the KL is much higher"] == "reproduced"  # by 1.75 times
    finding = verdicts(trained("cory", 2.5, 2.0) + trained("no-exchange", 2.0, 2.0, exchange_period=None))
    assert finding["Without role exchange the task reward is good"] == "not reproduced"  # a quarter of the gain below
    assert finding["Without role exchange the KL is much higher"] == "not reproduced"


def test_a_run_that_did_not_do_all_updates_has_no_vote_on_what_training_changes() -> None:
    whole = arm("ppo", 2.0, 9.0, agents=1, seeds=3)
    short = [run._replace(seed=3, metrics=run.metrics[:-1], status="diverged", final=None) for run in whole[:1]]
    finding = findings(whole + short)["PPO's combined reward falls in training"]
    assert finding.text.endswith("n = 3 of 4")


def test_where_ppo_collapses_it_is_said_how() -> None:
    ends = [
        policy_metrics(2.0, 3.0, repetition=0.5),
        policy_metrics(2.0, 3.0, repetition=0.5),
        policy_metrics(2.0, 3.0, eos_rate=0.01),
    ]
    repeating = [study_run("ppo-lr", seed, end) for seed, end in enumerate(ends)]
    finding = verdicts(arm("ppo", 2.0, 9.0, agents=1) + repeating)
    assert finding["Where PPO collapses, it repeats itself"] == "reproduced"
    below_the_limit = [study_run("ppo-lr", seed, policy_metrics(2.0, 60.0, repetition=0.1)) for seed in range(3)]
    assert verdicts(below_the_limit)["Where PPO collapses, it repeats itself"] == "inconclusive"
    other = [study_run("ppo-lr", seed, policy_metrics(2.0, 60.0)) for seed in range(3)]
    assert verdicts(other)["Where PPO collapses, it repeats itself"] == "not reproduced"
    few = verdicts(arm("ppo", 2.0, 9.0, agents=1) + repeating[:2])
    assert few["Where PPO collapses, it repeats itself"] == "inconclusive"
    assert finding["CORY answers 18 % of GSM8K's test questions right at the first try"] == "not run"


def test_early_gain_is_a_share_of_the_largest_gain_not_of_what_is_left_of_it() -> None:
    end, curve = policy_metrics(1.0, 3.0), (0.0, 1.0, 2.0, 1.0)
    runs = [study_run("cory", seed, end, end, curve=curve, study="arithmetic") for seed in range(3)]
    finding = findings(runs)["CORY converges early"]
    assert finding.text.startswith("+50% of the gain") and finding.verdict == "not reproduced"


def test_what_the_paper_reports_is_found_where_results_are_so() -> None:
    finding = verdicts(arm("cory", 2.0, 3.0) + arm("ppo", 2.0, 9.0, agents=1))
    assert finding["PPO and CORY reach a similar task reward"] == "reproduced"
    assert finding["PPO's final KL is more than twice CORY's"] == "reproduced"
    assert finding["CORY's combined reward rises in training"] == "reproduced"
    assert finding["PPO's combined reward falls in training"] == "not reproduced"  # as the curves of both are the same
    assert finding["The two CORY agents end almost equal"] == "reproduced"


def test_the_opposite_of_what_the_paper_reports_is_found_where_results_are_so() -> None:
    finding = verdicts(arm("cory", 2.0, 9.0) + arm("ppo", 1.0, 3.0, agents=1))
    assert finding["PPO and CORY reach a similar task reward"] == "not reproduced"
    assert finding["PPO's final KL is more than twice CORY's"] == "not reproduced"
    assert finding["+12.3 % optimality"] == "not reproduced"


def test_a_collapse_at_one_learning_rate_decides_the_claim_of_robustness() -> None:
    base = arm("cory", 2.0, 3.0, seeds=3) + arm("ppo", 2.0, 9.0, agents=1, seeds=3)
    sound = arm("cory-lr", 2.0, 9.0, seeds=3, lr=1e-3)
    collapsed = arm("ppo-lr", 2.0, 60.0, agents=1, seeds=3, lr=1e-3)
    claim = "At a high learning rate PPO collapses and CORY does not"
    assert verdicts(base)[claim] == "not run"  # one learning rate is no sweep
    assert verdicts(base + sound + collapsed)[claim] == "reproduced"
    assert verdicts(base + sound + collapsed[:2])[claim] == "inconclusive"
    mild = arm("ppo-lr", 2.0, 9.0, agents=1, seeds=3, lr=1e-3)
    assert verdicts(base + sound + mild)[claim] == "inconclusive"  # the rates were not high enough for PPO
    wild = arm("cory-lr", 2.0, 60.0, seeds=3, lr=1e-3)
    assert verdicts(base + wild + collapsed)[claim] == "not reproduced"
    assert verdicts(base + wild[:1] + collapsed[:1])[claim] == "inconclusive"
    at_the_limit = [*collapsed[:2], mild[2]]  # the same verdict with one run less
    assert verdicts(base + wild + at_the_limit)[claim] == "not reproduced"
    assert verdicts(base + wild[:1] + sound[1:] + at_the_limit)[claim] == "inconclusive"


def test_frontiers_are_compared_by_hypervolume_seed_by_seed() -> None:
    runs = {}
    for eta, ppo_kl, cory_kl in ((0.1, 8.0, 4.0), (0.3, 4.0, 2.0), (1.0, 2.0, 1.0)):
        differs: dict[str, Any] = {} if eta == 0.1 else {"kl_coef": eta}
        runs[f"ppo-{eta}"] = arm(f"ppo-{eta}", 0.1 / eta + 1.0, ppo_kl, agents=1, seeds=3, **differs)
        runs[f"cory-{eta}"] = arm(f"cory-{eta}", 0.1 / eta + 1.0, cory_kl, seeds=3, **differs)
    assert set(matched(runs, "kl_coef")) == {0.1, 0.3, 1.0}
    ppo, cory = hypervolumes(runs)
    # from (0, 24): 1.1 · 22, then to 1.3333 · 20, then to 2 · 16
    assert ppo[0] == pytest.approx(1.1 * 22 + (4 / 3 - 1.1) * 20 + (2 - 4 / 3) * 16)
    assert cory[0] == pytest.approx(1.1 * 23 + (4 / 3 - 1.1) * 22 + (2 - 4 / 3) * 20)
    every = [run for of_arm in runs.values() for run in of_arm]
    assert verdicts(every)["CORY's Pareto frontier lies outside PPO's"] == "reproduced"
    assert hypervolumes({name: runs[name] for name in ("ppo-0.1", "cory-0.1")}) == ({}, {})
    runs["ppo-1.0"][0] = runs["ppo-1.0"][0]._replace(status="diverged", final=None)  # a point less
    diverged, _ = hypervolumes(runs)
    assert diverged[0] == pytest.approx(4 / 3 * 20 + (2 - 4 / 3) * 16) and diverged[1] == ppo[1]


def test_the_quoted_reduction_of_collapses_is_over_settings() -> None:
    def judged(kls: dict[float, tuple[float, float]], seeds: int = 3) -> Any:
        """Of a sweep of lr: its value → the KL of PPO and of CORY, of which 60 is a collapse."""
        runs = []
        for lr, (ppo, cory) in kls.items():
            differs: dict[str, Any] = {} if lr == 2e-4 else {"lr": lr}
            runs += arm(f"cory-{lr}", 2.0, cory, seeds=seeds, **differs)
            runs += arm(f"ppo-{lr}", 2.0, ppo, agents=1, seeds=seeds, **differs)
        return findings(runs)["-67 % collapse"]

    # Many runs of one setting are one witness.
    one = judged({2e-4: (3.0, 3.0), 1e-3: (60.0, 3.0)}, seeds=20)
    assert one.text == "-100%, n = 1 (PPO 20 of 40, CORY 0 of 40, in 1 of 2 settings)"
    assert one.verdict == "inconclusive"
    # -1, -1, -1 and 0 of each setting: mean -0.75, deviation 0.5; t of 3 degrees of freedom is 3.182.
    some = judged({2e-4: (60.0, 3.0), 5e-4: (60.0, 3.0), 1e-3: (60.0, 3.0), 3e-3: (60.0, 60.0)})
    assert some.text.startswith("-75% [-155%, +5%], n = 4 (PPO 12 of 12, CORY 3 of 12")
    assert some.verdict == "inconclusive"
    more = {lr: (60.0, 60.0 if lr > 5e-3 else 3.0) for lr in (2e-4, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 7e-3)}
    assert judged(more).verdict == "reproduced"
    assert judged({2e-4: (3.0, 3.0)}).verdict == "inconclusive"


def test_without_exchange_the_roles_kl_in_the_last_updates_is_compared() -> None:
    runs = []
    for run in arm("no-exchange", 2.0, 9.0, exchange_period=None):
        early, late = (
            {name: {"task_reward": 2.0, "kl": kl} for name, kl in roles.items()}
            for roles in ({"pioneer": 0.0, "observer": 9.0}, {"pioneer": 6.0 + run.seed, "observer": 2.0})
        )
        lines = [{"update": 5, "role": early}, *({"update": 6 + number, "role": late} for number in range(5))]
        runs.append(run._replace(metrics=cast(list[Update], lines)))
    finding = findings(runs)["Without role exchange the observer's KL is far below the pioneer's"]
    assert finding.verdict == "reproduced" and finding.text.startswith(
        "KL × 3.9"
    )  # of 3, 3.5, 4, 4.5, 5 the geometric mean


def test_less_variance_comes_with_its_interval() -> None:
    # As wide for one policy as for the other, in opposite directions: their mean would not vary at all.
    spread = [
        study_run("cory", seed, *[policy_metrics(2.0 + sign * 0.1 * seed, 3.0) for sign in (1, -1)])
        for seed in range(5)
    ]
    wide = [study_run("ppo", seed, policy_metrics(2.0 + 0.2 * seed, 3.0)) for seed in range(5)]
    finding = findings(spread + wide)["-41 % variance"]
    # a quarter of the variance; F of (4, 4) has 97.5 % below 9.605
    assert finding.text.startswith("-75% [-97%, +140%]") and finding.verdict == "inconclusive"


def test_the_hypervolume_is_the_area_between_the_front_and_the_reference() -> None:
    worst = ParetoPoint(0.0, 10.0)
    assert hypervolume([ParetoPoint(1.0, 2.0)], worst) == 8.0
    assert hypervolume([ParetoPoint(1.0, 2.0), ParetoPoint(2.0, 5.0), ParetoPoint(0.5, 3.0)], worst) == 8.0 + 1.0 * 5.0
    assert hypervolume([ParetoPoint(3.0, 11.0), ParetoPoint(-1.0, 1.0)], worst) == 0.0


def test_the_reference_point_is_before_training_and_where_health_calls_it_collapse() -> None:
    run = study_run("ppo", 0, policy_metrics(1.0, 2.0), curve=(0.25, 1.0))
    assert references([run]) == {0: ParetoPoint(0.25, 2.0 * 12)}


def test_claims_are_those_that_are_asked_of_the_studies_at_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def selected(*studies: str) -> set[str]:
        runs = [
            study_run("cory", 0, policy_metrics(1.0, 2.0), policy_metrics(1.0, 2.0), study=study) for study in studies
        ]
        return {claim["rule"].split(".")[0] for claim in claims(runs) if claim["rule"].startswith("here by")}

    assert selected("mine") == set()
    assert selected("arithmetic") == {"here by study arithmetic"}
    assert selected("imdb", "arithmetic", "mine") == {"here by study imdb", "here by study arithmetic"}


def test_verdicts_are_written_to_a_file(tmp_path: Path) -> None:
    for run in [*arm("cory", 2.0, 3.0), *arm("ppo", 2.0, 8.0, agents=1)]:
        write_runs(tmp_path, run)
    file = tmp_path / "claims.json"
    main([str(tmp_path), "--out", str(file)])
    judged = json.loads(file.read_text(encoding="utf-8"))
    (twice,) = [claim for claim in judged if "more than twice CORY's" in claim["text"]]
    assert twice["verdict"] == "reproduced" and judged[-1]["verdict"] == "not run"


def test_unsteadiness_is_of_successive_updates_not_of_the_trend() -> None:
    alternating = study_run("ppo", 0, policy_metrics(1.0, 4.0), training=(0.0, 1.0, 0.0, 1.0))
    assert volatility(alternating) == pytest.approx(math.sqrt(0.5))
    steady = volatility(study_run("ppo", 0, policy_metrics(1.0, 4.0), training=tuple(0.1 * u for u in range(20))))
    assert steady == pytest.approx(0.1 / math.sqrt(2))
    exchanged = study_run("cory", 0, policy_metrics(1.0, 4.0), policy_metrics(2.0, 8.0), training=(0.0, 0.5, 9.0, 9.5))
    for line in exchanged.metrics[:2]:
        line["roles"] = {"pioneer": "llm_2", "observer": "llm_1"}
    assert volatility(exchanged) == pytest.approx(0.5 / math.sqrt(2))  # without the step of 8.5 between the roles


def test_the_variance_over_seeds_has_n_less_one_below_it() -> None:
    runs = [
        study_run("cory", seed, policy_metrics(one, 0.0), policy_metrics(7.0, 0.0))
        for seed, one in enumerate((1.0, 2.0, 6.0))
    ]
    # of one policy, of the other
    assert variance(metrics_of(runs), "task_reward") == pytest.approx(((4 + 1 + 9) / 2 + 0) / 2)
    assert math.isnan(variance(metrics_of(runs[:1]), "task_reward"))


def test_the_pareto_front_holds_what_nothing_else_beats() -> None:
    points = [
        ParetoPoint(1.0, 2.0),
        ParetoPoint(2.0, 6.0),
        ParetoPoint(0.5, 3.0),
        ParetoPoint(2.0, 5.0),
        ParetoPoint(1.0, 2.0),
    ]
    assert pareto_front(points) == [ParetoPoint(1.0, 2.0), ParetoPoint(2.0, 5.0)]


def test_the_effect_size_is_hedges_g_of_paired_differences() -> None:
    # mean 2, deviation 1; 1 - 3 / (4 · 2 - 1) = 4 / 7
    assert hedges_g([1.0, 2.0, 3.0]) == pytest.approx(2 * 4 / 7)
    assert hedges_g([1.0, 2.0]) is None and hedges_g([1.0, 1.0, 1.0]) is None
