"""Definitions of tasks, and the run settings that change them."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

from cory_env.functions import parse_spec, split_settings
from cory_env.tasks.readers import DataError
from cory_env.tasks.rows import QUERY, QUERY_COLUMN, Source, hold_out, parse_source, read_columns, read_queries
from cory_env.tasks.task import FEEDBACK_PLACEHOLDER, GradedTask, Query, Task, placeholders

OWN_FEEDBACK = "task"
"""The setting `feedback` for the task's own function."""
DrawnQueries = tuple[str, list[Query], list[Query]]


@dataclass(frozen=True)
class TaskSettings:
    """The run settings that determine its task. None keeps the task's default.

    Attributes:
        task: One of `cory_env.tasks.TASKS`, with its options if it has any (`arithmetic?digits=1`), or
            `module:function`. The function returns a `Task` and gets `data`, `eval_data`, `reward`, `prompt` and
            `observer_prompt` if they are set.
        data: The training queries: a file or a hub data set (see `cory_env.tasks.rows`).
        eval_data: The held-out queries. By default, rows of `data` are held out (`cory_env.tasks.rows.hold_out`).
        reward: The reward function as `module:function`.
        prompt: Template of the pioneer's prompt, with `{query}` and any column of the data.
        observer_prompt: Template of the later agents' prompts, with `{query}`, `{reference}`, with feedback
            `{feedback}`, and any column.
        feedback: The feedback function: `module:function`, or `task` for the task's own. None: no feedback.
        min_query_tokens: Lower bound of each query's random length; by default `max_query_tokens`.
        max_query_tokens: Truncate queries to at most this many tokens; None disables truncation.
        role_prompts: Templates of the roles' own prompts, whose columns the data must have.
        validation: Number of held-out queries (at most half) in the split `validation`: the first ones, or every
            second one if they are rows of `data`. With 0, `test` contains all and serves as `validation` too.

    Raises:
        ValueError: A setting conflicts with another.
    """

    task: str
    data: Source | None = None
    eval_data: Source | None = None
    reward: str | None = None
    prompt: str | None = None
    observer_prompt: str | None = None
    feedback: str | None = None
    min_query_tokens: int | None = None
    max_query_tokens: int | None = None
    role_prompts: tuple[str, ...] = ()
    validation: int = 0

    def __post_init__(self) -> None:
        if self.min_query_tokens is not None and (
            self.max_query_tokens is None or self.min_query_tokens > self.max_query_tokens
        ):
            raise ValueError(
                f"min_query_tokens={self.min_query_tokens} conflicts with max_query_tokens={self.max_query_tokens}. "
                f"Set max_query_tokens to {self.min_query_tokens} or more."
            )


def choose_feedback(settings: TaskSettings, own_function: str | None) -> str | None:
    """Returns the feedback function of a run.

    Args:
        settings: Of the run.
        own_function: The task's own function.

    Raises:
        ValueError: The task has no function of its own, but `feedback` is `task`.
        SpecError: The function's name is malformed.
    """
    if settings.feedback is None:
        return None
    if settings.feedback != OWN_FEEDBACK:
        parse_spec(settings.feedback, "feedback")
        return settings.feedback
    if own_function is None:
        raise ValueError(
            f"feedback=task requires a task with its own feedback function, but {settings.task} has none. Set "
            "feedback=module:function."
        )
    return own_function


def unchanged(query: Query) -> Query:
    """Returns the query unchanged."""
    return query


@dataclass(frozen=True)
class DataFormat:
    """A format of published data, recognized by its columns.

    Attributes:
        query: The column of the query.
        required: The other columns that the task's reward requires in every row.
        convert: Converts a row to the task's format; raises `ValueError` if the row is invalid.
    """

    query: str = QUERY
    required: tuple[str, ...] = ()
    convert: Callable[[Query], Query] = unchanged


@dataclass(frozen=True, kw_only=True)
class TaskDefinition:
    """A named task, without a run's `TaskSettings`.

    Attributes:
        kind: The class of the task.
        prompt: The pioneer's prompt.
        observer_prompt: The later agents' prompt. None: the pioneer's prompt after a line with the earlier responses.
        feedback_prompt: The later agents' prompt if the run has feedback, with `{feedback}`. None: `observer_prompt`
            after a line with the feedback.
        feedback: The task's own feedback function; None if it has none.
        solved_feedback: The text that agents see if the feedback is None.
        reference_separator: Separator of earlier responses, unless the user sets `observer_prompt`.
        keep_separator: Use `reference_separator` with the user's `observer_prompt` too.
        reward: The reward; None if the user must set one.
        sources: The training queries and the held-out ones; None if the user must set data.
        draw: Generates queries instead: returns text to put before both prompts, training queries and held-out ones.
            Its parameters are the options of the task, as text.
        data_hint: Description of the data that the user must set, for messages.
        formats: The data formats that the task reads.
        convert_ungraded: Convert rows also for a user's reward if they have all columns of the format.
        added_columns: Columns that the conversion adds; prompts may use them.
    """

    kind: type[Task] = Task
    prompt: str = "{query}"
    observer_prompt: str | None = None
    feedback_prompt: str | None = None
    reference_separator: str = "\n"
    keep_separator: bool = False
    reward: str | None = None
    feedback: str | None = None
    solved_feedback: str = Task.solved_feedback
    sources: tuple[Source | None, Source | None] = (None, None)
    draw: Callable[..., DrawnQueries] | None = None
    data_hint: str = ""
    formats: tuple[DataFormat, ...] = (DataFormat(),)
    convert_ungraded: bool = False
    added_columns: frozenset[str] = frozenset()

    def make(self, settings: TaskSettings) -> Task:
        """Builds the task. It has gold answers unless the user sets a reward from another module.

        Raises:
            ValueError: A setting is missing or out of range.
            DataError: The data cannot be used.
            TemplateError: A template lacks a placeholder or has one that cannot be filled.
        """
        name, options = split_settings(settings.task)
        known = inspect.signature(self.draw).parameters if self.draw else ()
        if unknown := [option for option in options if option not in known]:
            has = f"the options {', '.join(known)}" if known else "no options"
            raise ValueError(f"Unknown option {unknown[0]!r} in task={settings.task}. The task {name} has {has}.")
        reward = settings.reward or self.reward
        feedback = choose_feedback(settings, self.feedback)
        train_source: Source | list[Query] | None
        test_source: Source | list[Query] | None
        examples, train_source, test_source = self.draw(**options) if self.draw else ("", *self.sources)
        if settings.data is not None:
            train_source, test_source = settings.data, None
        if settings.eval_data is not None:
            test_source = settings.eval_data
        if train_source is None:
            raise ValueError(f"The task {name} requires data. Set data to {self.data_hint}.")
        if reward is None:
            raise ValueError(
                f"The task {name} requires a reward. Set reward to module:function, such as my_rewards:length."
            )
        modules = {part.partition(":")[0] for part in re.split(r" [+*] ", reward)}  # a reward may be a weighted sum
        graded = self.reward is not None and self.reward.partition(":")[0] in modules
        prompt = settings.prompt or examples + self.prompt
        user_template = settings.observer_prompt is not None and not self.keep_separator
        observer_prompt = settings.observer_prompt or self._observer_prompt(prompt, examples, feedback is not None)
        later_columns = frozenset().union(*map(placeholders, (observer_prompt, *settings.role_prompts)))
        columns = placeholders(prompt) | later_columns - {"reference", FEEDBACK_PLACEHOLDER}

        def read(source: Source | list[Query]) -> list[Query]:
            return source if isinstance(source, list) else self._read(source, columns, graded, name)

        train = read(train_source)
        train, test = hold_out(train, str(train_source)) if test_source is None else (train, read(test_source))
        return self.kind(
            name=name,
            train=train,
            test=test,
            reward=reward,
            feedback=feedback,
            solved_feedback=self.solved_feedback,
            prompt_template=prompt,
            observer_template=observer_prompt,
            reference_separator="\n" if user_template else self.reference_separator,
            # A sum of several functions may be 1 for a wrong answer too.
            solved_at=1.0
            if graded and not re.search(r" [+*] ", reward) and issubclass(self.kind, GradedTask)
            else None,
        )

    def _observer_prompt(self, prompt: str, examples: str, has_feedback: bool) -> str:
        """Returns the template of the later agents' prompts for runs that do not set one."""
        if has_feedback and self.feedback_prompt is not None:
            return examples + self.feedback_prompt
        feedback = "Feedback: {feedback}\n" if has_feedback else ""
        if self.observer_prompt is None:
            return f"Reference: {{reference}}\n{feedback}{prompt}"
        return examples + feedback + self.observer_prompt

    def _read(self, source: Source, columns: frozenset[str], graded: bool, name: str) -> list[Query]:
        """Reads a source in the format that its columns indicate, and converts its rows."""
        present = set(read_columns(source)) if len(self.formats) > 1 else set()
        has_query_column = QUERY_COLUMN in parse_source(source)[1]  # the source names the query's column
        candidates = [fmt for fmt in self.formats if has_query_column or fmt.query in present]
        complete = next((fmt for fmt in candidates if present >= {*fmt.required}), None)
        fmt = complete or next(iter(candidates), self.formats[0])
        rows = read_queries(source, columns - self.added_columns | set(fmt.required if graded else ()), fmt.query)
        if not graded and not (complete and self.convert_ungraded):
            return rows
        queries = []
        for row in rows:
            try:
                queries.append(fmt.convert(row))
            except ValueError as error:
                raise DataError(f"Invalid data of task {name}, query {row.text[:60]!r}: {error}") from error
        return queries
