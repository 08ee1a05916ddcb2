"""Conversations of one episode that a later call may continue by the id of an answer (previous_response_id).

Each message is kept once however many calls sent it again: what a call adds is one entry per new message.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarmtune.types import Message


class _Said:
    """A message and the one before it."""

    __slots__ = ("before", "message")

    def __init__(self, before: _Said | None, message: Message) -> None:
        self.before = before
        self.message = message


class Conversations:
    def __init__(self) -> None:
        self._ends: dict[str, _Said] = {}
        """Turn id → its answer."""
        self._after: dict[tuple[_Said | None, Message], _Said] = {}

    def remember(self, turn_id: str, messages: Iterable[Message], answer: Message) -> None:
        """Keep a conversation, without instructions of one call only, and the answer it got."""
        end: _Said | None = None
        for message in messages:
            key = (end, message)
            end = self._after.get(key) or self._after.setdefault(key, _Said(end, message))
        self._ends[turn_id] = _Said(end, answer)

    def until(self, turn_id: str) -> tuple[Message, ...]:
        """The conversation up to and including a turn's answer.

        Raises:
            KeyError: no such turn, or it was not to be kept.
        """
        messages: list[Message] = []
        said: _Said | None = self._ends[turn_id]
        while said is not None:
            messages.append(said.message)
            said = said.before
        return tuple(reversed(messages))
