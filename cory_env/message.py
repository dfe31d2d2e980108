"""The message type of conversations."""

from typing import TypedDict


class Message(TypedDict):
    """One message of a conversation, in the form that chat templates take."""

    role: str
    content: str
