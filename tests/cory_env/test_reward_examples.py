"""Rewards that do not distinguish answers are found without a model, and so are rewards that misread messages."""

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cory_env.message import MESSAGES_RULE
from cory_env.rewarding.examples import example_answers
from cory_env.rewarding.worker import RewardError, RewardWorker
from cory_env.tasks import Query, Task
from cory_env.tokenizer import load_tokenizer
from launch.training.validation import ValidationReport
from tests.cory_env.sample_tasks import validate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REWARDS = "tests.cory_env.sample_rewards"
SOUND = "The task is sound."


@pytest.fixture(scope="module")
def tokenizer() -> "PreTrainedTokenizerBase":
    tokenizer = load_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    return tokenizer


def words(reward: str, *, messages: bool) -> Task:
    """A task whose answers must contain the word in a column."""
    queries = []
    for number, word in enumerate(("cat", "dog", "goldfish")):
        text = f"Write about a {word}{'!' * number}"
        queries.append(Query(number, text, {"word": word}, () if messages else None))
    return Task(name="words", train=queries[:2], test=[replace(queries[2], id=0)], reward=reward)


def check(reward: str, tokenizer: "PreTrainedTokenizerBase", *, messages: bool = False) -> ValidationReport:
    return validate(words(f"{REWARDS}:{reward}", messages=messages), tokenizer, chat=True, max_prompt_tokens=None)


@pytest.mark.parametrize(
    ("reward", "value"), [("fixed?value=-0.01", "-0.01,"), ("query_length", "the same for a query")]
)
def test_a_reward_that_no_answer_changes_is_a_warning_and_the_task_is_not_called_sound(
    reward: str, value: str, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    report = check(reward, tokenizer)
    assert report.ok
    (warning,) = report.warnings
    assert warning.startswith(f"The reward is {value}") and "among them an empty answer" in warning
    assert SOUND not in str(report) and "it did not distinguish the example answers" in str(report)


@pytest.mark.parametrize(
    ("reward", "messages"), [("has_word", False), ("has_word_in_message", True), ("length", False)]
)
def test_a_reward_that_distinguishes_answers_is_sound(
    reward: str, messages: bool, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    report = check(reward, tokenizer, messages=messages)
    assert not report.warnings and str(report).endswith(SOUND)


def test_the_reward_of_one_role_may_be_constant(tokenizer: "PreTrainedTokenizerBase") -> None:
    report = check("has_word", tokenizer)
    assert report.ok and not report.warnings
    by_role = check("observer_length", tokenizer)
    (warning,) = by_role.warnings
    assert warning.startswith("The reward of the pioneer is 0,") and SOUND not in str(by_role)


def test_a_constant_reward_of_conversations_is_told_the_form_of_messages(tokenizer: "PreTrainedTokenizerBase") -> None:
    report = check("has_word", tokenizer, messages=True)  # it reads messages as texts
    constant, rule = report.warnings
    assert constant.startswith("The reward is -0.01,") and SOUND not in str(report) and rule == MESSAGES_RULE


def test_one_function_of_a_sum_that_misreads_messages_is_named(tokenizer: "PreTrainedTokenizerBase") -> None:
    report = check(f"has_word + {REWARDS}:token_count", tokenizer, messages=True)
    (warning,) = report.warnings  # the sum varies
    assert warning == f"The reward has_word is the same for all example answers to a query. {MESSAGES_RULE}"
    assert SOUND not in str(report)
    texts = check(f"fixed + {REWARDS}:length", tokenizer)
    sound = check(f"has_word_in_message + {REWARDS}:token_count", tokenizer, messages=True)
    assert not texts.warnings and not sound.warnings


def test_a_reward_that_fails_on_messages_is_told_their_form(tokenizer: "PreTrainedTokenizerBase") -> None:
    (problem,) = check("has_lower_word", tokenizer, messages=True).problems
    assert "'list' object has no attribute 'lower'" in problem and MESSAGES_RULE in problem
    with RewardWorker(f"{REWARDS}:has_lower_word") as worker, pytest.raises(RewardError) as raised:
        worker.rewards(["query"], ["cat"], {"word": [["cat"]]})  # an unrelated list, and a text as completion
    assert MESSAGES_RULE not in str(raised.value)


def test_example_answers_have_the_texts_of_all_columns_also_nested_ones() -> None:
    query = Query(0, "Q", {"word": "cat", "number": 4, "tags": ["a", {"b": "c"}], "none": None})
    task = Task(name="q", train=[query], test=[query], reward=f"{REWARDS}:length")
    texts = [text for _, text in example_answers(task, [query])]
    assert {"", "Q", "cat", "4", "a c", "cat 4 a c"} <= {*texts} and len(texts) == len({*texts})
