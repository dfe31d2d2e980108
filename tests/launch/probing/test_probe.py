"""`cory probe` from end to end on small models, and what it rejects before models are loaded."""

import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import cory_rllib
from cory_env.episode import ChainEpisode
from cory_env.rewarding.episodes import compute_awaited, reward_episodes
from cory_env.rewarding.worker import RewardWorker
from launch.main import main
from launch.models.generators import start_generator
from launch.models.trained import open_trained
from launch.models.trained_chain import TrainedChain
from launch.probing.figures import compute_figures
from launch.probing.outcomes import collect_outcomes
from launch.probing.plan import ProbePlan, plan_probe
from launch.probing.sampler import ProbedSample
from launch.run_folder.run import Run
from policies.rollout.chain_generation import ChainRequest, FeedbackTogether, generate_chains
from policies.settings.yaml12 import Value
from tests.launch.conftest import RUN_SETTINGS, record_test_run, write_policies

FUNCTIONS = """
def even(completions):
    return [float(len(completion) % 2 == 0) for completion in completions]

def odd_length(completions):
    return [f"It has {len(c)} letters." if len(c) % 2 else None for c in completions]

def content(completions):
    return [None for _ in completions]

def fails_on_the_second_query(completions, number):
    if "2" in number:
        raise ValueError("no")
    return [None for _ in completions]
"""
QUERIES = 5
SETTINGS: dict[str, Value] = {
    "task": "custom",
    "data": "q.jsonl",
    "reward": "lengths:even",
    "backend": "transformers",
    "dtype": "fp32",
    "max_response_tokens": 6,
    "max_prompt_tokens": 64,
}
WORDS = [f"{key}={value}" for key, value in SETTINGS.items()]
OPTIONS = ("--solved-at", "1", "--samples", "3", "--temperatures", "0.7,1.3")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with queries, a reward and feedback functions."""
    monkeypatch.chdir(tmp_path)
    rows = [{"query": f"The film number {number}", "number": str(number)} for number in range(QUERIES)]
    Path("q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("lengths.py").write_text(FUNCTIONS)
    return tmp_path


def probe(*words: str) -> int:
    return main(["probe", "imdb-gpt2-tiny", *WORDS, *OPTIONS, "--out", "out", *words])


def read_results() -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads(Path("out/probe.json").read_text())["results"]
    return results


def read_samples() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("out/responses.jsonl").read_text().splitlines()]


def plan_model(settings: dict[str, Value]) -> ProbePlan:
    """Plans a probe of the bundled model."""
    return plan_probe(
        "imdb-gpt2-tiny",
        settings,
        lambda text: None,
        split="test",
        queries=None,
        samples=3,
        temperatures=[0.7],
        solved_at=1,
    )


def test_a_probe_with_feedback_reports_tables_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe("feedback=lengths:odd_length") == 0
    text = capsys.readouterr().out
    assert "5 test queries × 3 answers, with feedback." in text and "feedback chain, stop" in text
    assert "at 5 queries" in text and text.endswith("Results     out/probe.json\n")
    for result in read_results():
        assert (result["figures"]["wrongly_accepted"]["mean"], result["figures"]["not_accepted"]["mean"]) == (0, 0)
        samples = [sample for sample in read_samples() if sample["temperature"] == result["temperature"]]
        outcomes = collect_outcomes(cast(list[ProbedSample], samples), 1.0, str.strip)
        for name, figure in compute_figures(outcomes).items():
            mean, low, high, count = figure.estimate
            saved = result["figures"][name]
            assert saved["mean"] == pytest.approx(mean) or (saved["mean"] is None and np.isnan(mean))
            assert [saved["low"], saved["high"], saved["n"], saved["tokens"]] == [low, high, count, figure.tokens]


def test_the_measured_chain_is_the_one_that_stops_when_solved() -> None:
    assert probe("feedback=lengths:odd_length") == 0
    (result, _) = read_results()
    plan = plan_model({**SETTINGS, "feedback": "lengths:odd_length"})
    settings = plan.settings.model_copy(update={"stop_when": "solved"})
    chain = settings.make_chain(plan.task, settings.make_tokenizers())
    generator = start_generator(settings, {"llm_1": settings.model_paths["llm_1"]}, "transformers", 32)

    episodes = [ChainEpisode(chain, query) for query in plan.task.test[:QUERIES] for _ in range(3)]
    requests = [
        ChainRequest(episode, ["llm_1"] * 2, chain.response_limits, 0.7, settings.seed, index % 3)
        for index, episode in enumerate(episodes)
    ]
    with RewardWorker(plan.task.reward, feedback=plan.task.feedback) as worker:
        responses = generate_chains(generator, requests, FeedbackTogether(partial(compute_awaited, worker)))
        rewards = reward_episodes(worker, episodes)
    assert {len(episode.responses) for episode in episodes} == {1, 2}
    figure = result["figures"]["chain_feedback"]
    assert np.mean([episode_rewards[-1] for episode_rewards in rewards]) == pytest.approx(figure["mean"])
    num_tokens = sum(len(response.tokens) for chain_responses in responses for response in chain_responses)
    assert num_tokens / QUERIES / 3 == pytest.approx(figure["tokens"])


def test_feedback_that_accepts_everything_is_exposed(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe("feedback=lengths:content") == 0
    for result in read_results():
        figures = result["figures"]
        assert figures["chain_feedback"]["mean"] == figures["best_of_3"]["mean"] == pytest.approx(figures["p1"]["mean"])
        assert figures["wrongly_accepted"]["mean"] == pytest.approx(1 - figures["p1"]["mean"])


def test_without_feedback_there_is_no_second_chain(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe() == 0
    text = capsys.readouterr().out
    assert "without a feedback function" in text and "upper bound" in text and '"solved"' not in text
    assert {*read_samples()[0]} == {"temperature", "query", "sample", "first", "second"}


def test_a_probe_that_failed_is_repeated_in_its_folder_and_results_are_not_overwritten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert probe("feedback=lengths:fails_on_the_second_query") == 2
    assert {file.name for file in Path("out").iterdir()} == {"log.txt", ".lock"}
    assert probe("feedback=lengths:odd_length", "--solved-at", "0") == 0
    assert "Nothing to repair: all first answers are right" in capsys.readouterr().out
    results = Path("out/probe.json").read_bytes()
    assert len(read_samples()) == 2 * QUERIES * 3
    assert probe("feedback=lengths:content") == 2
    assert "out is not empty. Empty it, or choose another folder with --out." in capsys.readouterr().err
    assert Path("out/probe.json").read_bytes() == results


def test_queries_on_which_a_function_fails_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe("feedback=lengths:fails_on_the_second_query", "on_reward_error=skip") == 0
    assert "Warning: 1 of 5 queries are left out: rewards or feedback failed on them." in capsys.readouterr().err
    assert read_results()[0]["figures"]["p1"]["n"] == 4


def test_a_prompt_with_feedback_is_replaced_in_the_chain_without() -> None:
    prompt = "{query} {reference} {feedback}"
    plan = plan_model({**SETTINGS, "feedback": "lengths:odd_length", "observer_prompt": prompt})
    assert plan.with_feedback is not None and plan.with_feedback.task.observer_template == prompt
    plain_task = plan.plain.task
    assert plain_task.observer_template == "Reference: {reference}\n{query}" and plain_task.feedback is None


def test_a_runs_policies_give_the_answers_of_cory_generate(
    policies_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--queries", "4", "--samples", "3", "--temperatures", "0.7", "--solved-at", "0.5", "--out", "out")
    words = ("reward=lengths:even", "--roles", "llm_2,llm_1", "--checkpoint", "6")
    assert main(["probe", str(policies_run.path), *words, *options]) == 0
    chain = TrainedChain(open_trained(policies_run.path, "6"), ("llm_2", "llm_1"), 0.7, policies_run.settings.seed)
    queries = chain.chain.task.queries("test")
    answers = chain.answer_all([(queries[query], sample) for query in range(4) for sample in range(3)])
    assert [[sample["first"]["text"], sample["second"]["text"]] for sample in read_samples()] == [
        [response["text"] for response in answer["responses"]] for answer in answers
    ]


def test_the_result_of_a_run_is_in_its_folder(policies_run: Run) -> None:
    options: dict[str, Any] = {"queries": 3, "samples": 3, "temperatures": [1.0], "solved_at": 0.5, "quiet": True}
    settings: dict[str, Any] = {"max_response_tokens": 4, "reward": "lengths:even"}
    result = cory_rllib.probe(policies_run.path, **options, **settings)
    assert list(result.figures) == [1.0] and result.advice.temperature == 1.0 and result.dropped == 0
    (file,) = (policies_run.path / "probe").glob("*/probe.json")
    assert file.parent.name.startswith("update_000005-")
    assert json.loads(file.read_text())["advice"]["text"] == result.advice.text


def test_a_single_agent_is_probed_as_its_own_second_agent(tmp_path: Path) -> None:
    settings = RUN_SETTINGS.model_copy(update={"num_agents": 1})
    run = record_test_run(tmp_path / "run", settings, updates=range(2))
    run.checkpoints.save(1, lambda path: write_policies(path, settings, seed=1))
    plan = plan_probe(
        str(run.path), {}, lambda text: None, split="validation", queries=2, samples=3, temperatures=[1.0], solved_at=1
    )
    assert plan.policy_ids == ("llm_1", "llm_1") and plan.settings.num_agents == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samples", "2"], "Invalid value for '--samples': Input should be greater than or equal to 3"),
        (["--temperatures", "0.7,0"], "Temperature 0 must be above 0: at 0, all samples of a query are equal"),
        (["--temperatures", "1,1"], "Set at least one temperature, and none of them twice"),
        (["--temperatures", "warm"], "--temperatures warm: write numbers with commas"),
        (["--roles", "llm_1,llm_2"], "--roles requires a run, but imdb-gpt2-tiny is a model"),
        (["--checkpoint", "5"], "--checkpoint requires a run"),
        (["knowledge_transfer=false"], "knowledge_transfer=false conflicts with a probe"),
        (["feedback=task"], "feedback=task requires a task with its own feedback function, but custom has none"),
        (["feedback=lengths:missing"], "has no function 'missing'"),
        (["num_agents=3"], "`num_agents` cannot be changed"),
    ],
)
def test_invalid_arguments_are_rejected_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert probe(*words) == 2
    except SystemExit as error:  # from the parser of the command line
        assert error.code == 2
    assert message in " ".join(capsys.readouterr().err.split()) and not Path("out").exists()


def test_a_task_without_right_answers_requires_a_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "imdb-gpt2-tiny", *WORDS, "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert "Task custom with reward lengths:even does not define which answers are right. Set --solved-at" in error
    assert not Path("out").exists()


def test_a_run_takes_no_preset_and_two_roles(policies_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", str(policies_run.path), "drafts-tiny"]) == 2
    assert "is a run, which has its own settings" in capsys.readouterr().err
    assert main(["probe", str(policies_run.path), "--roles", "llm_1", "--solved-at", "1"]) == 2
    assert "--roles names 1 policies, but a probe requires two" in capsys.readouterr().err


def test_a_preset_gives_a_models_settings() -> None:
    settings = plan_probe(
        "drafts-llama-tiny",
        {"backend": "transformers", "seed": 7},
        lambda text: None,
        preset="drafts-tiny",
        split="test",
        queries=2,
        samples=3,
        temperatures=[1.0],
        solved_at=None,
    ).settings
    assert (settings.task, settings.model, settings.num_agents) == ("drafts", "drafts-llama-tiny", 2)
    assert (settings.policy_ids, settings.seed, settings.backend) == (("llm_1",), 7, "transformers")
