"""Turns of agents that see earlier responses and feedback on them, and the texts of their prompts."""

from collections.abc import Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Final, NamedTuple

from cory_env.tasks.task import FEEDBACK_PLACEHOLDER, Query, Task, fill


class NoFeedback(Enum):
    """Why there is no feedback on a response."""

    SKIPPED = "skipped"
    NO_ANSWER = "no answer"


SKIPPED: Final = NoFeedback.SKIPPED
"""Stands for the feedback on a response on which the function failed, if such failures are skipped."""
NO_ANSWER: Final = NoFeedback.NO_ANSWER
"""Stands for the feedback on a response that is not an answer to the query, such as a critic's."""
Feedback = str | NoFeedback | None
"""Feedback on a response: a text for the agents that see the response, or None if nothing is to be corrected."""


class SeenResponse(NamedTuple):
    """An earlier response as a later agent sees it.

    Attributes:
        text: Its text.
        feedback: The feedback on it as text; None if there is none.
        role: The role whose `{role.response}` it is; "" if a later response of that role takes its place.
        is_reference: Whether it belongs to `{reference}`.
        is_answer: Whether it is an answer to the query, of which the prompt shows only the task's `quote`.
    """

    text: str
    feedback: str | None = None
    role: str = ""
    is_reference: bool = True
    is_answer: bool = True


class Turn(NamedTuple):
    """The turn of an agent that sees earlier responses.

    Attributes:
        query: The query.
        responses: The earlier responses that it sees, in the chain's order.
        feedback: The feedback on the last one in `{reference}`; None if the prompt shows none.
        template: The template of the role's prompt; None: the task's.
    """

    query: Query
    responses: Sequence[SeenResponse]
    feedback: str | None = None
    template: str | None = None

    @property
    def reference(self) -> list[str]:
        """The responses in `{reference}`."""
        return [seen.text for seen in self.responses if seen.is_reference]


def prompt_text(task: Task, turn: Turn) -> str:
    """Returns the prompt of an agent that sees earlier responses.

    Tasks whose `observer_prompt` shows no feedback need not accept that argument.

    Raises:
        TemplateError: A template cannot be filled.
    """
    if turn.template is None:
        feedback = () if turn.feedback is None else (turn.feedback,)
        return task.observer_prompt(turn.query, turn.reference, *feedback)
    values: dict[str, object] = {**turn.query.columns, "query": turn.query.text}
    separator = fill(task.reference_separator, values)
    roles: dict[str, list[SeenResponse]] = {}
    for seen in turn.responses:
        roles.setdefault(seen.role, []).append(seen)
    for role, responses in roles.items():
        values[role] = SimpleNamespace(
            response=separator.join(
                task.quote(seen.text) if seen.is_answer else seen.text.strip() for seen in responses
            ),
            feedback="\n".join(seen.feedback for seen in responses if seen.feedback is not None),
        )
    values["reference"] = separator.join(map(task.quote, turn.reference))
    values[FEEDBACK_PLACEHOLDER] = turn.feedback or ""
    return fill(turn.template, values)
