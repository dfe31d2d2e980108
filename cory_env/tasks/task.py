"""What a task is: queries, the prompt of each position in the chain, a reward, and what evaluation needs to know."""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Literal, get_args

from cory_env.message import Message

Split = Literal["train", "validation", "test"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Where an object lies in memory, which its `repr` shows if its class defines none."""


def _in_order(value: object) -> object:
    """Returns a value whose `repr` is the same in every process, which that of a set is not."""
    if isinstance(value, set | frozenset):
        return sorted(repr(_in_order(each)) for each in value)
    if isinstance(value, Mapping):
        return {key: _in_order(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_in_order(each) for each in value]
    return value


@dataclass(frozen=True)
class Query:
    """One query: what the chain is asked.

    Attributes:
        id: Its index within its split.
        text: The query itself; of a conversation, what the user says last.
        columns: Everything else its row holds, passed to the reward and open to prompt templates.
        history: The messages before `text`, where its row is a conversation; None where it is plain text.
    """

    id: int
    text: str
    columns: dict[str, object] = field(default_factory=dict)
    history: tuple[Message, ...] | None = None

    @property
    def raw(self) -> str | list[Message]:
        """The query as its row holds it and as a reward receives it: text, or the whole conversation."""
        return self.text if self.history is None else [*self.history, Message(role="user", content=self.text)]

    @property
    def checksum(self) -> int:
        """CRC-32 of the query and its columns, whatever order these have; of an object that has no value to show, of
        its type.
        """
        row = repr((_in_order(self.raw), sorted((name, _in_order(value)) for name, value in self.columns.items())))
        return zlib.crc32(_ADDRESS.sub("", row).encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, kw_only=True)
class Task:
    """Queries, prompts, reward and evaluation of one task; subclasses override what a template cannot say.

    Attributes:
        name: The task's name in a configuration.
        train: Training queries, `train[i].id == i`.
        test: Held-out queries, on which figures are reported, `test[i].id == i`.
        validation: Held-out queries by which training chooses, such as its best checkpoint; None: those of `test`.
        reward: The reward function, `module:function` (see `cory_env.rewards`).
        prompt_template: The pioneer's prompt; the prompt of every agent without knowledge transfer. Needs `{query}`.
        observer_template: The prompt of every later agent. Needs `{query}` and `{reference}`.
        reference_separator: What stands between two earlier responses in `{reference}` (three agents or more); a
            template too.
        solved_at: The task reward from which a completion counts as correct in pass@k; None where there is no such.
    """

    name: str
    train: Sequence[Query]
    test: Sequence[Query]
    reward: str
    prompt_template: str = "{query}"
    observer_template: str = "Reference: {reference}\n{query}"
    reference_separator: str = "\n"
    solved_at: float | None = None
    validation: Sequence[Query] | None = None

    def __post_init__(self) -> None:
        for label, template, needed in (
            ("prompt", self.prompt_template, {"query"}),
            ("observer_prompt", self.observer_template, {"query", "reference"}),
        ):
            missing = sorted(needed - placeholders(template))
            if missing:
                raise TemplateError(
                    f"The template {label} of task {self.name} lacks {', '.join(f'{{{name}}}' for name in missing)}: "
                    f"{template!r}. Put each placeholder where its text belongs."
                )

    def queries(self, split: Split) -> Sequence[Query]:
        """Returns the queries of one split."""
        if split not in get_args(Split):
            raise ValueError(f"There is no split {split!r}. Choose one of: {', '.join(get_args(Split))}.")
        if split == "validation":
            return self.test if self.validation is None else self.validation
        return self.train if split == "train" else self.test

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that have no query in common."""
        return get_args(Split) if self.validation is not None else ("train", "test")

    def all_queries(self) -> Iterator[Query]:
        """Yields every query once."""
        for split in self.splits:
            yield from self.queries(split)

    @property
    def checksum(self) -> int:
        """CRC-32 of the queries of all splits, in their order."""
        return zlib.crc32(repr([query.checksum for query in self.all_queries()]).encode())

    def prompt(self, query: Query) -> str:
        """Returns the pioneer's prompt as text.

        Raises:
            TemplateError: The template names a column that the query has not.
        """
        return fill(self.prompt_template, {**query.columns, "query": query.text})

    def observer_prompt(self, query: Query, responses: Sequence[str]) -> str:
        """Returns the prompt of the agent that follows `responses`, the decoded ones so far in the chain's order.

        Raises:
            TemplateError: The template names a column that the query has not.
        """
        values = {**query.columns, "query": query.text}
        reference = fill(self.reference_separator, values).join(map(self.quote, responses))
        return fill(self.observer_template, {**values, "reference": reference})

    def quote(self, response: str) -> str:
        """Returns what later agents see of a response: all of it."""
        return response

    def gold(self, query: Query) -> str | None:
        """Returns a completion that must score 1.0 (`validate` checks it), or None where the task has none."""
        return None


@dataclass(frozen=True, kw_only=True)
class GradedTask(Task):
    """A task with a right answer to each query. Unless the user set another reward, it is solved at 1.0."""

    def quote(self, response: str) -> str:
        """Returns a response without the space around it, because the template has its own."""
        return response.strip()

    def gold(self, query: Query) -> str | None:
        """Returns the right answer, if there is one."""
        return None if self.solved_at is None else self.right_answer(query)

    def right_answer(self, query: Query) -> str | None:
        """Returns the answer that a query's columns hold."""
        raise NotImplementedError


class TemplateError(ValueError):
    """A prompt template cannot be filled."""


def placeholders(template: str) -> frozenset[str]:
    """Returns the names in `template`; a literal brace is written twice, `{{` or `}}`.

    Raises:
        TemplateError: A brace is unbalanced, or a placeholder is more than a plain name.
    """
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise TemplateError(
            f"The template {template!r} is not valid: {error}. Write a literal brace twice, {{{{ or }}}}."
        ) from error
    names = {name for _, name, _, _ in parts if name is not None}
    for _, name, spec, conversion in parts:
        if name is not None and (not name.isidentifier() or spec or conversion):
            raise TemplateError(
                f"The template {template!r} has the placeholder {name!r}, which is not a plain column name. "
                "Write {column} without an index, attribute or format; write a literal brace twice, {{ or }}."
            )
    return frozenset(names)


def literals(template: str) -> list[str]:
    """Returns the texts of `template` around its placeholders."""
    return [text for text, *_ in Formatter().parse(template) if text]


def fill(template: str, values: Mapping[str, object]) -> str:
    """Returns `template` with its placeholders replaced. Braces inside the values are left alone.

    Raises:
        TemplateError: A placeholder has no value.
    """
    try:
        return template.format_map(values)
    except KeyError as error:
        raise TemplateError(
            f"The template {template!r} asks for {error}, which this query's row does not have; it has "
            f"{', '.join(sorted(values))}. Correct the template or add the column to the data."
        ) from error
