"""Tasks by name.

`make_task("imdb")` is the paper's sentiment task, `make_task("custom", data=..., reward=...)` a user's own file. To add
a task, write a `make` function like those two and list it in `TASKS`.
"""

from collections.abc import Callable
from difflib import SequenceMatcher

from cory_env.tasks import custom, imdb
from cory_env.tasks.rows import DataError, Path
from cory_env.tasks.task import Query, Split, Task
from cory_env.tasks.template import TemplateError

__all__ = ["TASKS", "DataError", "Query", "Split", "Task", "TemplateError", "make_task"]

TASKS: dict[str, Callable[..., Task]] = {"custom": custom.make, "imdb": imdb.make}


def make_task(
    name: str,
    *,
    data: Path | None = None,
    eval_data: Path | None = None,
    reward: str | None = None,
    prompt: str | None = None,
    observer_prompt: str | None = None,
) -> Task:
    """Builds the task called `name`; every setting left at None keeps the task's own.

    Args:
        name: One of `TASKS`.
        data: A file with the training queries (see `cory_env.tasks.rows` for the format).
        eval_data: A file with the held-out queries. Without it, every tenth row of `data` is held out.
        reward: The reward function as `module:function`.
        prompt: Template of the pioneer's prompt, with `{query}` and any column of the data.
        observer_prompt: Template of the later agents' prompts, with `{query}`, `{reference}` and any column.

    Raises:
        ValueError: No task has this name, or a setting that the task needs is missing.
        DataError: A data file cannot be used.
        TemplateError: A template lacks a placeholder or names one that cannot be filled.
    """
    if name not in TASKS:
        known = sorted(TASKS, key=lambda task: -SequenceMatcher(None, name, task).ratio())
        raise ValueError(
            f"There is no task {name!r}. The known tasks are: {', '.join(known)}. Set task to one of them."
        )
    return TASKS[name](data=data, eval_data=eval_data, reward=reward, prompt=prompt, observer_prompt=observer_prompt)
