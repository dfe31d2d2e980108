"""Tasks by name.

`make_task("imdb")` and `make_task("gsm8k")` are the paper's tasks, `make_task("arithmetic")` is an easy one that needs
no data, `make_task("drafts")` one in which an earlier answer matters, `make_task("code")` asks for programs,
`make_task("math", data=...)` for mathematics, and
`make_task("custom", data=..., reward=...)` is a user's own file. To add a task, write a `make` function like those: in
a package of your own its name, `make_task("my_package.riddles:make")`, is enough; one of this package is listed in
`TASKS`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from cory_env.message import Message
from cory_env.named import load_function
from cory_env.tasks import arithmetic, code, custom, drafts, gsm8k, imdb, mathematics
from cory_env.tasks.arithmetic import Operations
from cory_env.tasks.openings import cut_queries
from cory_env.tasks.readers import DataError
from cory_env.tasks.rows import Source, choose_validation
from cory_env.tasks.task import Query, Split, Task
from cory_env.tasks.template import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TASKS", "DataError", "Message", "Operations", "Query", "Split", "Task", "TemplateError", "make_task"]

TASKS: dict[str, Callable[..., Task]] = {
    "arithmetic": arithmetic.make,
    "code": code.make,
    "custom": custom.make,
    "drafts": drafts.make,
    "gsm8k": gsm8k.make,
    "imdb": imdb.make,
    "math": mathematics.make,
}


def make_task(
    name: str,
    *,
    data: Source | None = None,
    eval_data: Source | None = None,
    reward: str | None = None,
    prompt: str | None = None,
    observer_prompt: str | None = None,
    min_query: int | None = None,
    max_query: int | None = None,
    digits: int | None = None,
    operations: Operations | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    validation: int = 0,
) -> Task:
    """Builds the task called `name`; every setting left at None keeps the task's own.

    Args:
        name: One of `TASKS`, or `module:function`, which returns a `Task` and is called with those of `data`,
            `eval_data`, `reward`, `prompt` and `observer_prompt` that it names.
        data: The training queries: a file or a hub data set (see `cory_env.tasks.rows`).
        eval_data: The held-out queries. Without it, every tenth row of `data` is held out.
        reward: The reward function as `module:function`.
        prompt: Template of the pioneer's prompt, with `{query}` and any column of the data.
        observer_prompt: Template of the later agents' prompts, with `{query}`, `{reference}` and any column.
        min_query: With `max_query`: each query's length is drawn from these two; by default all get `max_query`.
        max_query: Cut queries to their first tokens, at most so many; None leaves them whole.
        digits: For `arithmetic`: digits of each number.
        operations: For `arithmetic`: what is asked.
        tokenizer: Whose tokens `max_query` counts.
        validation: So many of the held-out queries, but at most half, are the split by which training chooses: the
            first ones, or where they are rows of `data` every second one. With 0 all are `test`, and choose too.

    Raises:
        ValueError: No task has this name, or a setting is missing, out of range or belongs to another task. Of a
            function of one's own also what that raises.
        DataError: A data file cannot be used.
        TemplateError: A template lacks a placeholder or names one that cannot be filled.
    """
    if ":" not in name and name not in TASKS:
        known = sorted(TASKS, key=lambda task: -SequenceMatcher(None, name, task).ratio())
        raise ValueError(
            f"There is no task {name!r}. The known tasks are: {', '.join(known)}. Set task to one of them, or to "
            "module:function for a task of your own."
        )
    own = {"digits": digits, "operations": operations} if name == "arithmetic" else {}
    for setting, value in (("digits", digits), ("operations", operations)):
        if value is not None and not own:
            raise ValueError(
                f"{setting}={value} belongs to the task arithmetic, but task is {name}. Leave it out, or set "
                "task=arithmetic."
            )
    if min_query is not None and (max_query is None or min_query > max_query):
        raise ValueError(f"min_query={min_query}, but max_query={max_query}. Set max_query to {min_query} or more.")
    given: dict[str, object] = {"data": data, "eval_data": eval_data, "reward": reward, "prompt": prompt}
    given |= {"observer_prompt": observer_prompt, **own}
    task = TASKS[name](**given) if name in TASKS else _own_task(name, given)
    if max_query is not None:
        assert tokenizer is not None
        shortest = max_query if min_query is None else min_query
        train, test = (cut_queries(queries, tokenizer, shortest, max_query) for queries in (task.train, task.test))
        task = replace(task, train=train, test=test)
    if not validation or len(task.test) < 2:
        return task
    chosen, test = choose_validation(task.test, validation, alternately=data is not None and eval_data is None)
    return replace(task, validation=chosen, test=test)


def _own_task(name: str, given: Mapping[str, object]) -> Task:
    """Calls a user's function, `module:function`, for a task.

    Raises:
        SpecError: there is no such function.
        ValueError: it does not know a setting that is given, needs one that is not, or returns no task.
    """
    function = load_function(name, "task")
    try:
        signature = inspect.signature(function)
    except ValueError as error:  # of a partial, whose keywords come from the name
        raise ValueError(
            f"The function of the task {name} takes no such settings as stand after the question mark. Correct them."
        ) from error
    parameters = signature.parameters
    takes = parameters.keys() if all(each.kind != each.VAR_KEYWORD for each in parameters.values()) else given.keys()
    if strange := [setting for setting, value in given.items() if value is not None and setting not in takes]:
        raise ValueError(
            f"The task {name} takes no {' and no '.join(strange)}. Leave {'it' if len(strange) == 1 else 'them'} out, "
            "or let its function name what it takes."
        )
    handed = {setting: value for setting, value in given.items() if value is not None}
    try:
        signature.bind(**handed)
    except TypeError as error:
        raise ValueError(
            f"The task {name} cannot be made: {error}. Give its function what it needs: {', '.join(given)} as "
            f"settings, anything else as in {name.partition('?')[0]}?setting=value."
        ) from error
    task = function(**handed)
    if not isinstance(task, Task):
        raise ValueError(f"The task {name} is a {type(task).__name__}. Let the function return a cory_env.tasks.Task.")
    return task
