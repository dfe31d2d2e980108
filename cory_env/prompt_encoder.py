"""`PromptEncoder`: the prompts of agents with one tokenizer."""

import copy
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from cory_env.chain_settings import ChainSettings
from cory_env.chat import ChatError, ChatTemplate, reject_conversations
from cory_env.control_tokens import ControlTokens
from cory_env.decoding import ResponseDecoder
from cory_env.message import Message
from cory_env.tasks.task import Query, Task, ending, literals, placeholders
from cory_env.tasks.turns import SeenResponse, prompt_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_MARK = "Marker0Text"
"""Stands for a response when a template is rendered around it."""


class PromptError(ValueError):
    """A prompt cannot be given to a model."""


class QueryTooLongError(PromptError):
    """A query's prompt exceeds `max_prompt_tokens` even without any reference."""


class NoEmbeddingError(PromptError):
    """A prompt contains a token that the model has no embedding for."""


class Prompt(NamedTuple):
    """The prompt of an agent.

    Attributes:
        tokens: Its 1 to `max_prompt_tokens` token ids.
        is_truncated: Whether responses or feedback in it were truncated.
        begins_thought: Whether it begins the thought of its response: its template ends with the start tag. A tag at
            the end of the query, a response or feedback is only text, such as that of a response that was cut.
    """

    tokens: list[int]
    is_truncated: bool = False
    begins_thought: bool = False


class PromptEncoder(ResponseDecoder):
    """Tokenizes prompts for models with one tokenizer, and reads their responses.

    Attributes:
        chat: The chat template; None: prompts are plain text.
        control: The tokens that inserted text must not become.
        num_embeddings: Upper bound of token ids in prompts (exclusive).
    """

    def __init__(self, task: Task, tokenizer: "PreTrainedTokenizerBase", settings: ChainSettings) -> None:
        """Checks the tokenizer. Raises what `Chain` raises."""
        s = settings
        uses_chat = bool(tokenizer.chat_template) if s.chat == "auto" else s.chat
        self.chat = ChatTemplate(tokenizer, s.system_prompt, s.chat_date, s.chat_template_kwargs) if uses_chat else None
        end_ids = [tokenizer.eos_token_id, *s.stop_token_ids]
        super().__init__(tokenizer, s, end_ids if self.chat is None else [*end_ids, self.chat.turn_end(end_ids)])
        if self.chat is None:
            reject_conversations(task)
        self.task = task
        self.num_embeddings = s.num_embeddings or self.vocab_size
        self.max_prompt_tokens = s.max_prompt_tokens
        pad: int = tokenizer.pad_token_id or 0
        self.pad_token_id = pad if pad < self.num_embeddings else 0
        roles = [position.role for position in s.make_positions()]
        templates = [task.prompt_template, task.observer_template, task.reference_separator]
        templates += [role.prompt for role in roles if role.prompt is not None]
        self._prompt_columns = {name for template in templates for name in placeholders(template)}
        if shared := self._prompt_columns.intersection(role.name for role in roles):
            raise ValueError(f"{min(shared)} is a role, and a column in a prompt. Rename the role.")
        template_texts = [literal for template in templates for literal in literals(template)]
        template_texts += [] if self.chat is None else [self.chat.template_text]
        vocab = tokenizer.get_vocab()
        self._unembedded = {token: text for text, token in vocab.items() if token >= self.num_embeddings}
        self.control = ControlTokens(tokenizer, self._hidden_ids.union(self._unembedded), template_texts)

    def with_chat_template_kwargs(self, arguments: Mapping[str, Any]) -> Self:
        """See `Chain.with_chat_template_kwargs`."""
        if self.chat is None:
            raise ChatError("chat_template_kwargs require a chat template, but this chain has none (chat=false).")
        encoder = copy.copy(self)
        encoder.chat = self.chat.with_arguments(arguments)
        return encoder

    def encode_prompts(
        self, queries: Sequence[Query], responses: Sequence[SeenResponse] = (), template: str | None = None
    ) -> list[list[int]]:
        """Tokenizes the prompts of an agent that sees the same earlier responses to each query, or none.

        Special tokens come either from the chat template (with `chat`) or from the tokenizer's defaults, such as a BOS
        token; never from both.

        Args:
            queries: The queries.
            responses: The earlier responses, in the chain's order.
            template: The template of the role's prompt; None: the task's.

        Raises:
            NoEmbeddingError: A prompt contains a token that the model has no embedding for, and that comes from the
                query or the template, not from a response or feedback.
            ChatError: The chat template cannot render a prompt.
        """
        mask = self.control.mask
        masked = [self._mask_query(query) for query in queries]
        seen = [
            response._replace(text=mask(response.text), feedback=response.feedback and mask(response.feedback))
            for response in responses
        ]
        prompts = self._encode_masked(masked, seen, template)
        unembedded = [self._unembedded.keys() & prompt for prompt in prompts]
        if not any(unembedded):
            return prompts
        bare = [response._replace(text="", feedback=response.feedback and "") for response in seen]
        self._reject_unembedded(queries, self._encode_masked(masked, bare, template))
        return [self._spell_out(prompt, tokens) for prompt, tokens in zip(prompts, unembedded, strict=True)]

    def _encode_masked(
        self, queries: Sequence[Query], responses: Sequence[SeenResponse], template: str | None
    ) -> list[list[int]]:
        texts = [self._render(prompt_text(self.task, query, responses, template), query.history) for query in queries]
        return self.control.encode(texts, add_special_tokens=self.chat is None)

    def _render(self, text: str, history: Sequence[Message] | None) -> str:
        return text if self.chat is None else self.chat.render(text, history or ())

    def _mask_query(self, query: Query) -> Query:
        """Returns the query with its texts masked, so that they do not become control tokens in a prompt."""
        mask = self.control.mask
        columns = dict(query.columns)
        for name, value in query.columns.items():
            text = str(value)
            if (isinstance(value, str) or name in self._prompt_columns) and (masked := mask(text)) != text:
                columns[name] = masked
        history = query.history
        if history is not None:
            history = tuple(Message(role=message["role"], content=mask(message["content"])) for message in history)
        return replace(query, text=mask(query.text), columns=columns, history=history)

    def _reject_unembedded(self, queries: Sequence[Query], prompts: list[list[int]]) -> None:
        for query, prompt in zip(queries, prompts, strict=True):
            if token := next((token for token in prompt if token in self._unembedded), None):
                raise NoEmbeddingError(
                    f"The prompt of query {query.id} of task {self.task.name} contains the token "
                    f"{self._unembedded[token]!r} with id {token}, but `{self.tokenizer.name_or_path}` has only "
                    f"{self.num_embeddings} embeddings. Change the prompt, use the tokenizer that the model was "
                    "trained with, or resize the model's embeddings."
                )

    def _spell_out(self, prompt: list[int], unembedded: Collection[int]) -> list[int]:
        """Replaces tokens without an embedding by the tokens of their characters."""
        spelled: dict[int, list[int]] = {}
        for token in unembedded:
            characters = self.tokenizer(list(self._unembedded[token]), add_special_tokens=False)["input_ids"]
            spelled[token] = [part for ids in characters for part in ids if part < self.num_embeddings]
        return [part for token in prompt for part in spelled.get(token, [token])]

    def build_prompt(self, query: Query, responses: Sequence[SeenResponse] = (), template: str | None = None) -> Prompt:
        """Builds the prompt of an agent that sees `responses`.

        If the prompt exceeds `max_prompt_tokens`, its reference is truncated: it loses tokens from its end (the last
        response first) until the prompt fits. If it does not fit without any response, the feedback loses characters
        from its end too. The query is never truncated. A response without remaining tokens is not in the reference.

        Args:
            query: The query.
            responses: The earlier responses with their tokens, in the chain's order; empty for the pioneer.
            template: The template of the role's prompt; None: the task's.

        Raises:
            QueryTooLongError: The prompt does not fit even without any response.
        """
        num_characters = sum(len(response.feedback or "") for response in responses)
        total = num_characters + sum(len(response.tokens) for response in responses)
        references = [k for k, response in enumerate(responses) if response.is_reference]

        def encode_prefix(length: int) -> list[int]:
            """Returns the prompt with the first `length` characters of feedback, then tokens of the responses."""
            seen: list[SeenResponse] = []
            characters, num_tokens = length, length - num_characters
            for response in responses:
                seen.append(response.cut(characters, num_tokens))
                characters -= len(response.feedback or "")
                num_tokens -= len(response.tokens)
            if references and all(seen[k].is_omitted for k in references):
                seen[references[-1]] = seen[references[-1]]._replace(is_omitted=False)
            return self.encode_prompts([query], seen, template)[0]

        tokens = encode_prefix(total)
        is_truncated = len(tokens) > self.max_prompt_tokens
        if is_truncated:
            if (shortest := len(encode_prefix(0))) > self.max_prompt_tokens:
                raise QueryTooLongError(
                    f"Query {query.id} of task {self.task.name} needs a prompt of {shortest} tokens without any "
                    f"reference, but max_prompt_tokens is {self.max_prompt_tokens}: {query.text[:80]!r}. Raise "
                    f"max_prompt_tokens to at least {shortest}, or shorten or remove the query."
                )
            # Each attempt tokenizes the text again, because tokens merge across boundaries.
            length = bisect_left(range(1, total), True, key=lambda n: len(encode_prefix(n)) > self.max_prompt_tokens)
            tokens = encode_prefix(length)
        if template is None:
            template = self.task.observer_template if responses else self.task.prompt_template
        return Prompt(tokens, is_truncated, self._begins_thought(tokens, f"x{ending(template)}", query.history))

    def encode_messages(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """Tokenizes a conversation, without a limit on its length.

        Without a chat template, the prompt is the text of the only message.

        Args:
            messages: The conversation.
            tools: The tools that the assistant may call, as JSON schemas.

        Raises:
            ChatError: The chat template cannot render the messages; or there is none, and several messages.
        """
        text = self._render_messages(self._mask_messages(messages), self._mask_values([*tools]))
        (tokens,) = self.control.encode([text], add_special_tokens=self.chat is None)
        return self._conversation_prompt(tokens)

    def encode_continuation(
        self,
        messages: Sequence[Message],
        prompt: Sequence[int],
        response: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Prompt:
        """Tokenizes a conversation that continues another one; the tokens so far stay as they are.

        The token that ended the response is left out: the template's own end of the turn takes its place. If the
        template writes earlier messages differently as the conversation goes on, as Qwen3's drops earlier thoughts, the
        whole conversation is tokenized anew.

        Args:
            messages: The conversation so far; the last one is the response as text.
            prompt: The tokens before the response.
            response: The response's tokens.
            new: The messages after it.
            tools: As for `encode_messages`.
        """
        response = self.without_end(response)
        if self.chat is None:
            suffix = self._render_messages(self._mask_messages(new))
        else:
            masked_tools = self._mask_values([*tools])
            *earlier, answer = self._mask_messages(messages)
            after = self._mask_messages(new)
            before = self.chat.render_messages(earlier, masked_tools)
            mark = Message(role="assistant", content=_MARK)
            head, _, suffix = self.chat.render_messages([*earlier, mark, *after], masked_tools).partition(_MARK)
            written = self.chat.render_messages([*earlier, answer, *after], masked_tools)
            if head.rstrip() != before.rstrip() or answer["content"].strip() not in written:
                return self.encode_messages([*messages, *new], tools)
        return self._conversation_prompt([*prompt, *response, *self.control.encode_continuation(suffix)])

    def encode_tool_results(self, prompt: Sequence[int], response: Sequence[int], results: Sequence[Message]) -> Prompt:
        """Tokenizes a conversation that continues after tool calls; the tokens so far stay as they are.

        What follows is rendered after another call, as in TRL's `GRPOTrainer`, and not with the whole conversation, so
        that no template writes earlier messages anew.

        Args:
            prompt: The tokens before the response.
            response: The response's tokens.
            results: The messages after it, of the role `tool`.
        """
        assert self.chat is not None
        response = self.without_end(response)
        _, suffix = self.chat.render_tool_results(self._mask_messages(results))
        return self._conversation_prompt([*prompt, *response, *self.control.encode_continuation(suffix)])

    def _mask_messages(self, messages: Sequence[Message]) -> list[Message]:
        return [self._mask_message(message) for message in messages]

    def _mask_message(self, message: Message) -> Message:
        masked = {key: value if key == "role" else self._mask_values(value) for key, value in message.items()}
        return cast(Message, masked)

    def _mask_values(self, value: Any) -> Any:
        """Masks all texts in a value as JSON has it."""
        match value:
            case str():
                return self.control.mask(value)
            case list() | tuple():
                return [self._mask_values(item) for item in value]
            case Mapping():
                return {self.control.mask(str(key)): self._mask_values(item) for key, item in value.items()}
        return value

    def _render_messages(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        if self.chat is not None:
            return self.chat.render_messages(messages, tools)
        if len(messages) > 1:
            raise ChatError(
                f"There are {len(messages)} messages, but chat is off. Set chat=true for a model with a chat template, "
                "or return a text."
            )
        return messages[0]["content"]

    def _conversation_prompt(self, tokens: list[int]) -> Prompt:
        if unembedded := self._unembedded.keys() & tokens:
            tokens = self._spell_out(tokens, unembedded)
        begins_thought = self.chat is not None and self._begins_thought(tokens, "x")
        return Prompt(tokens, begins_thought=begins_thought)

    def _begins_thought(self, prompt: Sequence[int], text: str, history: Sequence[Message] | None = None) -> bool:
        """Returns whether the template begins a thought; x stands for the text that is inserted into it."""
        if self.tags is None or not self.tags.at_end_of(prompt):
            return False
        text = self._render(text, history)
        return text.rstrip().endswith(self.tags.start)
