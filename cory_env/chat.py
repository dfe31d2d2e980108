"""Renders prompts in the chat template of an instruction-tuned model's tokenizer."""

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

from cory_env.control_tokens import is_mark
from cory_env.message import Message
from cory_env.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACEHOLDER = "Marker{}Text"
"""The content of messages when a template is checked."""
TOOL_NAME = "marker_tool"
TOOL_CALL: dict[str, Any] = {
    "type": "function",
    "id": "call00000",  # Mistral's templates need nine characters
    "function": {"name": TOOL_NAME, "arguments": {"marker_key": "Marker1Text"}},
}
"""Stands for a call when a template is rendered around it."""
_OTHER_ROLES = ("system", "developer", "assistant", "tool")
"""Roles that templates may know in addition to `user`."""
_FIXED_VARIABLES = {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}
"""Variables of templates that are no arguments."""
_ADVICE = "Use a model with another template, change the data or the setting `system_prompt`, or set chat=false."


class ChatError(ValueError):
    """Prompts cannot be rendered with a chat template."""


class ChatTemplate:
    """A tokenizer's chat template: the text of a conversation up to where the assistant's turn begins.

    Attributes:
        uses_date: Whether the template has used today's date so far.
        template_text: The text that the template writes around messages, for all roles that it supports.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        system_prompt: str | None = None,
        chat_date: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Checks the template.

        Args:
            tokenizer: A tokenizer with a chat template.
            system_prompt: A system message for every conversation that has none; None leaves it to the template.
            chat_date: The date that the template shows as today's, as YYYY-MM-DD. None: the real date.
            arguments: Further variables of the template (`chat_template_kwargs`).

        Raises:
            ChatError: There is no template, or it does not support a system message, drops or repeats a message, does
                not open the assistant's turn, or does not read one of the arguments.
        """
        if not tokenizer.chat_template:
            raise ChatError(
                f"The tokenizer of {tokenizer.name_or_path} has no chat template, but chat is on. Set chat=false, "
                "or use an instruction-tuned model."
            )
        self.uses_date = False
        self._tokenizer = tokenizer
        self._system = system_prompt
        self._date = None if chat_date is None else datetime.combine(date.fromisoformat(chat_date), datetime.min.time())
        self._arguments = dict(arguments or {})
        self._check_arguments()
        self._checked_roles: set[tuple[str, ...]] = set()
        self._check_generation_prompt()
        self.render("a")
        self.template_text, self._turn_ends = self._probe()

    def with_arguments(self, arguments: Mapping[str, Any]) -> "ChatTemplate":
        """Returns this template with further variables, which take precedence.

        Raises:
            ChatError: See the class's constructor.
        """
        chat_date = None if self._date is None else self._date.date().isoformat()
        return ChatTemplate(self._tokenizer, self._system, chat_date, {**self._arguments, **arguments})

    def render(self, text: str, history: Sequence[Message] = ()) -> str:
        """Returns the conversation as the model's input, with special tokens as text and the generation prompt.

        Args:
            text: The last user message.
            history: The messages before it.

        Raises:
            ChatError: The template rejects these messages, or drops one.
        """
        return self.render_messages([*history, Message(role="user", content=text)])

    def render_messages(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Returns a conversation, whose last message is not the assistant's, as `render` does.

        Args:
            messages: The conversation.
            tools: The tools that the assistant may call, as JSON schemas.
        """
        messages = [*([] if messages[0]["role"] == "system" else self._system_message()), *messages]
        roles = tuple(message["role"] for message in messages)
        calls_tools = any("tool_calls" in message for message in messages)  # roles are checked with plain messages
        if not calls_tools and roles not in self._checked_roles:
            self._check_roles(roles)
            self._checked_roles.add(roles)
        return self._render(messages, tools=tools)

    def render_tool_results(self, results: Sequence[Message]) -> tuple[str, str]:
        """Returns how an assistant's message with only the call `TOOL_CALL` is written, and what is written after it.

        The call is always the same, so that nothing that a model writes decides where its turn ends.

        Args:
            results: The messages after it, of the role `tool`.

        Returns:
            The text between the user's text and the end of the assistant's turn; and the text from that end to where
            the assistant's next turn begins.

        Raises:
            ChatError: The template rejects tool calls or their results, drops the call, or does not end the turn.
        """
        user = Message(role="user", content=_PLACEHOLDER.format(0))
        written = self._render([user, Message(role="assistant", content="", tool_calls=[TOOL_CALL]), *results])
        text = written.partition(user["content"])[2]
        start = text.find(TOOL_NAME)
        ends = [text.find(str(self._tokenizer.decode([token])), start) for token in self._turn_ends]
        end = min((end for end in ends if end >= 0), default=-1)
        if start < 0 or end < 0:
            raise ChatError(
                f"The chat template of {self._tokenizer.name_or_path} "
                f"{'drops tool calls' if start < 0 else 'does not end the turn after a tool call'}. Use a model that "
                "was trained to call tools."
            )
        return text[:end], text[end:]

    def turn_end(self, end_ids: Collection[int]) -> int | None:
        """Returns the token that ends the assistant's turn in the template, if none of `end_ids` does.

        Templates of base models often end turns with `<|im_end|>`, which is not the model's end-of-sequence token.
        """
        return self._turn_ends[0] if self._turn_ends and not set(self._turn_ends) & set(end_ids) else None

    def _system_message(self) -> list[Message]:
        return [] if self._system is None else [Message(role="system", content=self._system)]

    def _render(
        self, messages: Sequence[Message], generate: bool = True, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        arguments: dict[str, Any] = {}
        if self._date is not None:
            arguments["date_string"] = self._date.strftime("%d %b %Y")  # as in Llama's
        arguments |= self._arguments
        if tools:
            arguments["tools"] = [*tools]
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=generate,
                strftime_now=self._strftime_now,
                **arguments,
            )
        except Exception as error:  # a template is a program and may raise anything
            roles = ", ".join(message["role"] for message in messages)
            reason = str(error).strip().rstrip(".") or type(error).__name__
            raise ChatError(
                f"The chat template of {self._tokenizer.name_or_path} rejects messages of the roles {roles}: {reason}. "
                f"{_ADVICE}"
            ) from error
        assert isinstance(rendered, str)  # a list comes back only for a batch
        return rendered

    def _strftime_now(self, form: str) -> str:
        """Replaces transformers' `strftime_now`, which templates call for today's date."""
        self.uses_date = True
        return (self._date or datetime.now()).strftime(form)

    def _check_arguments(self) -> None:
        """Checks that the template reads the arguments, and that none is a value that templates always get."""
        if not self._arguments:
            return
        variables = template_variables(str(self._tokenizer.get_chat_template())) - _FIXED_VARIABLES
        for name in self._arguments:
            if name not in variables:
                options = ", ".join(sorted(variables - {*self._tokenizer.special_tokens_map})) or "nothing else"
                raise ChatError(
                    f"chat_template_kwargs has {name!r}, which the chat template of {self._tokenizer.name_or_path} "
                    f"does not read. It reads: {options}."
                )

    def _check_roles(self, roles: Sequence[str]) -> None:
        """Checks that the template renders each message of a conversation with these roles exactly once."""
        for role in roles:
            if not re.fullmatch(r"[\w .-]+", role):
                raise ChatError(f"A conversation has a message with the invalid role {role!r}. Correct the data.")
        contents = [_PLACEHOLDER.format(index) for index in range(len(roles))]
        rendered = self._render(
            [Message(role=role, content=content) for role, content in zip(roles, contents, strict=True)]
        )
        for role, content in zip(roles, contents, strict=True):
            if (count := rendered.count(content)) != 1:
                fault = f"renders {count} times" if count else "drops"
                raise ChatError(
                    f"The chat template of {self._tokenizer.name_or_path} {fault} the message of the role {role} in a "
                    f"conversation of the roles {', '.join(roles)}. {_ADVICE}"
                )

    def _check_generation_prompt(self) -> None:
        """Checks that the template opens the assistant's turn."""
        messages = [*self._system_message(), Message(role="user", content=_PLACEHOLDER.format(0))]
        response = Message(role="assistant", content=_PLACEHOLDER.format(1))
        prompt = self._render(messages)
        if prompt != self._render(messages, generate=False):
            return
        try:  # Llama 2's and Mistral's templates end the user's turn and write nothing before the response
            conversation = self._render([*messages, response], generate=False)
        except ChatError:
            return
        header, separator, _ = conversation.removeprefix(prompt).partition(response["content"])
        if conversation.startswith(prompt) and separator and header.strip():
            raise ChatError(
                f"The chat template of {self._tokenizer.name_or_path} has no generation prompt: a response would "
                f"follow {prompt!r} without {header!r}. {_ADVICE}"
            )

    def _probe(self) -> tuple[str, list[int]]:
        """Returns the text that the template writes around messages, and the tokens that end the assistant's turn."""
        template_text, turn_ends = "", list[int]()
        for role in _OTHER_ROLES:
            other = Message(role=role, content=_PLACEHOLDER.format(0))
            user = Message(role="user", content=_PLACEHOLDER.format(1))
            for messages in ([other, user], [user, other], [user, other, user]):
                try:
                    rendered = self._render(messages, generate=messages[-1]["role"] == "user")
                except ChatError:
                    continue
                template_text += rendered
                if role == "assistant" and messages[0] is user:  # some templates leave the last turn open
                    turn_ends = turn_ends or self._leading_tokens(rendered.partition(other["content"])[2])
        return template_text, turn_ends

    def _leading_tokens(self, text: str) -> list[int]:
        """Returns the added tokens at the start of a text, ignoring spaces."""
        tokens: list[int] = []
        added_ids = {token.content: token_id for token_id, token in self._tokenizer.added_tokens_decoder.items()}
        while prefixes := [token for token in added_ids if is_mark(token) and text.lstrip().startswith(token)]:
            longest = max(prefixes, key=len)
            tokens.append(added_ids[longest])
            text = text.lstrip().removeprefix(longest)
        return tokens


def template_variables(template: str) -> set[str]:
    """Returns the names of the variables that a chat template reads.

    Raises:
        ChatError: The template is not valid.
    """
    from jinja2 import Environment, TemplateSyntaxError, meta
    from jinja2.ext import Extension
    from jinja2.nodes import Node
    from jinja2.parser import Parser

    class GenerationBlock(Extension):
        """`{% generation %}` in transformers' templates; only its content matters here."""

        tags = {"generation"}  # noqa: RUF012 - as in the base class

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    try:
        parsed = Environment(extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError as error:
        raise ChatError(f"The chat template is not valid: {error}.") from error
    return meta.find_undeclared_variables(parsed)


def reject_conversations(task: Task) -> None:
    """Raises ChatError if a query is a conversation, because only a chat template can render it."""
    for query in task.all_queries():
        if query.history is not None:
            raise ChatError(
                f"Query {query.id} of task {task.name} is a conversation, but chat is off: {query.text[:80]!r}. Set "
                "chat=true for a model with a chat template, or use plain-text queries."
            )
