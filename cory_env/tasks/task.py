"""Tasks: queries, the prompt of each position in the chain, a reward, and information for evaluation."""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Literal, get_args

from cory_env.message import Message

Split = Literal["train", "validation", "test"]

FEEDBACK_PLACEHOLDER = "feedback"
REFERENCE_ATTRIBUTES = ("response", "feedback")
"""Attributes of earlier roles in the prompts of roles."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""A memory address, which the default `repr` of an object contains."""


def _to_ordered(value: object) -> object:
    """Returns a value whose `repr` is the same in every process, unlike the `repr` of sets."""
    if isinstance(value, set | frozenset):
        return sorted(repr(_to_ordered(item)) for item in value)
    if isinstance(value, Mapping):
        return {key: _to_ordered(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_ordered(item) for item in value]
    return value


@dataclass(frozen=True)
class Query:
    """A query, the input of a chain.

    Attributes:
        id: The query's index in its split.
        text: The text; of a conversation, the last user message.
        columns: The row's other columns, available to the reward and to prompt templates.
        history: If the query is a conversation, the messages before `text`; otherwise None.
    """

    id: int
    text: str
    columns: dict[str, object] = field(default_factory=dict)
    history: tuple[Message, ...] | None = None

    @property
    def raw(self) -> str | list[Message]:
        """The query as rewards receive it: text, or the whole conversation."""
        return self.text if self.history is None else [*self.history, Message(role="user", content=self.text)]

    @property
    def checksum(self) -> int:
        """CRC-32 of the query and its columns, independent of the columns' order.

        Objects with the default `repr` count only with their type.
        """
        row = repr((_to_ordered(self.raw), sorted((name, _to_ordered(value)) for name, value in self.columns.items())))
        return zlib.crc32(_ADDRESS.sub("", row).encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, kw_only=True)
class Task:
    """Queries, prompts, reward and evaluation of a task. Subclasses override methods if templates are not enough.

    Attributes:
        name: The task's name in a configuration.
        train: Training queries, `train[i].id == i`.
        test: Held-out queries for reported metrics, `test[i].id == i`.
        validation: Held-out queries for decisions of training, such as the best checkpoint; None means `test`.
        reward: The reward function, `module:function` (see `cory_env.rewarding`).
        feedback: The feedback function, `module:function`; None if agents get no feedback. It has a reward's signature
            and returns, per response, a text for the agents that see the response, or None if nothing is to be
            corrected.
        solved_feedback: The text that agents see if the feedback is None.
        prompt_template: The pioneer's prompt, and every agent's without knowledge transfer. Requires `{query}`.
        observer_template: The prompt of every later agent. Requires `{query}` and `{reference}`. With `feedback`, it
            may contain `{feedback}`: the feedback on the last response that the agent sees.
        reference_separator: Template of the separator between earlier responses in `{reference}`, for three or more
            agents.
        solved_at: The minimum task reward of a correct completion, for pass@k; None if the task has no such threshold.
    """

    name: str
    train: Sequence[Query]
    test: Sequence[Query]
    reward: str
    prompt_template: str = "{query}"
    observer_template: str = "Reference: {reference}\n{query}"
    reference_separator: str = "\n"
    solved_at: float | None = None
    feedback: str | None = None
    solved_feedback: str = "Nothing to correct."
    validation: Sequence[Query] | None = None

    def __post_init__(self) -> None:
        for label, template, required in (
            ("prompt", self.prompt_template, {"query"}),
            ("observer_prompt", self.observer_template, {"query", "reference"}),
        ):
            missing = sorted(required - placeholders(template))
            if missing:
                raise TemplateError(
                    f"The template {label} of task {self.name} lacks {', '.join(f'{{{name}}}' for name in missing)}: "
                    f"{template!r}. Add the missing placeholders."
                )

    @property
    def shows_feedback(self) -> bool:
        """Whether the later agents' prompts contain feedback. Subclasses that build prompts in code override this."""
        return self.feedback is not None and FEEDBACK_PLACEHOLDER in placeholders(self.observer_template)

    def queries(self, split: Split) -> Sequence[Query]:
        """Returns the queries of one split."""
        if split not in get_args(Split):
            raise ValueError(f"Unknown split {split!r}. Use one of: {', '.join(get_args(Split))}.")
        if split == "validation":
            return self.test if self.validation is None else self.validation
        return self.train if split == "train" else self.test

    @property
    def splits(self) -> tuple[Split, ...]:
        """The task's disjoint splits."""
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
            TemplateError: The template uses a column that the query does not have.
        """
        return fill(self.prompt_template, {**query.columns, "query": query.text})

    def observer_prompt(self, query: Query, responses: Sequence[str], feedback: str | None = None) -> str:
        """Returns the prompt of an agent that sees earlier responses, as text.

        Args:
            query: The query.
            responses: The decoded responses, in the chain's order.
            feedback: The feedback on the last of them; None if the task has no feedback.

        Raises:
            TemplateError: The template uses a column that the query does not have.
        """
        values = {**query.columns, "query": query.text}
        reference = fill(self.reference_separator, values).join(map(self.quote, responses))
        if feedback is not None:
            values[FEEDBACK_PLACEHOLDER] = feedback
        return fill(self.observer_template, {**values, "reference": reference})

    def quote(self, response: str) -> str:
        """Returns the part of a response that later agents see: by default all of it."""
        return response

    def gold(self, query: Query) -> str | None:
        """Returns a completion whose reward must be 1.0 (`validate` checks this), or None if the task has none."""
        return None


@dataclass(frozen=True, kw_only=True)
class GradedTask(Task):
    """A task with a right answer to each query. Unless the user sets another reward, `solved_at` is 1.0."""

    def quote(self, response: str) -> str:
        """Returns a response without surrounding space, because the template has its own."""
        return response.strip()

    def gold(self, query: Query) -> str | None:
        """Returns the right answer, if there is one."""
        return None if self.solved_at is None else self.right_answer(query)

    def right_answer(self, query: Query) -> str | None:
        """Returns the right answer in a query's columns."""
        raise NotImplementedError


class TemplateError(ValueError):
    """A prompt template cannot be filled."""


def placeholders(template: str) -> frozenset[str]:
    """Returns the plain names in `template`. Literal braces are doubled: `{{` or `}}`.

    Raises:
        TemplateError: A brace is unbalanced, or a placeholder is more than a plain name, and not a reference to a role
            (`references`).
    """
    return frozenset(name for name in _parse_placeholders(template) if "." not in name)


def references(template: str) -> frozenset[tuple[str, str]]:
    """Returns the placeholders such as `{solver.response}` and `{solver.feedback}`, as pairs.

    Raises:
        TemplateError: See `placeholders`.
    """
    names = (name.partition(".") for name in _parse_placeholders(template) if "." in name)
    return frozenset((role, attribute) for role, _, attribute in names)


def _parse_placeholders(template: str) -> frozenset[str]:
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise TemplateError(
            f"The template {template!r} is not valid: {error}. Double literal braces: {{{{ or }}}}."
        ) from error
    names = {name for _, name, _, _ in parts if name is not None}
    for _, name, spec, conversion in parts:
        role, dot, attribute = (name or "").partition(".")
        is_valid = role.isidentifier() and (not dot or attribute in REFERENCE_ATTRIBUTES)
        if name is not None and (not is_valid or spec or conversion):
            raise TemplateError(
                f"The template {template!r} has the placeholder {name!r}, which is not a plain column name. "
                "Write {column} without an index, attribute or format, or {role.response} or {role.feedback}. Double "
                "literal braces: {{ or }}."
            )
    return frozenset(names)


def literals(template: str) -> list[str]:
    """Returns the texts of `template` around its placeholders."""
    return [text for text, *_ in Formatter().parse(template) if text]


def ending(template: str) -> str:
    """Returns the text of `template` after its last placeholder."""
    text = ""
    for literal, name, *_ in Formatter().parse(template):
        text = text + literal if name is None else ""
    return text


def fill(template: str, values: Mapping[str, object]) -> str:
    """Returns `template` with its placeholders replaced. Braces in the values stay unchanged.

    Raises:
        TemplateError: A placeholder has no value.
    """
    try:
        return template.format_map(values)
    except KeyError as error:
        raise TemplateError(
            f"The template {template!r} uses the column {error}, but this query's row has only "
            f"{', '.join(sorted(values))}. Correct the template or add the column to the data."
        ) from error
