"""The task drafts: what it asks, what it holds out, and what counts as an answer."""

import pytest

from cory_env.rewards.answer import whole_is_right
from cory_env.tasks import Query, make_task
from cory_env.tasks.drafts import draw_queries, working
from cory_env.validate import validate
from tests.cory_env.sample_tasks import tokenizer


def numbers(query: Query) -> list[int]:
    return [int(term) for term in query.text.split("+")]


def test_no_sum_is_in_two_splits_whatever_the_order_of_its_numbers() -> None:
    task = make_task("drafts", validation=200)
    sizes = {split: len(task.queries(split)) for split in task.splits}
    assert sizes == {"train": 9000, "validation": 200, "test": 800}
    assert len({tuple(sorted(numbers(query))) for query in task.all_queries()}) == sum(sizes.values())


def test_sums_are_right_and_the_same_in_every_process() -> None:
    train, test = draw_queries()
    for split in (train, test):
        assert [query.id for query in split] == list(range(len(split)))
        assert all(query.columns == {"answer": str(sum(numbers(query)))} for query in split)
        assert all(len(numbers(query)) == 4 and min(numbers(query)) >= 10 for query in split)
    assert [query.text for query in (*train[:2], test[0])] == ["63+42+43+63", "94+73+88+76", "86+33+79+16"]


def test_working_is_the_tens_and_the_ones_and_adds_up() -> None:
    assert working([47, 86, 35, 12]) == "160+20"
    assert all(
        sum(map(int, working(numbers(query)).split("+"))) == sum(numbers(query)) for query in draw_queries()[1][:50]
    )


def test_a_response_is_the_answer_or_nothing() -> None:
    completions = ["180", " 180\n", "160+20", "160+20=180", "181", "", "0180"]
    assert whole_is_right(completions, ["180"] * len(completions)) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_the_observer_sees_the_draft_between_query_and_equals_sign() -> None:
    task = make_task("drafts")
    query = Query(0, "47+86+35+12", {"answer": "180"})
    assert task.prompt(query) == "47+86+35+12="
    assert task.observer_prompt(query, [" 160+20"]) == "47+86+35+12~160+20="
    assert task.observer_prompt(query, ["160+20", "170"]) == "47+86+35+12~160+20~170="


def test_the_task_is_sound() -> None:
    report = validate(make_task("drafts"), tokenizer(), max_prompt=None)
    assert report.ok and not report.warnings


def test_digits_belong_to_another_task() -> None:
    with pytest.raises(ValueError, match="digits=3 belongs to the task arithmetic"):
        make_task("drafts", digits=3)
