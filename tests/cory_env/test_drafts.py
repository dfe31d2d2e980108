"""The task drafts: what it asks, what it holds out, and what counts as an answer."""

import pytest

from cory_env.rewards.answer import whole_is_right
from cory_env.tasks import Query, make_task
from cory_env.tasks.drafts import draw_queries, is_working, working
from cory_env.validate import validate
from tests.cory_env.sample_tasks import tokenizer


def numbers(query: Query) -> list[int]:
    return [int(term) for term in query.text.split("+")]


def test_no_sum_is_in_two_splits_whatever_the_order_of_its_numbers() -> None:
    task = make_task("drafts", validation=200)
    sizes = {split: len(task.queries(split)) for split in task.splits}
    assert sizes == {"train": 9000, "validation": 200, "test": 800}
    assert len({frozenset(numbers(query)) for query in task.all_queries()}) == sum(sizes.values())


def test_sums_are_right_and_the_same_in_every_process() -> None:
    train, test = draw_queries()
    for split in (train, test):
        assert [query.id for query in split] == list(range(len(split)))
        assert all(query.columns == {"answer": str(sum(numbers(query)))} for query in split)
        assert all(len(query.text) == 9 and len(numbers(query)) == 2 for query in split)
    assert [query.text for query in (*train[:2], test[0])] == ["7852+5143", "5339+7831", "7845+2802"]


def test_working_is_the_sum_of_each_column_and_adds_up() -> None:
    assert working((4728, 6135)) == "10080513"
    for query in draw_queries()[1][:50]:
        first, second = numbers(query)
        written = working((first, second))
        columns = [int(written[at : at + 2]) for at in range(0, 8, 2)]
        assert sum(column * 10**place for place, column in enumerate(reversed(columns))) == first + second
        assert is_working(written) and not is_working(str(first + second))


def test_a_response_is_the_answer_or_nothing() -> None:
    completions = ["10863", " 10863\n", "10080513", "10080513=10863", "10853", "", "010863"]
    assert whole_is_right(completions, ["10863"] * len(completions)) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_the_observer_sees_the_draft_between_query_and_equals_sign() -> None:
    task = make_task("drafts")
    query = Query(0, "4728+6135", {"answer": "10863"})
    assert task.prompt(query) == "4728+6135="
    assert task.observer_prompt(query, [" 10080513"]) == "4728+6135~10080513="
    assert task.observer_prompt(query, ["10080513", "10853"]) == "4728+6135~10080513~10853="


def test_the_task_is_sound() -> None:
    report = validate(make_task("drafts"), tokenizer(), max_prompt=None)
    assert report.ok and not report.warnings


def test_digits_belong_to_another_task() -> None:
    with pytest.raises(ValueError, match="digits=3 belongs to the task arithmetic"):
        make_task("drafts", digits=3)
