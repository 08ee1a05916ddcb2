"""What the gateway adds to a call, capture and journal on, beside the plain shape of a capturing proxy.

    python benchmarks/gateway.py                    # both, a table
    python benchmarks/gateway.py --calls 2000 --model smollm2-135m

Ours: the whole server with the scripted engine, so only the gateway is measured; its engine answers at once, so all of
the latency counts as added. The yardstick is written here: FastAPI, httpx and json in front of a canned upstream; what
the upstream alone takes is subtracted. Load generator, server and upstream are processes that share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

ANSWER_WORDS = 100
PROMPT_WORDS = 500


def words(count: int, seed: int = 0) -> str:
    """About `count` tokens of text."""
    return " ".join(("one", "two", "tree", "house", "over", "under")[(seed + i * 7) % 6] for i in range(count))


# -- the servers


def report_cpu(pipe: Connection) -> None:
    """Answer "cpu" with this process's processor seconds, until told to end."""
    while pipe.recv() == "cpu":
        pipe.send(time.process_time())


def scripted_answer(messages, index: int) -> str:
    return words(ANSWER_WORDS)


def serve_ours(pipe: Connection, model: str, pace: float | None) -> None:
    """Serve until told to end; sends (URL, keys of open episodes)."""

    async def main() -> None:
        from swarmtune.testing import LocalServer, chatml_model

        with tempfile.TemporaryDirectory() as folder:
            path = model or str(chatml_model(Path(folder) / "model", context=32768))
            script = scripted_answer if pace is None else lambda messages, index: "."
            async with LocalServer(Path(folder) / "data", path, script=script) as local:
                await local.boot(
                    batch_tasks=512,
                    repeats=512,
                    **{"engine.context_length": 32768, "sampling.max_tokens": 1024, "engine.script_tokens_per_s": pace},
                )
                grants = [await local.claim(f"task {n}") for n in range(64)]
                pipe.send((local.url, [g.api_key for g in grants]))
                await asyncio.to_thread(report_cpu, pipe)
                for grant in grants:
                    await local.end(grant.episode_id)
                pipe.send(None)

    asyncio.run(main())


def serve_upstream(pipe: Connection) -> None:
    """A canned chat completion, as fast as aiohttp gives it."""
    from aiohttp import web

    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": words(ANSWER_WORDS)}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": PROMPT_WORDS, "completion_tokens": ANSWER_WORDS, "total_tokens": 600},
        "prompt_token_ids": list(range(PROMPT_WORDS)),
        "token_ids": list(range(ANSWER_WORDS)),
        "logprobs": [-0.1] * ANSWER_WORDS,
    }
    body = json.dumps(answer).encode()

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        pipe.send((f"http://127.0.0.1:{runner.addresses[0][1]}", ["-"]))
        await asyncio.to_thread(report_cpu, pipe)
        pipe.send(None)

    asyncio.run(main())


def serve_yardstick(pipe: Connection, upstream: str) -> None:
    """The plain shape: decode with json, capture, forward with httpx, decode, encode with json."""
    import httpx
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    app = FastAPI()
    captured: list[dict] = []
    client = httpx.AsyncClient(base_url=upstream, timeout=60, limits=httpx.Limits(max_connections=256))

    async def chat(request) -> JSONResponse:
        body = await request.json()
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        captured.append({"request": body, "answer": answer})
        visible = {k: v for k, v in answer.items() if k not in ("prompt_token_ids", "token_ids", "logprobs")}
        return JSONResponse(visible)

    chat.__annotations__["request"] = Request  # imported here, so FastAPI cannot look the name up
    app.post("/v1/chat/completions")(chat)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))

    async def main() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn tells it by a flag only
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        pipe.send((f"http://127.0.0.1:{port}", ["-"]))
        await asyncio.to_thread(report_cpu, pipe)
        pipe.send(None)
        server.should_exit = True
        await serving

    asyncio.run(main())


@contextmanager
def running(serve: Callable[..., None], *arguments):
    """(URL, keys, its processor seconds so far) of a server in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, *arguments), daemon=True)
    process.start()
    if not ours.poll(60):
        raise SystemExit(f"{serve.__name__} did not start")
    try:

        def cpu_s() -> float:
            ours.send("cpu")
            return ours.recv()

        yield *ours.recv(), cpu_s
    finally:
        ours.send("end")
        ours.poll(30)
        process.terminate()
        process.join(10)


# -- the load


@dataclass(slots=True)
class Result:
    p50_ms: float
    p99_ms: float
    calls_per_s: float
    first_byte_ms: float = 0.0


class Client:
    """One keep-alive connection, written by hand so that the load costs little beside what it measures."""

    def __init__(self, url: str, key: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._where = (host, int(port))
        self._key = key
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._where, limit=2**22)

    async def call(self, body: bytes) -> tuple[float, float]:
        """Seconds to the first byte of the body and to the last."""
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        self._writer.write(head.encode() + body)
        headers = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in headers[:20]:
            raise SystemExit(f"refused: {headers.decode()} {(await self._reader.read(500)).decode()}")
        first = 0.0
        if b"chunked" in headers:
            while size := int(await self._reader.readline(), 16):
                await self._reader.readexactly(size + 2)
                first = first or time.perf_counter() - began
            await self._reader.readline()
        else:
            length = int(headers.split(b"content-length:")[1].split(b"\r\n")[0])
            await self._reader.readexactly(length)
            first = time.perf_counter() - began
        return first, time.perf_counter() - began

    def close(self) -> None:
        self._writer.close()


NUMBERS = itertools.count()
"""No two calls of a run ask the same."""


def body_of(number: int, prompt_words: int, stream: bool) -> bytes:
    content = f"call {number}: {words(prompt_words, number)}"
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], "stream": stream}).encode()


async def load(
    url: str, keys: list[str], *, calls: int, concurrency: int, prompt_words: int = PROMPT_WORDS, stream: bool = False
) -> Result:
    clients = [Client(url, keys[n % len(keys)]) for n in range(concurrency)]
    await asyncio.gather(*(c.connect() for c in clients))
    bodies = iter([body_of(next(NUMBERS), prompt_words, stream) for _ in range(calls)])
    times: list[tuple[float, float]] = []

    async def drive(client: Client) -> None:
        for body in bodies:
            times.append(await client.call(body))

    began = time.perf_counter()
    await asyncio.gather(*(drive(c) for c in clients))
    took = time.perf_counter() - began
    for client in clients:
        client.close()
    whole = sorted(t for _, t in times)
    return Result(
        p50_ms=statistics.median(whole) * 1000,
        p99_ms=whole[min(len(whole) - 1, int(len(whole) * 0.99))] * 1000,
        calls_per_s=len(whole) / took,
        first_byte_ms=statistics.median(f for f, _ in times) * 1000,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--model", default="", help="a model folder; default: a byte-level tokenizer made on the spot")
    options = parser.parse_args()
    calls = options.calls
    rows: list[tuple[str, str, str]] = []

    with running(serve_ours, options.model, None) as (url, keys, cpu_s):
        asyncio.run(load(url, keys, calls=200, concurrency=4))
        before = cpu_s()
        one = asyncio.run(load(url, keys, calls=calls, concurrency=1))
        one_cpu_ms = (cpu_s() - before) / calls * 1000
        streamed = asyncio.run(load(url, keys, calls=calls // 2, concurrency=1, stream=True))
        many = asyncio.run(load(url, keys, calls=calls * 2, concurrency=64))
    with running(serve_ours, options.model, 2.0) as (url, keys, cpu_s):
        slow = asyncio.run(load(url, keys, calls=256, concurrency=64))
    with running(serve_upstream) as (upstream, *_):
        asyncio.run(load(upstream, ["-"], calls=200, concurrency=4))
        bare = asyncio.run(load(upstream, ["-"], calls=calls, concurrency=1))
        with running(serve_yardstick, upstream) as (url, keys, cpu_s):
            asyncio.run(load(url, keys, calls=200, concurrency=4))
            before = cpu_s()
            plain = asyncio.run(load(url, keys, calls=calls, concurrency=1))
            plain_cpu_ms = (cpu_s() - before) / calls * 1000
            plain_many = asyncio.run(load(url, keys, calls=calls, concurrency=64))

    rows += [
        ("added at 1 concurrent, p50 ms", f"{one.p50_ms:.2f}", f"{plain.p50_ms - bare.p50_ms:.2f}"),
        ("processor time of the server per call, ms", f"{one_cpu_ms:.2f}", f"{plain_cpu_ms:.2f}"),
        ("added at 1 concurrent, p99 ms", f"{one.p99_ms:.2f}", f"{plain.p99_ms - bare.p50_ms:.2f}"),
        ("first byte of a stream, p50 ms", f"{streamed.first_byte_ms:.2f}", ""),
        ("calls/s at 64 concurrent", f"{many.calls_per_s:.0f}", f"{plain_many.calls_per_s:.0f}"),
        ("p50 at 64 concurrent, ms", f"{many.p50_ms:.1f}", f"{plain_many.p50_ms:.1f}"),
        ("p99 at 64 concurrent, ms", f"{many.p99_ms:.1f}", f"{plain_many.p99_ms:.1f}"),
        ("added by 64 in flight on an engine that takes 1 s, p99 ms", f"{slow.p99_ms - 1000:.1f}", ""),
    ]
    print(
        f"{PROMPT_WORDS} prompt words, {ANSWER_WORDS} answer words, {calls} calls, {multiprocessing.cpu_count()} cores"
    )
    print(f"{'':<58}{'ours':>10}{'FastAPI+httpx':>16}")
    for name, ours, theirs in rows:
        print(f"{name:<58}{ours:>10}{theirs:>16}")


if __name__ == "__main__":
    main()
