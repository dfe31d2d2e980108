"""`cory generate`, and generation from Python, with feedback between agents and chains that stop."""

import json
from pathlib import Path
from typing import Any

import pytest

from cory_env.rewarding.worker import RewardError
from cory_env.tasks import Query
from cory_env.tasks.turns import SeenResponse
from cory_rllib import generate, load_run
from launch.commands.generate import print_answer
from launch.console.errors import CommandError
from launch.main import main
from launch.models.export import model_card
from launch.models.trained import open_trained
from launch.models.trained_chain import TrainedChain
from launch.run_folder.run import Run
from launch.run_folder.sources import collect_sources
from launch.training.preflight import load_task
from policies.generation.generator import EVALUATION_UPDATE, Sampling, sampling_seed
from tests.launch.conftest import RUN_SETTINGS, Cory, record_test_run, write_policies
from tests.paper import make_settings, paper_settings

FEEDBACK = "tests.policies.sample_rewards:has_letter"
QUERIES = ["This movie", "I did not expect", "The acting", "A film"]
LETTERS = ["q", "e", "z", "a"]
SHOWN = "{query}: {reference} ({feedback}). {query}"
HIDDEN = "{query}: {reference}. {query}"


def record_run(folder: Path, **changes: Any) -> Run:
    settings = make_settings({**RUN_SETTINGS.model_dump(), "feedback": FEEDBACK, "stop_when": "solved", **changes})
    run = record_test_run(folder, settings, updates=range(2))
    run.checkpoints.save(1, lambda path: write_policies(path, settings, seed=1))
    run.unlock()
    return run


@pytest.fixture(scope="module")
def shown_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose prompts show the feedback."""
    return record_run(tmp_path_factory.mktemp("shown") / "run", observer_prompt=SHOWN)


@pytest.fixture(scope="module")
def hidden_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose feedback only stops chains."""
    return record_run(tmp_path_factory.mktemp("hidden") / "run", observer_prompt=HIDDEN)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "queries.jsonl"
    rows = [{"query": text, "letter": letter} for text, letter in zip(QUERIES, LETTERS, strict=True)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_next_role_sees_the_feedback_and_the_chain_stops_if_nothing_is_to_be_corrected(
    shown_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = open_trained(shown_run.path)
    chain = TrainedChain(trained, trained.policy_ids, 1.0, 0)
    answers = [
        chain.answer(number, text, columns={"letter": letter})
        for number, (text, letter) in enumerate(zip(QUERIES, LETTERS, strict=True))
    ]
    for answer in answers:
        print_answer(answer, print_query=True)
    expected = ""
    for number, (answer, letter) in enumerate(zip(answers, LETTERS, strict=True)):
        first, *rest = answer["responses"]
        solved = letter in first["text"]
        feedback = None if solved else f"no {letter}"
        assert first["feedback"] == feedback and len(rest) == (0 if solved else 1)
        expected += f"{answer['query']}\npioneer (llm_1): {first['text'].lstrip()}\n"
        expected += f"feedback: {'(nothing to correct)' if solved else feedback}\n"
        for second in rest:
            assert "feedback" not in second
            expected += f"observer (llm_2): {second['text'].lstrip()}\n"
            query = Query(number, QUERIES[number])
            prompts = chain.chain.encoders[0].encode_prompts([query], [SeenResponse(first["text"], feedback)])
            seeds = [sampling_seed(0, EVALUATION_UPDATE, number, 1)]
            sampling = Sampling(1.0, 8, seeds, chain.chain.encoders[0].stop_token_ids)
            (response,) = chain.generator.generate(prompts, "llm_2", sampling)
            assert chain.chain.encoders[0].decode(response.tokens) == second["text"]
    assert capsys.readouterr().out == expected
    assert {len(answer["responses"]) for answer in answers} == {1, 2}
    queries = [
        Query(number, text, {"letter": letter})
        for number, (text, letter) in enumerate(zip(QUERIES, LETTERS, strict=True))
    ]
    assert chain.answer_all([(query, 0) for query in queries]) == answers

    columns = {"letter": LETTERS}
    assert generate(load_run(shown_run.path), QUERIES, temperature=1.0, seed=0, columns=columns) == answers
    with pytest.raises(ValueError, match=r"one value per query, 4 in all, but the lengths are \{'letter': 1\}"):
        generate(shown_run.path, QUERIES, columns={"letter": ["e"]})
    with pytest.raises(RewardError, match=r"feedback .*has_letter failed on sample 0 .*not a letter"):
        generate(shown_run.path, QUERIES[0], columns={"letter": ["!"]})


def test_rows_of_a_file_bring_the_columns_that_feedback_needs(
    shown_run: Run, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(shown_run.path), "--backend", "transformers", "--in", str(source)]
    assert main([*words, "--out", str(tmp_path / "a.jsonl"), "--samples", "2"]) == 0
    rows = read_rows(tmp_path / "a.jsonl")
    assert [row["columns"] for row in rows[::2]] == [{"letter": letter} for letter in LETTERS]
    for row in rows:
        letter, first = row["columns"]["letter"], row["responses"][0]
        assert first["feedback"] == (None if letter in first["text"] else f"no {letter}")
        assert len(row["responses"]) == (1 if first["feedback"] is None else 2)

    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"query": "One"}\n')
    assert main([*words[:-1], str(plain), "--out", str(tmp_path / "b.jsonl")]) == 2
    assert "column 'letter'" in capsys.readouterr().err and not (tmp_path / "b.jsonl").exists()


def test_a_query_without_the_columns_is_rejected_before_models_are_loaded(
    shown_run: Run, hidden_run: Run, cory_in_process: Cory
) -> None:
    message = f"The feedback {FEEDBACK} requires the column letter, which query 'This movie' lacks."
    result = cory_in_process("generate", str(shown_run.path), QUERIES[0])
    assert result.returncode == 2 and message in result.stderr and "--roles llm_1" in result.stderr
    assert "--no-feedback" not in result.stderr
    result = cory_in_process("generate", str(hidden_run.path), QUERIES[0])
    assert result.returncode == 2 and message in result.stderr and "--no-feedback" in result.stderr
    result = cory_in_process("generate", str(shown_run.path), QUERIES[0], "--no-feedback")
    assert result.returncode == 2 and f"show the feedback {FEEDBACK}" in result.stderr


def test_without_feedback_all_roles_respond_and_one_policy_never_needs_it(
    shown_run: Run, hidden_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(hidden_run.path), QUERIES[0], "--no-feedback", "--json", "--seed", "0"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [sorted(response) for response in answer["responses"]] == [["policy", "role", "text"]] * 2
    assert [answer] == generate(hidden_run.path, QUERIES[0], feedback=False, seed=0)
    for run in (shown_run, hidden_run):
        (answer,) = generate(run.path, QUERIES[0], roles=["llm_2"])
        assert [sorted(response) for response in answer["responses"]] == [["policy", "role", "text"]]
    with pytest.raises(CommandError, match="cannot answer without it"):
        load_run(shown_run.path).chain(feedback=False)


def test_the_model_card_has_the_feedback_in_prompts_and_settings(shown_run: Run, policies_run: Run) -> None:
    collect_sources(shown_run.settings, *load_task(shown_run.settings)).write(shown_run.path)
    card = model_card(open_trained(shown_run.path), "llm_1", [])
    assert SHOWN in card and "`{feedback}` is what the feedback function" in card and f"feedback: {FEEDBACK}" in card
    assert "feedback function" not in model_card(open_trained(policies_run.path), "llm_1", [])


def test_a_function_from_python_can_be_the_feedback_and_only_its_name_is_published(tmp_path: Path) -> None:
    def two_words(completions: list[str]) -> list[str | None]:
        return [None if len(text.split()) > 1 else "say more" for text in completions]

    settings = paper_settings(feedback=two_words)
    assert settings.public_dict()["feedback"].endswith("two_words") and len(str(settings.feedback)) > 200
    run = record_run(tmp_path / "run", feedback=two_words, observer_prompt=HIDDEN)
    for answer in generate(run.path, QUERIES):
        first, *rest = answer["responses"]
        assert first["feedback"] == (None if len(first["text"].split()) > 1 else "say more")
        assert bool(rest) == (first["feedback"] is not None)
