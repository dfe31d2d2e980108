"""A user's own task: a data file, two prompt templates and a Python reward."""

from cory_env.tasks.rows import Source, read_splits
from cory_env.tasks.task import Task
from cory_env.tasks.template import placeholders

PROMPT = "{query}"
REFERENCE = "Reference: {reference}\n"


def make(
    *,
    data: Source | None = None,
    eval_data: Source | None = None,
    reward: str | None = None,
    prompt: str | None = None,
    observer_prompt: str | None = None,
) -> Task:
    """Builds the task; see `cory_env.tasks.make_task` for the settings and errors.

    `data` and `reward` are required. The observer's prompt is, unless set, the pioneer's with the earlier response
    before it. With three agents or more, `{reference}` holds the earlier responses on a line each.
    """
    if data is None:
        raise ValueError("The task custom needs data: set data to a file with one row per query and a column 'query'.")
    if reward is None:
        raise ValueError("The task custom needs a reward: set reward to module:function, such as my_rewards:length.")
    prompt = prompt or PROMPT
    observer_prompt = observer_prompt or REFERENCE + prompt
    required = placeholders(prompt) | placeholders(observer_prompt) - {"reference"}
    train, test = read_splits(data, eval_data, required)
    return Task(
        name="custom",
        train=train,
        test=test,
        reward=reward,
        prompt_template=prompt,
        observer_template=observer_prompt,
    )
