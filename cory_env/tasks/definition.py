"""What a task is made of: its definition, and the settings of a run that change it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cory_env.tasks.readers import DataError
from cory_env.tasks.rows import QUERY, QUERY_COLUMN, Source, columns_of, hold_out, parse_source, read_queries
from cory_env.tasks.task import GradedTask, Query, Task, placeholders

Operations = Literal["sums", "differences", "both"]
Drawn = tuple[str, list[Query], list[Query]]


@dataclass(frozen=True)
class TaskSettings:
    """The settings of a run that make its task; what is left at None keeps the task's own.

    Attributes:
        task: One of `cory_env.tasks.TASKS`, or `module:function`, which returns a `Task` and is called with those of
            `data`, `eval_data`, `reward`, `prompt` and `observer_prompt` that it names.
        data: The training queries: a file or a hub data set (see `cory_env.tasks.rows`).
        eval_data: The held-out queries. Without it, every tenth row of `data` is held out.
        reward: The reward function as `module:function`.
        prompt: Template of the pioneer's prompt, with `{query}` and any column of the data.
        observer_prompt: Template of the later agents' prompts, with `{query}`, `{reference}` and any column.
        min_query_tokens: With `max_query_tokens`: each query's length is drawn from these two; by default all get
        `max_query_tokens`.
        max_query_tokens: Cut queries to their first tokens, at most so many; None leaves them whole.
        digits: For `arithmetic`: digits of each number.
        operations: For `arithmetic`: what is asked.
        validation: So many of the held-out queries, but at most half, are the split by which training chooses: the
            first ones, or if they are rows of `data` every second one. With 0 all are `test`, and choose too.

    Raises:
        ValueError: A setting conflicts with another, or belongs to another task.
    """

    task: str
    data: Source | None = None
    eval_data: Source | None = None
    reward: str | None = None
    prompt: str | None = None
    observer_prompt: str | None = None
    min_query_tokens: int | None = None
    max_query_tokens: int | None = None
    digits: int | None = None
    operations: Operations | None = None
    validation: int = 0

    def __post_init__(self) -> None:
        for setting in ("digits", "operations"):
            value = getattr(self, setting)
            if value is not None and (self.task != "arithmetic" or self.data is not None):
                raise ValueError(
                    f"{setting}={value} belongs to the task arithmetic, which draws its queries, but task is "
                    f"{self.task} and data {self.data}. Leave it out, or set task=arithmetic without data."
                )
        if self.min_query_tokens is not None and (
            self.max_query_tokens is None or self.min_query_tokens > self.max_query_tokens
        ):
            raise ValueError(
                f"min_query_tokens={self.min_query_tokens}, but max_query_tokens={self.max_query_tokens}. Set "
                f"max_query_tokens to {self.min_query_tokens} or "
                "more."
            )


def unchanged(query: Query) -> Query:
    """Returns a row that needs no conversion."""
    return query


@dataclass(frozen=True)
class Form:
    """A form in which data is published, recognized by its columns.

    Attributes:
        query: The column that holds the query.
        needs: The columns that every row needs besides, to be graded.
        convert: Makes a row one of the task's own; a `ValueError` says what is wrong with it.
    """

    query: str = QUERY
    needs: tuple[str, ...] = ()
    convert: Callable[[Query], Query] = unchanged


@dataclass(frozen=True, kw_only=True)
class TaskDefinition:
    """A task by name: what `make` needs beside a run's `TaskSettings`.

    Attributes:
        kind: The class of the task.
        prompt: The pioneer's prompt.
        observer_prompt: The later agents' prompt; None: the pioneer's, with the earlier responses on a line before it.
        reference_separator: What stands between two earlier responses, unless the user sets `observer_prompt`.
        keep_separator: Use it with the user's `observer_prompt` too: it belongs to the form of a response.
        reward: The reward; None: the user must name one.
        sources: The training queries and the held-out ones; None: the user must name data.
        draw: Draws queries instead: text to put before both prompts, training queries and held-out ones.
        data_hint: What data the user must name.
        forms: The forms of data that the task reads.
        convert_ungraded: Convert rows for a reward of the user's own too, if they have all of the form's columns.
        converted: Columns that conversion adds, so prompts may name them.
    """

    kind: type[Task] = Task
    prompt: str = "{query}"
    observer_prompt: str | None = None
    reference_separator: str = "\n"
    keep_separator: bool = False
    reward: str | None = None
    sources: tuple[Source | None, Source | None] = (None, None)
    draw: Callable[[TaskSettings], Drawn] | None = None
    data_hint: str = ""
    forms: tuple[Form, ...] = (Form(),)
    convert_ungraded: bool = False
    converted: frozenset[str] = frozenset()

    def make(self, settings: TaskSettings) -> Task:
        """Builds the task. It has gold answers unless the user sets a reward of another module than the task's own.

        Raises:
            ValueError: A setting is missing or out of range.
            DataError: The data cannot be used.
            TemplateError: A template lacks a placeholder or names one that cannot be filled.
        """
        name, reward = settings.task, settings.reward or self.reward
        train_source: Source | list[Query] | None
        test_source: Source | list[Query] | None
        examples, train_source, test_source = self.draw(settings) if self.draw else ("", *self.sources)
        if settings.data is not None:
            train_source, test_source = settings.data, None
        if settings.eval_data is not None:
            test_source = settings.eval_data
        if train_source is None:
            raise ValueError(f"The task {name} needs data: set data to {self.data_hint}.")
        if reward is None:
            raise ValueError(
                f"The task {name} needs a reward: set reward to module:function, such as my_rewards:length."
            )
        modules = {part.partition(":")[0] for part in re.split(r" [+*] ", reward)}  # of a weighted sum of functions
        graded = self.reward is not None and self.reward.partition(":")[0] in modules
        prompt = settings.prompt or examples + self.prompt
        own_form = settings.observer_prompt is not None and not self.keep_separator
        observer_prompt = settings.observer_prompt or (
            "Reference: {reference}\n" + prompt if self.observer_prompt is None else examples + self.observer_prompt
        )
        columns = placeholders(prompt) | placeholders(observer_prompt) - {"reference"}

        def read(source: Source | list[Query]) -> list[Query]:
            return source if isinstance(source, list) else self._read(source, columns, graded, name)

        train = read(train_source)
        train, test = hold_out(train, str(train_source)) if test_source is None else (train, read(test_source))
        return self.kind(
            name=name,
            train=train,
            test=test,
            reward=reward,
            prompt_template=prompt,
            observer_template=observer_prompt,
            reference_separator="\n" if own_form else self.reference_separator,
            # The sum of several functions may be 1 for a wrong answer, too.
            solved_at=1.0 if graded and " " not in reward and issubclass(self.kind, GradedTask) else None,
        )

    def _read(self, source: Source, columns: frozenset[str], graded: bool, name: str) -> list[Query]:
        """Reads a source in the form that its columns show, and converts its rows."""
        present = set(columns_of(source)) if len(self.forms) > 1 else set()
        named = QUERY_COLUMN in parse_source(source)[1]  # the source says itself which column is the query
        forms = [form for form in self.forms if named or form.query in present]
        whole = next((form for form in forms if present >= {*form.needs}), None)
        form = whole or next(iter(forms), self.forms[0])
        rows = read_queries(source, columns - self.converted | set(form.needs if graded else ()), form.query)
        if not graded and not (whole and self.convert_ungraded):
            return rows
        queries = []
        for row in rows:
            try:
                queries.append(form.convert(row))
            except ValueError as error:
                raise DataError(f"The data of task {name}, at {row.text[:60]!r}: {error}") from error
        return queries
