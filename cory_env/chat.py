"""Wraps prompts as an instruction-tuned model expects them: in the chat template of its tokenizer."""

import re
from collections.abc import Collection, Sequence
from datetime import date, datetime
from typing import TYPE_CHECKING

from cory_env.control_tokens import is_mark
from cory_env.message import Message
from cory_env.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = "Marker{}Text"
"""Stands for a message while a template is checked."""
_ROLES = ("system", "developer", "assistant", "tool")
"""Roles that templates mark beside the user's."""
_OTHER = "Use a model with another template, change the data or the setting `system_prompt`, or set chat=false."


class ChatError(ValueError):
    """Prompts cannot be wrapped in a chat template."""


class ChatFormat:
    """A tokenizer's chat template: the text of a conversation up to where the assistant's turn begins.

    Attributes:
        asks_date: Whether the template asked for today's date so far.
        written: What the template writes around messages of all roles that it takes.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", system_prompt: str | None = None, chat_date: str | None = None
    ) -> None:
        """Checks the template.

        Args:
            tokenizer: It must have a chat template.
            system_prompt: A system message before every conversation that has none; None leaves it to the template.
            chat_date: The date that a template gets as today's, as YYYY-MM-DD; None: today's.

        Raises:
            ChatError: There is no template, it does not take a system message, loses or repeats a message, or does not
                open the assistant's turn.
        """
        if not tokenizer.chat_template:
            raise ChatError(
                f"The tokenizer of {tokenizer.name_or_path} has no chat template, but chat is on. Set chat=false, "
                "or use an instruction-tuned model."
            )
        self.asks_date = False
        self._tokenizer = tokenizer
        self._system = system_prompt
        self._date = None if chat_date is None else datetime.combine(date.fromisoformat(chat_date), datetime.min.time())
        self._checked: set[tuple[str, ...]] = set()
        self._check_turn()
        self.render("a")
        self.written, self._turn_ends = self._probe()

    def render(self, text: str, history: Sequence[Message] = ()) -> str:
        """Returns the conversation as the model reads it, special tokens as text, open for the assistant's answer.

        Args:
            text: What the user says last.
            history: The messages before.

        Raises:
            ChatError: The template refuses these messages, or loses one of a role.
        """
        system = [] if history and history[0]["role"] == "system" else self._system_message()
        messages = [*system, *history, Message(role="user", content=text)]
        roles = tuple(message["role"] for message in messages)
        if roles not in self._checked:
            self._check(roles)
            self._checked.add(roles)
        return self._render(messages)

    def turn_end(self, ends: Collection[int]) -> int | None:
        """Returns the token with which the template ends the assistant's turn, if it does so with none of `ends`.

        Base models often have a template that ends turns with `<|im_end|>`, but name only another end.
        """
        return self._turn_ends[0] if self._turn_ends and not set(self._turn_ends) & set(ends) else None

    def _system_message(self) -> list[Message]:
        return [] if self._system is None else [Message(role="system", content=self._system)]

    def _render(self, messages: Sequence[Message], generate: bool = True) -> str:
        dates = {} if self._date is None else {"date_string": self._date.strftime("%d %b %Y")}  # as in Llama's
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=generate,
                strftime_now=self._strftime_now,
                **dates,
            )
        except Exception as error:  # a template is a program, and may fail in any way
            roles = ", ".join(message["role"] for message in messages)
            reason = str(error).strip().rstrip(".") or type(error).__name__
            raise ChatError(
                f"The chat template of {self._tokenizer.name_or_path} does not take messages from {roles}: {reason}. "
                f"{_OTHER}"
            ) from error
        assert isinstance(rendered, str)  # a list comes back only for a batch
        return rendered

    def _strftime_now(self, form: str) -> str:
        """Stands for transformers' own function of that name, which templates ask for today's date."""
        self.asks_date = True
        return (self._date or datetime.now()).strftime(form)

    def _check(self, roles: Sequence[str]) -> None:
        """Checks that each message of a conversation, given by their roles, comes out of the template once."""
        for role in roles:
            if not re.fullmatch(r"[\w .-]+", role):
                raise ChatError(
                    f"A conversation has a message of the role {role!r}, which is no word. Correct the data."
                )
        markers = [_MARKER.format(index) for index in range(len(roles))]
        rendered = self._render(
            [Message(role=role, content=marker) for role, marker in zip(roles, markers, strict=True)]
        )
        for role, marker in zip(roles, markers, strict=True):
            if (count := rendered.count(marker)) != 1:
                does = f"writes {count} times" if count else "leaves out"
                raise ChatError(
                    f"The chat template of {self._tokenizer.name_or_path} {does} the message of the role {role} in a "
                    f"conversation of {', '.join(roles)}. {_OTHER}"
                )

    def _check_turn(self) -> None:
        """Checks that the assistant's turn is opened."""
        asked = [*self._system_message(), Message(role="user", content=_MARKER.format(0))]
        answer = Message(role="assistant", content=_MARKER.format(1))
        opened = self._render(asked)
        if opened != self._render(asked, generate=False):
            return
        try:  # Llama 2's and Mistral's end the user's turn, and nothing stands before the answer
            answered = self._render([*asked, answer], generate=False)
        except ChatError:
            return
        between, separator, _ = answered.removeprefix(opened).partition(answer["content"])
        if answered.startswith(opened) and separator and between.strip():
            raise ChatError(
                f"The chat template of {self._tokenizer.name_or_path} opens no assistant turn: an answer would follow "
                f"{opened!r}, without {between!r}. {_OTHER}"
            )

    def _probe(self) -> tuple[str, list[int]]:
        """Returns what the template writes around messages, and the tokens that end the assistant's turn."""
        written, turn_ends = "", list[int]()
        for role in _ROLES:
            other = Message(role=role, content=_MARKER.format(0))
            asked = Message(role="user", content=_MARKER.format(1))
            for messages in ([other, asked], [asked, other], [asked, other, asked]):
                try:
                    rendered = self._render(messages, generate=messages[-1]["role"] == "user")
                except ChatError:
                    continue
                written += rendered
                if role == "assistant" and messages[0] is asked:  # some leave the last turn open
                    turn_ends = turn_ends or self._leading_tokens(rendered.partition(other["content"])[2])
        return written, turn_ends

    def _leading_tokens(self, text: str) -> list[int]:
        """Returns the added tokens with which a text begins, spaces aside."""
        tokens: list[int] = []
        added = {token.content: number for number, token in self._tokenizer.added_tokens_decoder.items()}
        while marks := [mark for mark in added if is_mark(mark) and text.lstrip().startswith(mark)]:
            longest = max(marks, key=len)
            tokens.append(added[longest])
            text = text.lstrip().removeprefix(longest)
        return tokens


def reject_conversations(task: Task) -> None:
    """Raises ChatError where a query is a conversation, which nothing but a chat template can render."""
    for query in task.all_queries():
        if query.history is not None:
            raise ChatError(
                f"Query {query.id} of task {task.name} is a conversation, but chat is off: {query.text[:80]!r}. Set "
                "chat=true for a model with a chat template, or give the queries as plain text."
            )
