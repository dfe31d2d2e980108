from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.arm_runs import write
from benchmarks.feedback import runs
from benchmarks.feedback.__main__ import load_stages, main, run_study
from benchmarks.feedback.analysis import at_tokens, choose, evaluate_contrasts, find_finalists, token_ratio
from benchmarks.feedback.design import (
    MAIN_SEEDS,
    NUM_FINALISTS,
    PILOT_SEEDS,
    RESPONSES,
    SHARED,
    TEMPERATURES,
    Arm,
    Choice,
    ProbePlan,
    chain_pilots,
    chain_settings,
    main_arms,
    other_arms,
    prompt_lengths,
    single_pilots,
)
from benchmarks.feedback.runs import Job, Measured, Result, Way, execute, list_jobs, measure, measure_chains
from benchmarks.feedback.tables import SHARES, differences_text
from benchmarks.record import BenchmarkError
from cory_env.tasks.sudoku import OBSERVER_PROMPT
from launch.probing.figures import Outcomes, SecondAnswers, best_of, best_of_tokens

CHOICE_MADE = Choice("rloo", 1e-4, "own", 3e-5, {"single": 0.7, "best_of": 1.3, "chain": 1.0, "untrained": 1.0})


def way(score: float, tokens: float) -> Way:
    return Way(score=score, tokens=tokens, prompt_tokens=tokens)


def measured(one: float, two: float, chain: float, tokens: float = 50.0) -> Measured:
    """One answer takes 37 tokens, best-of-2 57."""
    ways = [way(one, 37.0), way(two, 57.0), way(two + 0.01, 67.0)]
    shares = dict.fromkeys(SHARES, 0.5)
    return Measured(figures={**shares}, best_of=ways, chain=way(chain, tokens))


def a_result(arm: str, seed: int, by_temperature: dict[float, Measured] | Measured, tokens: int = 1000) -> Result:
    if not isinstance(next(iter(by_temperature)), float):
        by_temperature = dict.fromkeys(TEMPERATURES, cast(Measured, by_temperature))
    probe = {f"{value:g}": entry for value, entry in cast(dict[float, Measured], by_temperature).items()}
    train = {"tokens": tokens, "status": "done", "updates": 1, "steps": 1, "prompt_tokens": 1, "seconds": 1.0}
    return cast(Result, {"arm": arm, "seed": seed, "train": train, "probe": probe, "probe_seconds": 1.0})


def pilot(scores: dict[str, Measured]) -> dict[str, dict[int, Result]]:
    """Results of all pilot arms: bad ones, except those in `scores`."""
    arms = [*single_pilots(), *chain_pilots("rloo")]
    bad = measured(0.1, 0.2, 0.1)
    return {
        arm.name: {seed: a_result(arm.name, seed, scores.get(arm.name, bad)) for seed in PILOT_SEEDS} for arm in arms
    }


def test_best_of_n_is_interpolated_to_equal_tokens() -> None:
    ways = [way(0.6, 37.0), way(0.8, 57.0), way(0.9, 67.0)]
    assert at_tokens(ways, 47.0) == pytest.approx(way(0.7, 47.0))
    assert at_tokens(ways, 62.0) == pytest.approx(way(0.85, 62.0))
    assert at_tokens(ways, 20.0) == ways[0] and at_tokens(ways, 100.0) == ways[-1]


def test_a_probe_s_outcomes_give_the_same_as_the_probe_itself() -> None:
    rng = np.random.default_rng(0)
    right = rng.random((40, 3)) < 0.6
    second = SecondAnswers(rng.random((40, 3)) < 0.5, np.full((40, 3), 37.0))
    outcomes = Outcomes(right, rng.integers(30, 40, (40, 3)).astype(float), right.astype(int), second, right, second)
    result = measure(outcomes, (37, 111))
    wrong = float((~right).mean())
    assert result["chain"]["prompt_tokens"] == pytest.approx(37 + 111 * wrong)
    assert result["chain"]["score"] == pytest.approx(float(np.where(right, True, second.right).mean()))
    assert result["best_of"][1]["prompt_tokens"] == pytest.approx(37 * (1 + wrong))
    assert result["best_of"][2]["score"] == pytest.approx(float(best_of(outcomes, 3).score.mean()))
    for tokens in (36.0, 45.0, 50.0):
        expected = float(best_of_tokens(outcomes, tokens).score.mean())
        assert at_tokens(result["best_of"], tokens)["score"] == pytest.approx(expected)


def test_the_pilot_chooses_the_best_arms_and_temperatures() -> None:
    single = {0.7: measured(0.7, 0.75, 0.7), 1.0: measured(0.6, 0.78, 0.7), 1.3: measured(0.5, 0.7, 0.5)}
    chain = {0.7: measured(0.6, 0.7, 0.8), 1.0: measured(0.6, 0.7, 0.85), 1.3: measured(0.6, 0.7, 0.7)}
    results = pilot({"single-rloo-0.0001": cast(Any, single), "chain-last-rloo-3e-05": cast(Any, chain)})
    choice = choose(results)
    assert choice is not None
    assert choice[:4] == ("rloo", 1e-4, "last", 3e-5)
    assert choice.temperatures["single"] == 0.7 and choice.temperatures["chain"] == 1.0
    # At 50 tokens best-of-n is 0.7 + 0.65 * 0.05 at temperature 0.7, and 0.6 + 0.65 * 0.18 at 1.0.
    assert choice.temperatures["best_of"] == 0.7
    others = [name for name in results if name.startswith("chain") and name != "chain-last-rloo-3e-05"]
    finalists = find_finalists(results, ["chain-last-rloo-3e-05", *others], "chain")
    assert finalists[0] == "chain-last-rloo-3e-05" and len(finalists) == NUM_FINALISTS
    for name in others:
        if name not in finalists:
            results[name] = {PILOT_SEEDS[0]: results[name][PILOT_SEEDS[0]]}
    assert choose(results) == choice
    del results["chain-last-rloo-3e-05"][PILOT_SEEDS[-1]]
    assert choose(results) is None


def test_a_run_that_diverged_is_never_chosen() -> None:
    results = pilot({"single-ppo-0.0001": measured(0.9, 0.9, 0.9), "single-rloo-0.0001": measured(0.5, 0.6, 0.5)})
    for run in results["single-ppo-0.0001"].values():
        run["probe"] = None
    choice = choose(results)
    assert choice is not None and choice.estimator == "rloo"


def test_contrasts_pair_seeds_and_give_best_of_n_the_tokens_of_that_chain() -> None:
    results: dict[str, dict[int, Result]] = {"chain": {}, "single": {}, "untrained": {}}
    for seed in MAIN_SEEDS:
        noise, tokens = 0.001 * seed, 47.0 if seed % 2 else 57.0
        results["chain"][seed] = a_result("chain", seed, measured(0.6, 0.7, 0.85 + noise, tokens))
        results["single"][seed] = a_result("single", seed, measured(0.6, 0.8, 0.5))
        results["untrained"][seed] = a_result("untrained", seed, measured(0.6, 0.8, 0.85))
    del results["untrained"][9]
    best, one, untrained = evaluate_contrasts(results, CHOICE_MADE)
    expected = [0.85 + 0.001 * seed - (0.7 if seed % 2 else 0.8) for seed in MAIN_SEEDS]
    assert best.difference.values == pytest.approx(expected)
    assert one.difference.estimate.mean == pytest.approx(0.2545)
    assert untrained.difference.seeds == MAIN_SEEDS[:9]
    assert best.p == pytest.approx(3 * 2 / 2**10) and best.difference.estimate.low is not None
    assert best.difference.estimate.low > 0
    assert token_ratio(results) == 1.0


def test_contrasts_list_the_settings_in_which_their_arms_differ(tmp_path: Path) -> None:
    results = {
        arm: {seed: a_result(arm, seed, measured(0.6, 0.7, 0.8)) for seed in (0, 1)}
        for arm in ("chain", "single", "untrained")
    }
    contrasts = evaluate_contrasts(results, CHOICE_MADE)
    _, trained, untrained = differences_text(contrasts, list_jobs(main_arms(CHOICE_MADE), tmp_path)).split("\n")
    assert trained.startswith(f"  chain vs. single: ⚠ lr differs: {CHOICE_MADE.chain_lr} vs. {CHOICE_MADE.single_lr};")
    assert trained.count("⚠") == 1 and "num_agents 2 vs. 1" in trained
    assert untrained == "  chain vs. untrained: untrained is not trained"


def test_trained_arms_generate_equally_many_responses_with_valid_settings(tmp_path: Path) -> None:
    arms = [*single_pilots(), *chain_pilots("rloo"), *chain_pilots("ppo"), *main_arms(CHOICE_MADE)]
    for arm in [*arms, *other_arms(CHOICE_MADE)]:
        job = Job(arm, arm.seeds[0], tmp_path)
        settings = job.study_job.study.settings(job.study_job.arm, job.seed)
        if arm.settings is not None and not settings.stop_in_training:
            responses = settings.chains * settings.num_agents
            assert RESPONSES - 4 <= responses <= RESPONSES and settings.hyperparameters.steps == 2, arm.name
    main_seeds = {seed for arm in main_arms(CHOICE_MADE) for seed in arm.seeds}
    assert not {*PILOT_SEEDS} & main_seeds
    assert {arm.probe.split for arm in single_pilots()} == {"validation"}
    assert {arm.probe.split for arm in main_arms(CHOICE_MADE)} == {"test"}


def test_an_interrupted_study_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []

    def run(job: Job) -> Result:
        if len(done) in stops:
            stops.remove(len(done))
            raise KeyboardInterrupt
        good = measured(0.7, 0.75, 0.8) if job.arm.name == "chain-own-ppo-0.0001" else measured(0.5, 0.6, 0.6)
        if "ppo" in job.arm.name:
            good["best_of"][0]["score"] += 0.1
        result = cast(Result, {**a_result(job.arm.name, job.seed, good), "commands": job.commands})
        done.append(job.name)
        write(job.result, result)
        return result

    stops = [5, 30]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run_study(tmp_path, run=run)
    assert run_study(tmp_path, run=run) == []
    stages, choice = load_stages(tmp_path)
    assert len(done) == len(set(done)) == sum(len(jobs) for _, jobs in stages)
    assert [len(jobs) for _, jobs in stages] == [3 + 6 + 2 * 2, 6 + 2 * 2, 30, 12]
    assert choice is not None and (choice.estimator, choice.credit, choice.chain_lr) == ("ppo", "own", 1e-4)
    assert main(["--out", str(tmp_path), "--show"]) == 0
    output = capsys.readouterr().out
    assert "missing" not in output and "equal tokens per query" in output


def test_a_run_that_failed_is_repeated_and_missing_runs_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(job: Job) -> Result:
        raise BenchmarkError(f"{job.name}: no memory")

    failures = run_study(tmp_path, 1, fail)
    assert len(failures) == 6 + len(PILOT_SEEDS) and "no memory" in failures[0]
    assert main(["--out", str(tmp_path), "--show"]) == 0
    assert "single-ppo-0.0001 100;" in capsys.readouterr().out


def test_a_result_of_other_settings_is_refused(tmp_path: Path) -> None:
    job = load_stages(tmp_path)[0][0][1][0]
    write(job.result, cast(Result, {**a_result(job.arm.name, job.seed, measured(0.5, 0.6, 0.6)), "commands": ["x"]}))
    with pytest.raises(BenchmarkError, match="was created by other commands"):
        job.read()
    assert main(["--out", str(tmp_path), "--show"]) == 2


def test_chains_of_an_evaluation_end_at_a_right_answer() -> None:
    def response(reward: float) -> dict[str, Any]:
        return {"policy": "llm_1", "tokens": [1] * 37, "metrics": {"task_reward": reward}}

    chains = [[response(1.0)], [response(0.0), response(1.0)], [response(0.0), response(0.0), response(0.0)]]
    result = measure_chains(chains, (37, 37, 185))
    assert result["best_of"][0]["score"] == pytest.approx(1 / 3) and result["best_of"][0]["tokens"] == 37
    assert result["chain"] == pytest.approx(way(2 / 3, 74.0) | {"prompt_tokens": (37 + 74 + 259) / 3})


def test_prompts_have_one_token_per_character() -> None:
    assert prompt_lengths({}) == (37, 111)
    assert prompt_lengths({"observer_prompt": None}) == (37, 111)
    assert prompt_lengths({"observer_prompt": OBSERVER_PROMPT}) == (37, 74)
    assert prompt_lengths({"roles": [{}]}) == (37, 37, 185)


@pytest.mark.slow
def test_a_run_trains_probes_and_leaves_a_small_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"num_updates": 1, "minibatch_size": 8, "eval_every": 1, "eval_queries": 4, "warmup_updates": 0}
    monkeypatch.setattr(runs, "SHARED", {**SHARED, **small})
    settings = {**chain_settings("own", "rloo", 1e-4), "queries_per_update": 2, "stop_in_training": True}
    job = Job(Arm("chain", settings, (0,), ProbePlan("validation", 4, 3, (1.0,))), 0, tmp_path)
    execute(job)
    result = job.read()
    assert result is not None
    training, probe = result["train"], result["probe"]
    assert training is not None and probe is not None
    assert training["status"] == "done" and training["updates"] == 1
    assert [point["update"] for point in training["curve"]] == [0, 1]
    responses = training["tokens"] / 37
    assert 8 - 1 < responses <= 16 and training["prompt_tokens"] == pytest.approx(
        8 * 37 + (responses - 8) * 111, rel=0.1
    )
    assert probe["1"]["best_of"][0]["score"] == probe["1"]["figures"]["p1"]
    assert probe["1"]["figures"]["wrongly_accepted"] in (0.0, None)
    assert job.result.stat().st_size < 10_000 and not job.study_job.run.exists()


def test_the_committed_study_compares_chains_only_at_equal_learning_rates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", "docs/study/feedback", "--show"]) == 0
    equal_rates = capsys.readouterr().out.partition("At equal learning rates")[2]
    assert "-0.007 [-0.035, +0.022]" in equal_rates and "+0.003 [-0.013, +0.019]" in equal_rates
    assert "vs. single" in equal_rates and "differs" not in equal_rates
