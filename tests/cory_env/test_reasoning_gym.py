"""The task reasoning_gym: its data sets as rows, and their verifiers as reward and feedback."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cory_env.rewarding.worker import RewardWorker
from cory_env.rewards.reasoning_gym import find_answer
from cory_env.tasks import DataError, Query, make_task
from tests.cory_env.sample_tasks import tokenizer, validate

pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")

SCORE, FEEDBACK = "cory_env.rewards.reasoning_gym:score", "cory_env.rewards.reasoning_gym:feedback"
SUMS = "reasoning_gym:chain_sum?size=50&seed=1&min_terms=2&max_terms=2&min_digits=1&max_digits=1"
MARKER = Path("/tmp/cory-evaluated")
EVALUATED = {"string_insertion": f"__import__('pathlib').Path('{MARKER}').touch() or 'A'"}
"""Data set → an answer that its verifier evaluates as Python code."""
WITHOUT_ANSWERS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Data sets whose entries have no answer, only a verifier."""


@pytest.fixture(scope="module")
def worker() -> Iterator[RewardWorker]:
    with RewardWorker(SCORE, feedback=FEEDBACK, timeout=200) as worker:
        yield worker


def rewards(worker: RewardWorker, queries: list[Query], responses: list[str]) -> list[float | None]:
    names = queries[0].columns
    columns = {name: [query.columns[name] for query in queries] for name in names}
    return worker.rewards([query.raw for query in queries], responses, columns)


def test_rows_are_the_data_set_s_and_depend_on_its_seed_alone() -> None:
    task = make_task("reasoning_gym", data=SUMS)
    assert len(task.train) + len(task.test) == 50 and len(task.test) >= 5
    query = task.train[0]
    left, sign, right = query.text.removeprefix("State the final answer to the following arithmetic problem: ").split()[
        :3
    ]
    assert int(str(query.columns["answer"])) == int(left) + int(f"{sign}{right}") and query.columns["metadata"]
    assert make_task("reasoning_gym", data=SUMS).checksum == task.checksum
    assert make_task("reasoning_gym", data=SUMS.replace("seed=1", "seed=2")).checksum != task.checksum


def test_data_sets_that_depend_on_python_s_hash_seed_are_the_same_in_every_process() -> None:
    data = "reasoning_gym:word_ladder?size=8"
    code = f"from cory_env.tasks import make_task; print(make_task('reasoning_gym', data={data!r}).checksum)"
    command = [sys.executable, "-c", code]
    checksums = {
        subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in "12"
    }
    assert checksums == {f"{make_task('reasoning_gym', data=data).checksum}\n".encode()}


def test_right_answers_of_a_mixture_score_one() -> None:
    task = make_task("reasoning_gym", data="reasoning_gym:chain_sum+leg_counting+spell_backward?size=30")
    sources = {str(query.columns["metadata"]["source_dataset"]) for query in task.train}  # type: ignore[index]
    assert sources == {"chain_sum", "leg_counting", "spell_backward"}
    report = validate(task, tokenizer(), max_prompt_tokens=None, max_response_tokens=64)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>7</answer>", "7"),
        ("<think>2</think> <answer>\n 7 8 </answer> done", "7 8"),
        ("<answer>1</answer> or <answer>2</answer>", "2"),
        ("7", None),
        ("<answer>7", None),
        ("</answer>7<answer>", None),
    ],
)
def test_the_answer_is_what_the_last_tags_enclose(response: str, answer: str | None) -> None:
    assert find_answer(response) == answer


def test_scores_and_feedback(worker: RewardWorker) -> None:
    queries = [*make_task("reasoning_gym", data=SUMS).train[:3]]
    right = str(queries[0].columns["answer"])
    responses = [f"<answer>{right}</answer>", "<answer>1000</answer>", "1"]
    assert rewards(worker, queries[:1] * 3, responses) == [1.0, 0.0, 0.0]
    columns = {name: [value] * 3 for name, value in queries[0].columns.items()}
    texts = worker.feedback([queries[0].raw] * 3, responses, columns)
    assert texts == [None, "This answer is wrong.", "There is no answer between <answer> and </answer>."]


def test_verifiers_that_evaluate_answers_are_sandboxed(worker: RewardWorker) -> None:
    for name, answer in EVALUATED.items():
        MARKER.unlink(missing_ok=True)
        queries = [*make_task("reasoning_gym", data=f"reasoning_gym:{name}?size=10").train[:2]]
        right = f"<answer>{queries[0].columns['answer']}</answer>"
        hang = "<answer>[c for c in iter(int, 1)]</answer>"
        scores = rewards(worker, queries[:1] * 3, [f"<answer>{answer}</answer>", hang, right])
        assert scores[2] == 1.0 and max(map(float, filter(None, scores[:2])), default=0.0) < 1.0
        assert not MARKER.exists()
        with RewardWorker(f"{SCORE}?sandbox=off", timeout=200) as unsafe:
            rewards(unsafe, queries[:1], [f"<answer>{answer}</answer>"])
        assert MARKER.exists()  # so the answer is evaluated
        MARKER.unlink()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("chain_sums", "no data set 'chain_sums'. Similar: chain_sum"),
        ("chain_sum?terms=3", "chain_sum has no setting 'terms'. It has: "),
        ("chain_sum?min_terms=0", "chain_sum rejects its settings"),
        ("chain_sum?size=many", "chain_sum rejects its settings"),
        ("chain_sum+leg_counting?min_terms=3", "has no setting 'min_terms'. It has: size, seed"),
        ("composite", "no data set 'composite'"),
        ("chain_sum?size", "Invalid data"),
    ],
)
def test_bad_names_and_settings_are_named(data: str, message: str) -> None:
    with pytest.raises(DataError, match=f".*{message}".replace("?", r"\?")):
        make_task("reasoning_gym", data=f"reasoning_gym:{data}")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        DataError, match=r"The package reasoning_gym is missing: pip install 'cory-rllib\[reasoning-gym\]'"
    ):
        make_task("reasoning_gym", data=SUMS)


def test_without_data_the_message_says_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"requires data\. Set data to reasoning_gym:NAME"):
        make_task("reasoning_gym")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_data_sets_load_and_their_answers_score_one(worker: RewardWorker) -> None:
    from reasoning_gym.factory import DATASETS

    failures: dict[str, Any] = {}
    for name in sorted(set(DATASETS) - {"composite"}):
        queries = make_task("reasoning_gym", data=f"reasoning_gym:{name}?size=6").train
        scores = rewards(worker, [*queries], [f"<answer>{query.columns['answer']}</answer>" for query in queries])
        if any(value != 1.0 for value in scores):
            failures[name] = scores
    assert failures.keys() == WITHOUT_ANSWERS, failures
