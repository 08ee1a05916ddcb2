"""What one episode's calls may come back to by id: conversations to go on with, messages, whole answers.

Each message is kept once however many calls sent it again: what a call adds is one entry per new message. Whole
answers repeat their request's tools and instructions, so only the last ones are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from swarmtune.types import Message

KEPT_BYTES = 256 * 1024
"""Of whole answers, an episode; the last one is kept whatever its size."""


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

    def answer(self, turn_id: str) -> Message:
        """Raises:
        KeyError: no such turn, or it was not to be kept.
        """
        return self._ends[turn_id].message

    def forget(self, turn_id: str) -> None:
        """The turn cannot be continued or quoted any more; conversations that went on from it can."""
        self._ends.pop(turn_id, None)


class StoredAnswers:
    """Answers as they were given out, by turn id; the oldest go when there are more than KEPT_BYTES."""

    def __init__(self) -> None:
        self._bodies: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def keep(self, turn_id: str, body: bytes) -> None:
        self.forget(turn_id)
        self._bodies[turn_id] = body
        self._bytes += len(body)
        while self._bytes > KEPT_BYTES and len(self._bodies) > 1:
            self.forget(next(iter(self._bodies)))

    def get(self, turn_id: str) -> bytes:
        """Raises:
        KeyError: never kept, forgotten, or pushed out by later ones.
        """
        return self._bodies[turn_id]

    def forget(self, turn_id: str) -> None:
        self._bytes -= len(self._bodies.pop(turn_id, b""))
