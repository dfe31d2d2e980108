"""`TextEpisode`: a chain whose responses come from elsewhere as texts, such as from an API, without a tokenizer."""

from collections.abc import Sequence

from cory_env.episode import ChainEpisode
from cory_env.message import Message
from cory_env.tasks.turns import SeenResponse, prompt_text


class TextEpisode(ChainEpisode):
    """One query in a chain that has no tokenizer (`Chain(task, None)`): agents read messages and write texts.

    Nobody knows the ids of the tokens, so zeros stand for them in `responses`. Prompts are never truncated, because
    their lengths are unknown.
    """

    def messages(self, system_prompt: str | None = None) -> list[Message]:
        """Returns the current agent's prompt as a conversation.

        Args:
            system_prompt: The system message, unless the query has its own.

        Raises:
            TemplateError: The prompt's template uses a column that the query does not have.
        """
        position = len(self.responses)
        text = prompt_text(
            self.chain.task, self.query, self._earlier(position), self.chain.positions[position].template
        )
        history = list(self.query.history or ())
        if system_prompt is not None and [message["role"] for message in history[:1]] != ["system"]:
            history.insert(0, Message(role="system", content=system_prompt))
        return [*history, Message(role="user", content=text)]

    def respond_text(self, text: str | None, length: int, *, ended: bool = True) -> None:
        """Takes the current agent's response and advances the turn.

        Args:
            text: The response without its thought; None if that was cut off, so that there is no answer.
            length: Its number of tokens, with its thought.
            ended: Whether the response is complete.
        """
        self.answer_starts.append(None if text is None else 0)
        self.responses.append([0] * length)
        self.ended.append(ended)
        self.completions.append(text or "")

    def _earlier(self, position: int) -> Sequence[SeenResponse]:
        return [
            SeenResponse(
                self.completions[shown.position],
                self._shown_feedback(shown.position) if self.chain.shows_feedback(position) else None,
                shown.role,
                shown.is_reference,
                self.chain.positions[shown.position].role.produces_response,
            )
            for shown in self.chain.positions[position].shown_responses
        ]
