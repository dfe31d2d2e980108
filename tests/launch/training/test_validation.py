"""Checking a task without a model."""

import re
from dataclasses import dataclass, replace

import pytest

from cory_env.chain_settings import ObservedResponses
from cory_env.rewarding.episodes import RewardedResponse, reward_responses
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks import Query, Task
from launch.training.validation import ValidationReport, check_lengths
from tests.cory_env.sample_tasks import QUERIES, chain, reviews, tokenizer, tokens_of, validate


@dataclass(frozen=True, kw_only=True)
class Sums(Task):
    """A task with gold answers."""

    def gold(self, query: Query) -> str | None:
        return str(query.columns["gold"])


def sums(gold: str = "4") -> Sums:
    return Sums(
        name="sums",
        train=[Query(0, "2 + 2 =", {"answer": "4", "gold": "4"}), Query(1, "1 + 3 =", {"answer": "4", "gold": gold})],
        test=[Query(0, "3 + 1 =", {"answer": "4", "gold": "4"})],
        reward="tests.cory_env.sample_rewards:with_column",
        solved_at=1.0,
    )


def test_the_report_of_a_valid_task_has_prompts_and_rewards() -> None:
    report = validate(reviews(), tokenizer(), num_agents=3)
    assert report.ok and not report.warnings
    assert list(report.prompts) == ["pioneer", "observer_1", "observer_2"]
    assert "<observer_1's response>" in report.prompts["observer_2"][0]
    assert ("pioneer", "This movie was", " This movie was", 15.0) in report.rewards
    assert ("observer_2", "This movie was", "", 0.0) in report.rewards  # a model may respond with nothing
    text = str(report)
    assert "train: 3 queries" in text and "Prompt of observer_1" in text and text.endswith("The task is sound.")


def test_gold_answers_must_have_reward_one() -> None:
    valid = validate(sums(), tokenizer())
    assert valid.ok and "train: 2 of 2 gold answers score 1.0" in valid.facts
    invalid = validate(sums(gold="5"), tokenizer())
    assert not invalid.ok
    assert "1 gold answers of train do not score 1.0, the first is '5' to query 1" in invalid.problems[0]
    assert str(invalid).endswith("The task cannot be trained on yet.")


def test_wrong_answers_must_not_have_reward_one() -> None:
    same = validate(sums(), tokenizer())
    assert not any("wrong answers" in fact for fact in same.facts)
    queries = [Query(0, "2 + 2 =", {"answer": "4", "gold": "4"}), Query(1, "2 + 3 =", {"answer": "5", "gold": "5"})]
    valid = validate(replace(sums(), train=queries), tokenizer())
    assert valid.ok and "train: 0 of 2 wrong answers (those of the next query) score 1.0" in valid.facts
    constant_reward = "tests.cory_env.sample_rewards:fixed?value=1"
    invalid = validate(replace(sums(), train=queries, reward=constant_reward), tokenizer())
    assert (
        "2 wrong answers to queries of train score 1.0, the first is '5' to query 0, '2 + 2 ='" in invalid.problems[0]
    )


def test_gold_answers_longer_than_a_response_are_a_warning() -> None:
    long = [Query(0, "2 + 2 =", {"answer": "4444", "gold": "4444"})]
    report = validate(replace(sums(), train=long), tokenizer(), max_response_tokens=1)
    needed = len(tokenizer()("4444")["input_ids"])
    assert (
        f"1 gold answers of train do not fit max_response_tokens = 1. Raise it to {needed} or more." in report.warnings
    )


def report_lengths(num_agents: int, observed: ObservedResponses, max_prompt_tokens: int) -> ValidationReport:
    report = ValidationReport("reviews")
    check_lengths(
        chain(num_agents, observed=observed, max_prompt_tokens=max_prompt_tokens, max_response_tokens=15), report
    )
    return report


@pytest.mark.parametrize(("num_agents", "observed"), [(2, "all"), (4, "all"), (4, "last")])
def test_the_reported_max_prompt_tokens_is_the_minimum_without_truncation(
    num_agents: int, observed: ObservedResponses
) -> None:
    def reported(num_agents: int, observed: ObservedResponses) -> int:
        facts = report_lengths(num_agents, observed, 1000).facts
        return max(sum(map(int, re.findall(r"up to (\d+)", fact))) for fact in facts)

    needed = reported(num_agents, observed)
    assert report_lengths(num_agents, observed, needed).warnings == []
    assert report_lengths(num_agents, observed, needed - 1).warnings != []
    separator = len(tokens_of('" and this sentence "' + QUERIES[2].text))
    extra = (
        2 * (15 + separator) if (num_agents, observed) == (4, "all") else 0
    )  # two more references than with two agents
    assert abs(needed - reported(2, "all") - extra) <= 2  # tokens merge across boundaries


def test_example_prompts_show_what_each_agent_observes() -> None:
    report = validate(reviews(), tokenizer(), num_agents=4, observed="last", max_response_tokens=15)
    assert report.ok and ("observer_3", "This movie was", " This movie was", 15.0) in report.rewards
    assert "<observer_1's response>" in report.prompts["observer_2"][0]
    assert "<pioneer's response>" not in report.prompts["observer_2"][0]


def test_too_long_queries_are_counted() -> None:
    report = validate(reviews(), tokenizer(), max_prompt_tokens=20)
    assert not report.ok and not report.rewards
    assert "1 of 3 queries of train do not fit max_prompt_tokens = 20, the first is query 2, " in report.problems[0]
    assert validate(reviews(), tokenizer(), max_prompt_tokens=20, knowledge_transfer=False).ok
    assert validate(reviews(), tokenizer(), max_prompt_tokens=20, num_agents=1).ok


def test_a_too_long_query_is_reported_even_if_numbering_is_wrong() -> None:
    misnumbered = [Query(10, "word " * 300), Query(11, "2 + 2 =")]
    report = validate(replace(sums(), train=misnumbered), tokenizer(), max_prompt_tokens=20)
    assert any("The queries of train are not numbered" in problem for problem in report.problems)
    assert any("the first is query 10, 'word word" in problem for problem in report.problems)


def test_possible_truncation_of_references_is_a_warning() -> None:
    report = validate(reviews(), tokenizer(), max_prompt_tokens=30, max_response_tokens=15)
    assert report.ok and "3 queries of train leave too little room" in report.warnings[0]


def test_empty_splits_empty_queries_wrong_numbers_and_shared_queries_are_reported() -> None:
    empty = validate(replace(reviews(), train=[Query(0, " ")]), tokenizer())
    assert "1 of 1 queries of train are empty, the first is query 0" in empty.problems[0]
    none = validate(replace(reviews(), test=[]), tokenizer())
    assert "The test split has no queries" in none.problems[0]
    shared = validate(replace(reviews(), train=[Query(0, "My aunt")], test=[Query(0, "My aunt")]), tokenizer())
    assert shared.ok and "1 training queries are also held out, such as 'My aunt'" in shared.warnings[0]
    misnumbered = validate(replace(reviews(), train=[Query(4, "My aunt's")]), tokenizer())
    assert "not numbered" in misnumbered.problems[0]


def test_every_query_requires_a_value_in_the_reward_s_required_columns() -> None:
    def report_on(*answers: str | None, reward: str = "with_column") -> ValidationReport:
        train = [
            Query(i, f"{i} + 1 =", {} if answer is None else {"answer": answer}) for i, answer in enumerate(answers)
        ]
        task = Task(name="custom", train=train, test=train[:1], reward=f"tests.cory_env.sample_rewards:{reward}")
        return validate(task, tokenizer())

    assert report_on("1", "2").ok
    partial, missing = report_on("1", None, "3", None), report_on(None, None)
    assert partial.problems[0].startswith(
        "2 of 4 queries of train have no value in the column 'answer', which the reward "
        "tests.cory_env.sample_rewards:with_column requires, the first is query 1, '1 + 1 ='. Add it to the data, or"
    )
    assert [problem.split(" have ")[0] for problem in missing.problems] == [
        "2 of 2 queries of train",
        "1 of 1 queries of test",
    ]
    assert not partial.rewards and not missing.rewards
    assert report_on("1", None, reward="with_default").ok and report_on(None, None, reward="with_default").ok


@pytest.mark.parametrize(("columns", "reward"), [({}, 1.0), ({"query": "another column"}, 0.0)])
def test_a_reward_gets_the_query_as_the_argument_query(columns: dict[str, object], reward: float) -> None:
    queries = [Query(0, "1 + 1 =", columns)]
    task = Task(name="custom", train=queries, test=queries, reward="tests.cory_env.sample_rewards:with_query")
    report = validate(task, tokenizer())
    assert report.ok
    with RewardWorker(task.reward) as worker:
        response = RewardedResponse(queries[0], "pioneer", "So 1 + 1 = 2", [])
        assert reward_responses(worker, [response]) == [reward]


def test_a_reward_that_changes_the_list_of_completions_is_a_problem() -> None:
    report = validate(reviews("tests.cory_env.sample_rewards:inserts"), tokenizer())
    assert "values for 1 samples" in report.problems[0]


def test_a_failing_reward_is_a_problem_of_the_task() -> None:
    report = validate(reviews("tests.cory_env.sample_rewards:returns_one_number"), tokenizer())
    assert not report.ok and "returned 1.0 (float) instead of a list" in report.problems[0]
    missing = validate(reviews("no_such_module:f"), tokenizer())
    assert "not found" in missing.problems[0]
