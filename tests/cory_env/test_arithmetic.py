"""The task arithmetic: queries, splits, prompts and settings."""

import json
from pathlib import Path

import pytest

from cory_env import cory_v0
from cory_env.rewards.answer import first_line_is_right
from cory_env.tasks import Query, make_task
from cory_env.tasks.arithmetic import draw_queries
from tests.cory_env.sample_tasks import LENGTH, response, tokenizer, validate


def numbers(query: Query) -> tuple[int, int]:
    first, _, second = query.text.split()
    return int(first), int(second)


@pytest.mark.parametrize("operations", ["sums", "differences", "both"])
@pytest.mark.parametrize("digits", [1, 2, 3, 9])
def test_examples_training_and_held_out_queries_share_no_pair_of_numbers(digits: int, operations: str) -> None:
    parts = draw_queries(digits, operations)
    pairs = [{frozenset(numbers(query)) for query in part} for part in parts]
    assert [len(pair_set) for pair_set in pairs] == [4, *((46, 5) if digits == 1 else (3597, 399))]
    assert len(set.union(*pairs)) == sum(map(len, pairs))
    times = 2 if operations == "both" else 1
    assert [len(part) for part in parts[1:]] == [times * len(pair_set) for pair_set in pairs[1:]]
    assert all(len(str(number)) == digits for part in parts for query in part for number in numbers(query))


def test_answers_are_right_and_differences_are_not_negative() -> None:
    for part in draw_queries(2, "both"):
        assert [query.id for query in part] == list(range(len(part)))
        for query in part:
            first, second = numbers(query)
            answer = first + second if "+" in query.text else first - second
            assert query.columns == {"answer": str(answer)} and answer >= 0


def test_sums_have_the_larger_number_first_half_of_the_time() -> None:
    _, train, _ = draw_queries(2, "sums")
    larger_first = sum(first > second for first, second in map(numbers, train))
    assert 0.45 < larger_first / len(train) < 0.55


def test_queries_are_deterministic() -> None:
    _, train, test = draw_queries(2, "both")
    assert [query.text for query in (*train[:3], test[0])] == ["58 + 59", "59 - 58", "93 + 17", "61 + 81"]
    assert draw_queries(2, "both")[1:] == (train, test)


def test_the_observer_sees_the_first_line_of_earlier_responses() -> None:
    task = make_task("arithmetic")
    *examples, last = task.prompt(Query(0, "12 + 34")).split("\n")
    assert last == "12 + 34 ="
    answers = [line.split(" = ")[1] for line in examples]
    assert len(examples) == 4
    later = task.observer_prompt(Query(0, "12 + 34"), [" 45 \n1 + 1 = 2\n", " 46"])
    assert later.split("\n") == [*examples, "Reference: 12 + 34 = 45", "Reference: 12 + 34 = 46", "12 + 34 ="]
    assert all("+" in line for line in make_task("arithmetic?operations=sums").prompt(Query(0, "x")).split("\n")[:4])
    sums = [str(sum(numbers(Query(0, line.split(" =")[0])))) for line in examples if "+" in line]
    assert len(sums) == 2 and set(sums) < set(answers)


def test_the_task_is_valid_and_wrong_answers_get_no_reward() -> None:
    report = validate(make_task("arithmetic?digits=1"), tokenizer(), max_prompt_tokens=None)
    assert report.ok and not report.warnings
    assert "train: 92 of 92 gold answers score 1.0" in report.facts
    assert any(fact.startswith("train: 0 of ") and "wrong answers" in fact for fact in report.facts)


def test_the_environment_runs_the_task() -> None:
    environment = cory_v0.env(task="arithmetic?digits=1&operations=sums", max_prompt_tokens=200)
    environment.reset(options={"query": 0})
    gold = str(environment.queries[0].columns["answer"])
    environment.step(response(f" {gold}\n"))
    environment.step(response(" 99"))
    assert [environment.infos[role]["task_reward"] for role in ("pioneer", "observer")] == [1.0, 0.0]
    environment.close()


def test_user_data_and_rewards_are_supported(tmp_path: Path) -> None:
    rows = [{"query": "2 + 2", "answer": 4}, {"query": "3 * 3", "answer": 9}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = make_task("arithmetic", data=data)
    assert [query.text for query in (*task.train, *task.test)] == ["2 + 2", "3 * 3"] and task.gold(task.train[0]) == "4"
    held_out = make_task("arithmetic", eval_data=data)
    assert len(held_out.test) == 2 and held_out.train == make_task("arithmetic").train
    assert first_line_is_right(["4", "9"], [4, 9]) == [1.0, 1.0]
    custom = make_task("arithmetic", reward=LENGTH)
    assert custom.gold(custom.train[0]) is None and custom.solved_at is None


def test_invalid_options_and_options_of_other_tasks_are_rejected() -> None:
    for digits in ("0", "10", "two"):
        with pytest.raises(ValueError, match=rf"digits is .*{digits}.*, but must be 1 to 9"):
            make_task(f"arithmetic?digits={digits}")
    with pytest.raises(ValueError, match="operations is 'products', but must be 'sums', 'differences' or 'both'"):
        make_task("arithmetic?operations=products")
    with pytest.raises(
        ValueError, match=r"Unknown option 'digit' in .*The task arithmetic has the options digits, operations"
    ):
        make_task("arithmetic?digit=1")
    for task in ("imdb", "drafts"):
        with pytest.raises(
            ValueError, match=f"Unknown option 'digits' in task={task}.digits=3. The task {task} has no options"
        ):
            make_task(f"{task}?digits=3")
    with pytest.raises(ValueError, match=r"Invalid task 'arithmetic\?digits': .*Write NAME\?option=value"):
        make_task("arithmetic?digits")
