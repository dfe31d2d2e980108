"""Wraps prompts as an instruction-tuned model expects them: in the chat template of its tokenizer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cory_env.message import Message
from cory_env.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatError(ValueError):
    """Prompts cannot be wrapped in a chat template."""


class ChatFormat:
    """A tokenizer's chat template: the text of a conversation up to where the assistant's turn begins."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", system: str | None = None) -> None:
        """Proves that the template can be used.

        Args:
            tokenizer: It must have a chat template.
            system: A system message before every conversation that has none; None leaves it to the template.

        Raises:
            ChatError: There is no template, or it does not take a system message.
        """
        if not tokenizer.chat_template:
            raise ChatError(
                f"The tokenizer of {tokenizer.name_or_path} has no chat template, but chat is on. Set chat=false, "
                "or use an instruction-tuned model."
            )
        self._tokenizer = tokenizer
        self._system = system
        self.render("a")

    def render(self, text: str, history: Sequence[Message] = ()) -> str:
        """Returns the conversation as the model reads it, special tokens as text, open for the assistant's answer.

        Args:
            text: What the user says last.
            history: The messages before.

        Raises:
            ChatError: The template refuses these messages.
        """
        messages = [*history, Message(role="user", content=text)]
        if self._system is not None and messages[0]["role"] != "system":
            messages.insert(0, Message(role="system", content=self._system))
        from jinja2 import TemplateError

        try:
            rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ChatError(
                f"The chat template of {self._tokenizer.name_or_path} does not take messages from {roles}: {error}. "
                "Change the data or the setting system."
            ) from error
        assert isinstance(rendered, str)  # a list comes back only for a batch
        return rendered


def refuse_conversations(task: Task) -> None:
    """Raises ChatError where a query is a conversation, which nothing but a chat template can render."""
    for query in task.all_queries():
        if query.history is not None:
            raise ChatError(
                f"Query {query.id} of task {task.name} is a conversation, but chat is off: {query.text[:80]!r}. Set "
                "chat=true for a model with a chat template, or give the queries as plain text."
            )
