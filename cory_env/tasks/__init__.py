"""Tasks by name.

- `make_task("imdb")` and `make_task("gsm8k")`: the paper's tasks
- `make_task("arithmetic")`: an easy task without data; `make_task("arithmetic?digits=1&operations=sums")`: easier
- `make_task("drafts")`: a task in which an earlier response matters
- `make_task("sudoku")`: a task in which feedback on an earlier response matters
- `make_task("code")`: writing programs
- `make_task("math", data=...)`: mathematical problems
- `make_task("custom", data=..., reward=...)`: a user's data and reward
- `make_task("my_package.riddles:make")`: a user's function that returns a `Task`

The tasks of this package are `TaskDefinition`s in `TASKS`.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cory_env.functions import load_function, split_settings
from cory_env.message import SURROGATE_PROBLEM, Message, has_surrogate
from cory_env.tasks.arithmetic import ARITHMETIC
from cory_env.tasks.code import CODE
from cory_env.tasks.definition import TaskDefinition, TaskSettings, choose_feedback
from cory_env.tasks.drafts import DRAFTS
from cory_env.tasks.mathematics import MATHEMATICS
from cory_env.tasks.numbers import GSM8K
from cory_env.tasks.readers import DataError
from cory_env.tasks.reasoning_gym import REASONING_GYM
from cory_env.tasks.rows import choose_validation, truncate_queries
from cory_env.tasks.sudoku import SUDOKU
from cory_env.tasks.task import Query, Split, Task, TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "TASKS",
    "DataError",
    "Message",
    "Query",
    "Split",
    "Task",
    "TaskSettings",
    "TemplateError",
    "make_task",
    "tasks_reused",
]

_REVIEWS = Path(__file__).parents[1] / "assets" / "imdb-queries"
IMDB = TaskDefinition(
    # Continue the opening words of a film review so that it sounds positive (paper §4): the reward is the raw logit of
    # "positive" of a sentiment classifier on query + response.
    observer_prompt='I can make this sentence "{query}{reference}" more positive: {query}',
    # Three agents or more, ours: I can make this sentence "…" and this sentence "…" more positive: …
    reference_separator='" and this sentence "{query}',
    reward="cory_env.rewards.sentiment:positive_logit",
    sources=(_REVIEWS / "train.jsonl", _REVIEWS / "test.jsonl"),
)
CUSTOM = TaskDefinition(data_hint="a file with one row per query and a column 'query'")

TASKS = {
    "arithmetic": ARITHMETIC,
    "code": CODE,
    "custom": CUSTOM,
    "drafts": DRAFTS,
    "gsm8k": GSM8K,
    "imdb": IMDB,
    "math": MATHEMATICS,
    "reasoning_gym": REASONING_GYM,
    "sudoku": SUDOKU,
}
_built_tasks: ContextVar[list[tuple[TaskSettings, Task]] | None] = ContextVar("built_tasks", default=None)
"""The tasks that `tasks_reused` has built, with their settings."""


def make_task(task: str | TaskSettings, *, tokenizer: "PreTrainedTokenizerBase | None" = None, **settings: Any) -> Task:
    """Builds a task.

    Args:
        task: The task's settings, or its name.
        tokenizer: The tokenizer that `max_query_tokens` refers to.
        **settings: The other `TaskSettings` if `task` is a name.

    Raises:
        ValueError: The task is unknown, or a setting is missing, out of range or belongs to another task. Errors of a
            user's function are raised unchanged.
        DataError: A data file cannot be used.
        TemplateError: A template lacks a placeholder or has one that cannot be filled.
    """
    s = TaskSettings(task, **settings) if isinstance(task, str) else task
    built_tasks = _built_tasks.get()
    for built_settings, built in built_tasks or ():
        if s == built_settings and s.max_query_tokens is None:
            return built
    built = _build(s, tokenizer)
    if built_tasks is not None:
        built_tasks.append((s, built))
    return built


@contextmanager
def tasks_reused() -> Iterator[None]:
    """Builds tasks that have the same settings once, unless they depend on a tokenizer. Also a decorator."""
    token = _built_tasks.set([])
    try:
        yield
    finally:
        _built_tasks.reset(token)


def _build(s: TaskSettings, tokenizer: "PreTrainedTokenizerBase | None") -> Task:
    try:
        name, _ = split_settings(s.task)
    except ValueError as error:
        raise ValueError(f"Invalid task {s.task!r}: {error}. Write NAME?option=value.") from error
    if ":" in name:
        built = _call_task_function(s)
    elif name in TASKS:
        built = TASKS[name].make(s)
    else:
        raise ValueError(
            f"Unknown task {name!r}. Set task to one of {', '.join(TASKS)}, or to module:function for your own task."
        )
    if s.max_query_tokens is not None:
        assert tokenizer is not None
        min_tokens = s.max_query_tokens if s.min_query_tokens is None else s.min_query_tokens
        train, test = (
            truncate_queries(queries, tokenizer, min_tokens, s.max_query_tokens)
            for queries in (built.train, built.test)
        )
        built = replace(built, train=train, test=test)
    if not s.validation or len(built.test) < 2:
        return built
    validation, test = choose_validation(built.test, s.validation, s.data is not None and s.eval_data is None)
    return replace(built, validation=validation, test=test)


def _call_task_function(settings: TaskSettings) -> Task:
    """Makes a task by calling a user's function, `module:function`.

    Raises:
        SpecError: The function cannot be loaded.
        ValueError: The function does not accept a setting, requires a missing one, or does not return a `Task`.
    """
    name, names = settings.task, ("data", "eval_data", "reward", "prompt", "observer_prompt")
    values = {setting: value for setting in names if (value := getattr(settings, setting)) is not None}
    function = load_function(name, "task")
    try:
        inspect.signature(function).bind(**values)
    except (TypeError, ValueError) as error:  # ValueError: the function does not accept a setting in the name
        raise ValueError(
            f"The task {name} cannot be made: {error}. Its function gets the settings {', '.join(names)} if they are "
            f"set, and the settings in its name, {name.partition('?')[0]}?setting=value."
        ) from error
    task = function(**values)
    if not isinstance(task, Task):
        raise ValueError(f"The task function {name} returned a {type(task).__name__}, not a cory_env.tasks.Task.")
    for query in task.all_queries():
        if has_surrogate([query.text, query.history, query.columns]):
            raise DataError(f"Query {query.id} of task {name} {SURROGATE_PROBLEM}: {query.text!r:.100}. Correct it.")
    return replace(task, feedback=choose_feedback(settings, task.feedback))
