"""The load on a gateway: keep-alive connections written by hand, so that it costs little beside what it measures."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway_servers import text_of

NUMBERS = itertools.count()
"""No two calls of a run ask the same."""


@dataclass(frozen=True, slots=True)
class Measured:
    seconds: tuple[float, ...]
    """Of each call, whole, sorted."""
    first_bytes: tuple[float, ...]
    took_s: float

    @property
    def p50_ms(self) -> float:
        return statistics.median(self.seconds) * 1000

    @property
    def p99_ms(self) -> float:
        return self.seconds[min(len(self.seconds) - 1, int(len(self.seconds) * 0.99))] * 1000

    @property
    def first_byte_ms(self) -> float:
        return statistics.median(self.first_bytes) * 1000

    @property
    def per_s(self) -> float:
        return len(self.seconds) / self.took_s


class Connected:
    """One connection."""

    def __init__(self, url: str) -> None:
        host, _, rest = url.removeprefix("http://").partition(":")
        port, _, self._base = rest.partition("/")
        self._where = (host, int(port))
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._where, limit=2**22)

    def close(self) -> None:
        self._writer.close()

    async def chat(self, key: str, body: bytes) -> tuple[float, float, bytes]:
        """Seconds to the first byte of the answer's body and to the last; an unstreamed answer's body."""
        return await self.post("/v1/chat/completions", key, body)

    async def post(self, path: str, key: str, body: bytes) -> tuple[float, float, bytes]:
        base = f"/{self._base}" if self._base else ""
        head = (
            f"POST {base}{path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        self._writer.write(head.encode() + body)
        headers = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in headers[:20]:
            raise SystemExit(f"refused: {headers.decode()} {(await self._reader.read(500)).decode()}")
        first, whole = 0.0, b""
        if b"chunked" in headers:
            while size := int(await self._reader.readline(), 16):
                await self._reader.readexactly(size + 2)
                first = first or time.perf_counter() - began
            await self._reader.readline()
        else:
            length = int(headers.split(b"content-length:")[1].split(b"\r\n")[0])
            whole = await self._reader.readexactly(length)
            first = time.perf_counter() - began
        return first, time.perf_counter() - began, whole


def question(tokens: int, *, history: Sequence[dict[str, str]] = (), stream: bool = False) -> bytes:
    """The body of a call that was not made before."""
    number = next(NUMBERS)
    content = f"call {number}: {text_of(tokens, number)}"
    messages = [*history, {"role": "user", "content": content}]
    return json.dumps({"model": "m", "messages": messages, "stream": stream}).encode()


async def drive(
    url: str, work: Iterable[tuple[str, bytes]], concurrency: int, *, begin_within_s: float = 0.0
) -> Measured:
    """Make calls, (key, body) each, on so many connections at a time; these begin one after another."""
    connections = [Connected(url) for _ in range(concurrency)]
    await asyncio.gather(*(c.open() for c in connections))
    todo = iter(list(work))
    times: list[tuple[float, float]] = []

    async def take_turns(number: int, connection: Connected) -> None:
        await asyncio.sleep(number * begin_within_s / concurrency)
        for key, body in todo:
            first, last, _ = await connection.chat(key, body)
            times.append((first, last))

    began = time.perf_counter()
    await asyncio.gather(*(take_turns(n, c) for n, c in enumerate(connections)))
    took = time.perf_counter() - began
    for connection in connections:
        connection.close()
    return Measured(tuple(sorted(t for _, t in times)), tuple(sorted(f for f, _ in times)), took)


async def converse(url: str, key: str, turns: int, tokens: int) -> list[float]:
    """A conversation on one connection; seconds of each call. A user message has about `tokens` tokens."""
    connection = Connected(url)
    await connection.open()
    messages: list[dict[str, str]] = [{"role": "system", "content": text_of(300, 0)}]
    spent = []
    for _ in range(turns):
        number = next(NUMBERS)
        messages.append({"role": "user", "content": f"{number}: {text_of(tokens, number)}"})
        body = json.dumps({"model": "m", "messages": messages}).encode()
        _, last, answer = await connection.chat(key, body)
        spent.append(last)
        messages.append({"role": "assistant", "content": json.loads(answer)["choices"][0]["message"]["content"]})
    connection.close()
    return spent
