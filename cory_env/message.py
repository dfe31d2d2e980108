"""A turn of a conversation."""

from typing import TypedDict


class Message(TypedDict):
    """One turn of a conversation, as chat templates take it."""

    role: str
    content: str
