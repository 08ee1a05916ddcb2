"""The event log: every event of the server once, numbered without a gap, in memory, in the run's files, to every
listener.

Owns the sequence number. What always holds: numbers rise by one; a listener that asks for events after `k` gets each
later one once and in order; events of a run are in its journal and its events.jsonl, late by at most the writer's
queue. Events are a report, not a promise: when the disk refuses one, it is counted and the server goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from swarmtune.journal import EventWritten, Journal
from swarmtune.protocol import Event

log = logging.getLogger(__name__)

REMEMBERED = 20_000


class EventLog:
    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._ring: deque[Event] = deque(maxlen=remembered)
        self._seq = 0
        self._journal: Journal | None = None
        self._file: BinaryIO | None = None
        self._unwritten: list[Event] = []
        self._queued = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._grown = asyncio.Event()
        self.lost = 0
        """Events the disk refused."""

    @property
    def last_seq(self) -> int:
        return self._seq

    def emit(self, kind: str, **data: Any) -> Event:
        """Number an event and tell everyone. Returns at once; the files follow."""
        self._seq += 1
        event = Event(seq=self._seq, at=time.time(), kind=kind, data=data)
        self._ring.append(event)
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()
        if self._journal is not None:
            self._unwritten.append(event)
            self._queued.set()
        return event

    async def after(self, seq: int, limit: int = 1000) -> list[Event]:
        """Events with a greater number, in order: from memory, or from the journal for older ones."""
        oldest = self._ring[0].seq if self._ring else self._seq + 1
        if seq + 1 < oldest and self._journal is not None:
            found = await self._journal.events_after(seq, limit)
            if found:
                return found
        skip = max(0, seq + 1 - oldest)
        return [self._ring[i] for i in range(skip, min(len(self._ring), skip + limit))]

    async def follow(self, seq: int, *, idle_s: float) -> AsyncIterator[list[Event]]:
        """Batches of events after `seq`, for ever; an empty list after each `idle_s` without one."""
        while True:
            grown = self._grown
            if events := await self.after(seq):
                seq = events[-1].seq
                yield events
                continue
            try:
                async with asyncio.timeout(idle_s):
                    await grown.wait()
            except TimeoutError:
                yield []

    def attach(self, journal: Journal, path: Path, *, last_seq: int) -> None:
        """From now on events go to this run's journal and file as well; numbers go on after `last_seq`.

        Raises:
            OSError: the file cannot be opened; nothing is attached.
        """
        file = path.open("ab")
        self._seq = max(self._seq, last_seq)
        self._journal, self._file = journal, file
        self._writer = asyncio.get_running_loop().create_task(self._write_queued(journal, self._file))

    async def detach(self) -> None:
        """Write what is queued and let go of the run's files."""
        if self._writer is None or self._file is None:
            return
        self._journal = None
        self._queued.set()
        await self._writer
        with suppress(OSError):  # a full disk: what it refuses was counted
            self._file.close()
        self._writer = self._file = None

    async def _write_queued(self, journal: Journal, file: BinaryIO) -> None:
        while self._journal is journal or self._unwritten:
            await self._queued.wait()
            self._queued.clear()
            events, self._unwritten = self._unwritten, []
            if not events:
                continue
            try:
                await journal.write(*(EventWritten(event) for event in events))
                file.write(b"".join(orjson.dumps(event.model_dump()) + b"\n" for event in events))
                file.flush()
            except Exception as error:  # noqa: BLE001 - a report, not a promise: no event may end the others
                self.lost += len(events)
                log.warning("events not written", extra={"events": len(events), "reason": str(error)})
