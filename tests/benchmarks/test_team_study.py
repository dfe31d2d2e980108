from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

from benchmarks.arm_runs import write
from benchmarks.feedback.design import PILOT_SEEDS, RESPONSES
from benchmarks.record import BenchmarkError
from benchmarks.team.__main__ import load_stages, main, run_study
from benchmarks.team.analysis import best_rates, evaluate_contrasts, read_results
from benchmarks.team.design import (
    CONTRASTS,
    KINDS,
    MAIN_SEEDS,
    OWN_WAYS,
    RATES,
    SHARED,
    SWAP,
    Arm,
    main_arms,
    pilot_arms,
)
from benchmarks.team.measuring import Policy, Way
from benchmarks.team.runs import Job, Result, list_jobs, open_measurement
from policies.models.model_names import model_path

WAYS = ("one_answer", "best_of_2", "best_of_3", "blind", "chain")
TEAM_WAYS = ("swapped", "first only", "second only", "best_of_2_both")
BEST = {"single": 1e-4, "turns": 3e-5, "feedback": 3e-5, "exchange": 3e-5, "fixed": 1e-4}


def a_result(job: Job, scores: Mapping[str, float]) -> Result:
    """A result with a score of 0.5 in all ways but those in `scores`."""
    names = (*WAYS, *(f"base {way}" for way in WAYS), *TEAM_WAYS)
    ways = {name: Way(score=scores.get(name, 0.5), tokens=50.0, prompt_tokens=80.0) for name in names}
    train = {"tokens": 1, "prompt_tokens": 1, "seconds": 1.0}
    result = {"arm": job.arm.name, "seed": job.seed, "command": job.command, "parameters": 1, "train": train}
    return cast(Result, {**result, "ways": ways, "measure_seconds": 1.0})


def write_result(job: Job, scores: Mapping[str, float] | None = None) -> Result:
    """Writes a result in which the best rate of each kind has the highest score in its own way."""
    is_best = BEST[job.arm.kind] == job.arm.lr
    result = a_result(job, {OWN_WAYS[job.arm.kind]: 0.7 if is_best else 0.6, **(scores or {})})
    write(job.result, result)
    return result


def test_arms_have_equal_responses_and_optimizer_steps_and_differ_in_nothing_else() -> None:
    for arm in pilot_arms():
        settings = Job(arm, 100, Path("out")).study_job.study.settings(Job(arm, 100, Path()).study_job.arm, 100)
        chains = settings.queries_per_update * settings.num_generations
        assert chains * settings.num_agents == RESPONSES
        assert settings.hyperparameters.steps * settings.num_epochs == 4
        assert len(settings.policy_ids) == arm.num_llms and settings.lr == arm.lr
        assert all(getattr(settings, key) == SHARED[key] for key in SHARED if key != "minibatch_size")
        if arm.kind != "single":
            assert (settings.feedback, settings.stop_when, settings.stop_in_training) == ("task", "solved", False)


def test_the_best_rate_is_chosen_by_the_way_in_which_an_arm_was_trained(tmp_path: Path) -> None:
    jobs = list_jobs(pilot_arms(), tmp_path)
    for job in jobs[:-1]:
        write_result(job, {"one_answer": 0.9 if job.arm.kind == "fixed" and job.arm.lr == 3e-4 else 0.5})
        if job.arm.kind == "single":
            write_result(job)
    assert best_rates(read_results(jobs)) is None  # a run is missing
    assert [*load_stages(tmp_path)[0]] == ["pilot"]
    write_result(jobs[-1])
    assert best_rates(read_results(jobs)) == BEST
    stages, rates = load_stages(tmp_path)
    assert rates == BEST and {job.seed for job in stages["main"]} == {*MAIN_SEEDS}
    assert {(job.arm.kind, job.arm.lr) for job in stages["main"]} == {
        *(("single", 1e-4), ("single", 3e-5), ("turns", 3e-5), ("turns", 1e-4)),
        *(("feedback", 3e-5), ("feedback", 1e-4), ("exchange", 3e-5), ("exchange", 1e-4)),
        *(("fixed", 1e-4), ("fixed", 3e-5)),
    }


def test_contrasts_are_paired_by_seed_and_add_up_to_the_gain_of_a_team(tmp_path: Path) -> None:
    rates = dict.fromkeys(KINDS, 3e-5)
    own = {"single": 0.60, "turns": 0.62, "feedback": 0.75, "fixed": 0.74, "exchange": 0.77}
    jobs = list_jobs(main_arms(rates), tmp_path)
    assert {(job.arm.kind, job.arm.lr) for job in jobs} == set(rates.items())
    for job in jobs:
        kind, shift = job.arm.kind, job.seed / 100
        way = {"single": "best_of_2", "turns": "blind"}.get(kind, "chain")
        write_result(job, {way: own[kind] + shift, "swapped": own[kind] + shift - (0.1 if kind == "fixed" else 0.02)})
    contrasts = {contrast.name: contrast for contrast in evaluate_contrasts(read_results(jobs), rates)}
    means = {name: contrast.difference.estimate.mean for name, contrast in contrasts.items()}
    gains = ("turns", "feedback", "a second LLM", "role exchange")
    assert [means[name] for name in gains] == pytest.approx([0.02, 0.13, -0.01, 0.03])
    assert sum(means[name] for name in gains) == pytest.approx(own["exchange"] - own["single"])
    assert means[SWAP] == pytest.approx(0.08) and contrasts[SWAP].difference.seeds == MAIN_SEEDS
    # all ten differences have one sign: 2 / 2^10, times the six contrasts
    assert contrasts["turns"].p == pytest.approx(6 * 2 / 2**10)


def test_contrasts_of_arms_with_different_rates_are_repeated_at_equal_rates_without_correction(tmp_path: Path) -> None:
    jobs = list_jobs(main_arms(BEST), tmp_path)
    for job in jobs:
        write_result(job)
    contrasts = evaluate_contrasts(read_results(jobs), BEST)
    assert [contrast.p is not None for contrast in contrasts[:6]] == [True] * 6
    other = [(contrast.name, contrast.rates) for contrast in contrasts[6:]]
    differing = [c for c in CONTRASTS if BEST[c.kind] != BEST[c.against]]
    assert other == [(c.name, (lr, lr)) for c in differing for lr in (3e-5, 1e-4)] + [
        (SWAP, (lr, lr)) for lr in (3e-5, 1e-4)
    ]
    assert all(contrast.p is None for contrast in contrasts[6:])


def test_missing_runs_are_done_and_failed_ones_repeated_by_the_next_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails, calls = [True], []

    def run(job: Job) -> Result:
        calls.append(job.name)
        job.study_job.run.mkdir(parents=True, exist_ok=True)
        if job.name == "feedback-3e-05, seed 101" and fails:
            raise BenchmarkError("no room")
        return write_result(job)

    assert run_study(tmp_path, 1, run) == ["no room"] and len(calls) == 5 * len(RATES) * len(PILOT_SEEDS)
    assert main(["--out", str(tmp_path), "--show"]) == 0
    output = capsys.readouterr().out
    assert (
        "pilot: 44 of 45 runs\n  missing: feedback-3e-05 101" in output and "rates of the main runs are not" in output
    )
    calls.clear()
    fails.clear()
    assert run_study(tmp_path, 1, run) == [] and calls == ["feedback-3e-05, seed 101"]
    assert main(["--out", str(tmp_path), "--show", "--picture", str(tmp_path / "picture.png")]) == 0
    assert "Best rates: {'single': 0.0001" in capsys.readouterr().out and not (tmp_path / "picture.png").exists()

    def measure_partners(job: Job, other: Job) -> Way:
        assert job.seed + 1 == other.seed and job.arm == other.arm
        way = Way(score=0.25, tokens=50.0, prompt_tokens=80.0)
        write(job.partners, way)
        return way

    run_study(tmp_path, 2, run, measure_partners)
    assert main(["--out", str(tmp_path), "--show", "--picture", str(tmp_path / "picture.png")]) == 0
    assert len([*tmp_path.glob("results/*/partners_*.json")]) == 4 * (len(MAIN_SEEDS) - 1)
    output = capsys.readouterr().out
    assert SWAP in output and output.count("0.250 [0.250, 0.250]") == 4  # both kinds of teams at both rates
    assert (tmp_path / "picture.png").exists()


def test_a_result_of_other_settings_is_rejected(tmp_path: Path) -> None:
    job = list_jobs(pilot_arms(), tmp_path)[0]
    write(job.result, {**write_result(job), "command": "cory train sudoku-tiny lr=1"})
    with pytest.raises(BenchmarkError, match="was created by cory train sudoku-tiny lr=1, not by"):
        job.read()
    assert main(["--out", str(tmp_path), "--show"]) == 2


def test_ways_are_measured_on_the_same_first_answers(tmp_path: Path) -> None:
    policy = Policy(None, "", model_path(SHARED["model"]))
    job = Job(Arm("single", 1e-4, (0,), "validation", 16), 0, tmp_path)
    with open_measurement(job, {"one": policy, "other": policy}) as measurement:
        one, two = measurement.best_of("one", 1), measurement.best_of("one", 2)
        assert one["score"] == pytest.approx(measurement.first("one").right.mean()) and one["score"] < 1
        assert one["prompt_tokens"] == 37
        rejected = 1 - measurement.first("one").accepted.mean()
        chain, blind = measurement.chain("one", "one"), measurement.chain("one", "one", "blind")
        assert chain == measurement.chain("one", "other")  # LLMs with equal weights answer alike
        assert (
            measurement.first("one").right.tolist() == measurement.first("one").accepted.tolist()
        )  # the check is exact
        both = measurement.independent("one", "other")
        assert {**both} == pytest.approx({**two})  # equal weights: the same as best-of-2
        for way, second_prompt in ((two, 37), (chain, 111), (blind, 74), (both, 37)):
            assert one["score"] <= way["score"] <= 1
            assert way["prompt_tokens"] == pytest.approx(37 + rejected * second_prompt, rel=0.02)
        assert chain["score"] > blind["score"]  # feedback pays


def test_committed_results_belong_to_the_design(capsys: pytest.CaptureFixture[str]) -> None:
    committed = Path(__file__).parents[2] / "docs" / "study" / "team"
    assert main(["--out", str(committed), "--show"]) == 0
    arms = {path.parent.name for path in committed.glob("results/*/seed_*.json")}
    output = capsys.readouterr().out
    assert arms and all(
        arm in {job.arm.name for jobs in load_stages(committed)[0].values() for job in jobs} for arm in arms
    )
    assert f"{len([*committed.glob('results/*/seed_10?.json')])} of 45 runs" in output
