"""Server-sent events over aiohttp: the response, and the comments that keep a silent one alive.

A response that is kept alive begins with the first thing written to it, an event or a comment: until then the request
can still be refused with a status of its own, which clients understand better than an error event.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_S = 5.0

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def event_stream() -> web.StreamResponse:
    """An event stream that has not begun."""
    return web.StreamResponse(headers=_HEADERS)


async def open_stream(request: web.Request) -> web.StreamResponse:
    """Send the headers of an event stream."""
    response = event_stream()
    await response.prepare(request)
    return response


@contextlib.asynccontextmanager
async def kept_alive(request: web.Request, response: web.StreamResponse) -> AsyncIterator[Heartbeat]:
    """While the block runs, a comment goes out after each KEEP_ALIVE_S of silence."""
    heartbeat = Heartbeat(request, response, KEEP_ALIVE_S)
    try:
        yield heartbeat
    finally:
        heartbeat.stop()


class Heartbeat:
    """Writes for the caller and remembers when, so that its one timer speaks into silence only."""

    def __init__(self, request: web.Request, response: web.StreamResponse, every_s: float) -> None:
        self._request = request
        self._response = response
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(every_s, self._tick)
        self._writing: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> None:
        """Raises:
        ConnectionResetError: the client is gone.
        """
        self._last = self._loop.time()
        await self._response.prepare(self._request)
        await self._response.write(data)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        silent_s = self._loop.time() - self._last
        if silent_s >= self._every_s * 0.99:
            self._last = self._loop.time()
            self._writing = self._loop.create_task(self._comment())
            silent_s = 0.0
        self._timer = self._loop.call_later(self._every_s - silent_s, self._tick)

    async def _comment(self) -> None:
        if self._timer is None:
            return
        with contextlib.suppress(ConnectionError):  # the caller's own next write learns of it
            await self._response.prepare(self._request)
            await self._response.write(KEEP_ALIVE)
