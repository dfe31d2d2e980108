"""The task drafts: queries, splits, prompts and rewards."""

from pathlib import Path

from cory_env.rewards.answer import whole_is_right
from cory_env.tasks import Query, make_task
from cory_env.tasks.drafts import QUERIES
from recipes.sums import format_working, is_working, parse_query, write_sums
from tests.cory_env.sample_tasks import tokenizer, validate


def test_splits_share_no_sum_in_any_order_of_its_numbers() -> None:
    task = make_task("drafts", validation=200)
    sizes = {split: len(task.queries(split)) for split in task.splits}
    assert sizes == {"train": 9000, "validation": 200, "test": 800}
    assert len({tuple(sorted(parse_query(query.text))) for query in task.all_queries()}) == sum(sizes.values())


def test_answers_are_right_and_the_queries_can_be_written_again(tmp_path: Path) -> None:
    task = make_task("drafts")
    for split in (task.train, task.test):
        assert [query.id for query in split] == list(range(len(split)))
        assert all(query.columns == {"answer": str(sum(parse_query(query.text)))} for query in split)
        assert all(len(query.text) == 8 and min(parse_query(query.text)) >= 10 for query in split)
    assert [query.text for query in (*task.train[:2], task.test[0])] == ["63+42+43", "63+94+73", "77+18+68"]
    write_sums(tmp_path)
    for name in ("train.csv", "test.csv"):
        assert (tmp_path / name).read_bytes() == (QUERIES / name).read_bytes()


def test_working_is_a_sum_of_two_numbers_with_the_same_answer() -> None:
    assert format_working((48, 61, 35)) == "109+035"
    for query in make_task("drafts").test[:50]:
        working = format_working(parse_query(query.text))
        assert sum(map(int, working.split("+"))) == sum(parse_query(query.text))
        assert is_working(working) and not is_working(str(query.columns["answer"])) and not is_working(query.text)


def test_only_the_exact_answer_is_rewarded() -> None:
    completions = ["144", " 144\n", "109+035", "109+035=144", "134", "", "0144"]
    assert whole_is_right(completions, ["144"] * len(completions)) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_the_observer_sees_the_draft_between_query_and_equals_sign() -> None:
    task = make_task("drafts")
    query = Query(0, "48+61+35", {"answer": "144"})
    assert task.prompt(query) == "48+61+35="
    assert task.observer_prompt(query, [" 109+035"]) == "48+61+35~109+035="
    assert task.observer_prompt(query, ["109+035", "134"]) == "48+61+35~109+035~134="
    custom = make_task("drafts", observer_prompt="{query}!{reference}=")
    assert custom.observer_prompt(query, ["109+035", "134"]) == "48+61+35!109+035~134="


def test_the_task_is_valid() -> None:
    report = validate(make_task("drafts"), tokenizer(), max_prompt_tokens=None)
    assert report.ok and not report.warnings
