"""Tasks by name.

`make_task("imdb")` and `make_task("gsm8k")` are the paper's tasks, `make_task("arithmetic")` is an easy one that needs
no data, `make_task("drafts")` one in which an earlier answer matters, `make_task("code")` asks for programs,
`make_task("math", data=...)` for mathematics, and `make_task("custom", data=..., reward=...)` is a user's own file. A
task of this package is a `TaskDefinition` in `TASKS`; one of your own is a function that returns a `Task`, named
`make_task("my_package.riddles:make")`.
"""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cory_env.functions import load_function
from cory_env.message import Message
from cory_env.tasks.arithmetic import ARITHMETIC
from cory_env.tasks.code import CODE
from cory_env.tasks.definition import Operations, TaskDefinition, TaskSettings
from cory_env.tasks.drafts import DRAFTS
from cory_env.tasks.mathematics import MATHEMATICS
from cory_env.tasks.numbers import GSM8K
from cory_env.tasks.readers import DataError
from cory_env.tasks.rows import choose_validation, cut_queries
from cory_env.tasks.task import Query, Split, Task, TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "TASKS",
    "DataError",
    "Message",
    "Operations",
    "Query",
    "Split",
    "Task",
    "TaskSettings",
    "TemplateError",
    "make_task",
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
}


def make_task(task: str | TaskSettings, *, tokenizer: "PreTrainedTokenizerBase | None" = None, **settings: Any) -> Task:
    """Builds a task.

    Args:
        task: Its settings, or its name.
        tokenizer: Whose tokens `max_query_tokens` counts.
        **settings: With a name, the other `TaskSettings`.

    Raises:
        ValueError: No task has this name, or a setting is missing, out of range or belongs to another task. Of a
            function of one's own also what that raises.
        DataError: A data file cannot be used.
        TemplateError: A template lacks a placeholder or names one that cannot be filled.
    """
    s = TaskSettings(task, **settings) if isinstance(task, str) else task
    if ":" in s.task:
        made = _own_task(s)
    elif s.task in TASKS:
        made = TASKS[s.task].make(s)
    else:
        raise ValueError(
            f"There is no task {s.task!r}. The known tasks are: {', '.join(TASKS)}. Set task to one of them, or to "
            "module:function for a task of your own."
        )
    if s.max_query_tokens is not None:
        assert tokenizer is not None
        shortest = s.max_query_tokens if s.min_query_tokens is None else s.min_query_tokens
        train, test = (
            cut_queries(queries, tokenizer, shortest, s.max_query_tokens) for queries in (made.train, made.test)
        )
        made = replace(made, train=train, test=test)
    if not s.validation or len(made.test) < 2:
        return made
    validation, test = choose_validation(made.test, s.validation, s.data is not None and s.eval_data is None)
    return replace(made, validation=validation, test=test)


def _own_task(settings: TaskSettings) -> Task:
    """Calls a user's function, `module:function`, for a task.

    Raises:
        SpecError: There is no such function.
        ValueError: It does not know a setting that is given, needs one that is not, or returns no task.
    """
    name, offered = settings.task, ("data", "eval_data", "reward", "prompt", "observer_prompt")
    values = {setting: value for setting in offered if (value := getattr(settings, setting)) is not None}
    function = load_function(name, "task")
    try:
        inspect.signature(function).bind(**values)
    except (TypeError, ValueError) as error:  # ValueError: a setting in the name that the function does not take
        raise ValueError(
            f"The task {name} cannot be made: {error}. Its function is called with those of the settings "
            f"{', '.join(offered)} that are set, and with what stands in {name.partition('?')[0]}?setting=value."
        ) from error
    task = function(**values)
    if not isinstance(task, Task):
        raise ValueError(f"The task {name} is a {type(task).__name__}. Let the function return a cory_env.tasks.Task.")
    return task
