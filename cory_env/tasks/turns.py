"""Responses and feedback as later agents see them, and the texts of these agents' prompts."""

from collections.abc import Callable, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Final, NamedTuple, Self

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
        feedback: The feedback on it as text; None if the prompt shows none.
        role: The role whose `{role.response}` it is; "" if a later response of that role takes its place.
        is_reference: Whether it belongs to `{reference}`.
        is_answer: Whether it is an answer to the query, of which the prompt shows only the task's `quote`.
        tokens: The token ids of the text.
        decode: Returns the text of the first ones.
        is_omitted: Whether no token is left, so that it is not in `{reference}`; its feedback may still be shown.
    """

    text: str
    feedback: str | None = None
    role: str = ""
    is_reference: bool = True
    is_answer: bool = True
    tokens: Sequence[int] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    is_omitted: bool = False

    @classmethod
    def decoded(
        cls,
        decode: Callable[[Sequence[int]], str],
        tokens: Sequence[int],
        feedback: str | None = None,
        role: str = "",
        is_reference: bool = True,
        is_answer: bool = True,
    ) -> Self:
        """Returns the response that consists of these tokens."""
        text = decode(tokens) if tokens else ""
        return cls(text, feedback, role, is_reference, is_answer, tokens, decode)

    def cut(self, characters: int, tokens: int) -> Self:
        """Returns the response with the first characters of its feedback and its first tokens; none if negative."""
        feedback = None if self.feedback is None else self.feedback[: max(characters, 0)]
        if tokens >= len(self.tokens) > 0:
            return self._replace(feedback=feedback)
        shown_tokens = self.tokens[: max(tokens, 0)]
        text = self.decode(shown_tokens) if self.decode is not None and shown_tokens else ""
        return self._replace(text=text, feedback=feedback, tokens=shown_tokens, is_omitted=not shown_tokens)


def prompt_text(task: Task, query: Query, responses: Sequence[SeenResponse], template: str | None) -> str:
    """Returns the prompt of an agent, with the feedback on the last response in `{reference}`.

    Tasks whose `observer_prompt` shows no feedback need not accept that argument.

    Args:
        responses: The earlier responses that the agent sees, in the chain's order.
        template: The template of the role's prompt; None: the task's.
    """
    references = [seen for seen in responses if seen.is_reference]
    feedback = references[-1].feedback if references else None
    reference = [seen.text for seen in references if not seen.is_omitted]
    if template is None and not responses:
        return task.prompt(query)
    if template is None:
        return task.observer_prompt(query, reference, *([] if feedback is None else [feedback]))
    values: dict[str, object] = {**query.columns, "query": query.text}
    separator = fill(task.reference_separator, values)
    roles: dict[str, list[SeenResponse]] = {}
    for seen in responses:
        roles.setdefault(seen.role, []).append(seen)
    for role, of_role in roles.items():
        values[role] = SimpleNamespace(
            response=separator.join(task.quote(seen.text) if seen.is_answer else seen.text.strip() for seen in of_role),
            feedback="\n".join(seen.feedback for seen in of_role if seen.feedback is not None),
        )
    values["reference"] = separator.join(map(task.quote, reference))
    values[FEEDBACK_PLACEHOLDER] = feedback or ""
    return fill(template, values)
