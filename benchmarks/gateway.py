"""What the gateway adds to a call, with capture and journal on, beside the plain shape of a capturing proxy.

    python benchmarks/gateway.py [--model smollm2-135m] [--rounds 5] [--only short many …]

Servers and loads are described in `gateway_servers.py`. Load generator, server and upstream share the machine's cores.
Ours and the yardstick take turns, and of each figure the median of the rounds is told, so that a slow spell of the
machine hits both. Our scripted engine is in the server's process and answers at once: all of our time counts as added,
while of the yardstick's the time of the upstream alone is taken off. Processor time is user and system of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path

from gateway_load import Connected, Measured, converse, drive, question
from gateway_servers import (
    Running,
    long_answer,
    model_folder,
    ours,
    process,
    serve_upstream,
    serve_yardstick,
    short_answer,
    slow_answer,
    text_of,
)

from swarmtune import models

PROMPT, ANSWER = 500, 100
"""Tokens of a short call."""


class Table:
    def __init__(self) -> None:
        print(f"{'':<66}{'wanted':>10}{'ours':>10}{'plain':>10}", flush=True)

    def row(self, name: str, wanted: str, value: float, plain: float | None = None, digits: int = 2) -> None:
        other = f"{plain:.{digits}f}" if plain is not None else ""
        print(f"{name:<66}{wanted:>10}{value:>10.{digits}f}{other:>10}", flush=True)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


@contextmanager
def plain_shape() -> Iterator[tuple[Running, Running]]:
    """(upstream, yardstick before it)."""
    with process(serve_upstream) as upstream, process(serve_yardstick, upstream.url) as yardstick:
        yield upstream, yardstick


def run(
    url: str,
    keys: Sequence[str],
    calls: int,
    concurrency: int,
    *,
    tokens: int = PROMPT,
    stream: bool = False,
    begin_within_s: float = 0.0,
) -> Measured:
    work = [(key, question(tokens, stream=stream)) for key in islice(cycle(keys), calls)]
    return asyncio.run(drive(url, work, concurrency, begin_within_s=begin_within_s))


# -- the lines


def short(folder: Path, rounds: int, table: Table) -> None:
    """One call at a time."""
    calls = 200
    with ours(folder, short_answer) as server, plain_shape() as (upstream, yardstick):
        keys = [key for _, key in server.claim(64)]
        for url in (server.url, upstream.url, yardstick.url):
            run(url, keys, 600, 4)
        mine, cpu, plain, plain_cpu, bare, streamed = [], [], [], [], [], []
        for _ in range(rounds):
            before = server.cpu_s()
            mine.append(run(server.url, keys, calls, 1))
            cpu.append((server.cpu_s() - before) / calls * 1000)
            before = yardstick.cpu_s()
            plain.append(run(yardstick.url, keys, calls, 1))
            plain_cpu.append((yardstick.cpu_s() - before) / calls * 1000)
            bare.append(run(upstream.url, keys, calls, 1))
            streamed.append(run(server.url, keys, calls, 1, stream=True))
    alone = median([m.p50_ms for m in bare])
    row = table.row
    row(
        "500 + 100 tokens, 1 at a time: added, p50 ms",
        "<= 1.0",
        *(median([m.p50_ms for m in s]) - less for s, less in ((mine, 0), (plain, alone))),
    )
    row(
        "  best round",
        "",
        *(min(m.p50_ms for m in s) - less for s, less in ((mine, 0), (plain, min(m.p50_ms for m in bare)))),
    )
    row("  p99 ms", "", *(median([m.p99_ms for m in s]) - less for s, less in ((mine, 0), (plain, alone))))
    row("  processor time of the server per call, ms", "", median(cpu), median(plain_cpu))
    row("  streamed: first byte, p50 ms", "<= 3", median([m.first_byte_ms for m in streamed]))


def many(folder: Path, rounds: int, table: Table) -> None:
    """64 calls at a time."""
    calls = 640
    with ours(folder, short_answer) as server, plain_shape() as (_, yardstick):
        keys = [key for _, key in server.claim(64)]
        for url in (server.url, yardstick.url):
            run(url, keys, 640, 64)
        mine, cpu, plain, plain_cpu = [], [], [], []
        for _ in range(rounds):
            before = server.cpu_s()
            mine.append(run(server.url, keys, calls * 2, 64))
            cpu.append((server.cpu_s() - before) / calls / 2 * 1000)
            before = yardstick.cpu_s()
            plain.append(run(yardstick.url, keys, calls, 64))
            plain_cpu.append((yardstick.cpu_s() - before) / calls * 1000)
    row = table.row
    row("64 at a time: calls/s", ">= 1000", *(median([m.per_s for m in s]) for s in (mine, plain)), digits=0)
    row("  best round", "", *(max(m.per_s for m in s) for s in (mine, plain)), digits=0)
    row(
        "  times the plain shape's, median of the rounds",
        ">= 5",
        median([a.per_s / b.per_s for a, b in zip(mine, plain, strict=True)]),
    )
    row("  p50 ms", "", *(median([m.p50_ms for m in s]) for s in (mine, plain)))
    row("  p99 / p50", "<= 3", *(median([m.p99_ms / m.p50_ms for m in s]) for s in (mine, plain)))
    row("  processor time of the server per call, ms", "", median(cpu), median(plain_cpu))


def slow(folder: Path, rounds: int, table: Table) -> None:
    """64 in flight on an engine that takes a second: asked one after another, and all in the same moment."""
    with ours(folder, slow_answer, **{"engine.script_tokens_per_s": 2.0}) as server, plain_shape() as (_, yardstick):
        keys = [key for _, key in server.claim(64)]
        run(server.url, keys, 64, 64)
        run(yardstick.url, keys, 64, 64)
        mine, plain, burst, plain_burst = [], [], [], []
        for _ in range(rounds):
            mine.append(run(server.url, keys, 256, 64, begin_within_s=1.0))
            plain.append(run(f"{yardstick.url}/slow", keys, 256, 64, begin_within_s=1.0))
            burst.append(run(server.url, keys, 64, 64))
            plain_burst.append(run(f"{yardstick.url}/slow", keys, 64, 64))

    def added(p: str, *both: list[Measured], of: Callable[[Sequence[float]], float] = median) -> Iterator[float]:
        return (of([getattr(m, p) for m in series]) - 1000 for series in both)

    table.row("64 in flight on an engine that takes 1 s: added, p99 ms", "<= 20", *added("p99_ms", mine, plain))
    table.row("  best round", "", *added("p99_ms", mine, plain, of=min))
    table.row("  p50 ms", "", *added("p50_ms", mine, plain))
    table.row("  all 64 asked in the same moment: p99 ms", "", *added("p99_ms", burst, plain_burst))


def long(folder: Path, rounds: int, table: Table) -> None:
    """16,000 + 1,000 tokens: going on with a conversation (each call another last message), and prompts never seen."""
    with ours(folder, long_answer) as server, plain_shape() as (_, yardstick):
        keys = [key for _, key in server.claim(16)]
        histories = [history_of(server.url, key) for key in keys]

        def going_on(count: int) -> list[tuple[str, bytes]]:
            return [(keys[n % 16], question(200, history=histories[n % 16])) for n in range(count)]

        mine, plain, fresh = [], [], []
        asyncio.run(drive(server.url, going_on(32), 16))
        for _ in range(rounds):
            mine.append(asyncio.run(drive(server.url, going_on(200), 16)))
            plain.append(asyncio.run(drive(f"{yardstick.url}/long", going_on(100), 16)))
            fresh.append(run(server.url, keys, 50, 16, tokens=16_000))
    table.row(
        "16,000 + 1,000 tokens, 16 at a time, going on: calls/s",
        ">= 200",
        *(median([m.per_s for m in s]) for s in (mine, plain)),
        digits=0,
    )
    table.row("  best round", "", *(max(m.per_s for m in s) for s in (mine, plain)), digits=0)
    table.row("  prompts of which nothing was seen before: calls/s", "", median([m.per_s for m in fresh]), digits=0)


def history_of(url: str, key: str) -> list[dict[str, str]]:
    """A conversation of about 15,800 tokens that the server has answered: 15 answers of 1,000."""

    async def talk() -> list[dict[str, str]]:
        connection = Connected(url)
        await connection.open()
        messages = [{"role": "system", "content": text_of(200, 0)}]
        for number in range(15):
            messages.append({"role": "user", "content": text_of(40, number)})
            _, _, answer = await connection.chat(key, json.dumps({"model": "m", "messages": messages}).encode())
            messages.append({"role": "assistant", "content": json.loads(answer)["choices"][0]["message"]["content"]})
        connection.close()
        return messages

    return asyncio.run(talk())


def conversation(folder: Path, rounds: int, table: Table) -> None:
    """One that grows to 50,000 tokens in 100 turns."""
    with ours(folder, short_answer) as server, plain_shape() as (upstream, yardstick):
        mine, plain, bare = [], [], []
        for _ in range(rounds):
            mine.append(asyncio.run(converse(server.url, server.claim(1)[0][1], 103, 400)))
            plain.append(asyncio.run(converse(yardstick.url, "-", 103, 400)))
            bare.append(asyncio.run(converse(upstream.url, "-", 103, 400)))

    def at(turn: int, series: list[list[float]], less: float = 0.0) -> float:
        return median([median(spent[turn - 3 : turn + 3]) for spent in series]) * 1000 - less

    bare5, bare100 = at(5, bare), at(100, bare)
    table.row(
        "a conversation of 100 turns, 50,000 tokens: added at turn 100, ms",
        "<= 5",
        at(100, mine),
        at(100, plain, bare100),
    )
    table.row("  at turn 5", "", at(5, mine), at(5, plain, bare5))
    table.row("  difference", "<= 1.5", at(100, mine) - at(5, mine), at(100, plain, bare100) - at(5, plain, bare5))


def memory(folder: Path, rounds: int, table: Table) -> None:
    """Of episodes that live, and over 20,000 calls of episodes that end."""
    with ours(folder, short_answer) as server, plain_shape() as (_, yardstick):
        keys = [key for _, key in server.claim(64)]
        run(server.url, keys, 1000, 8)
        run(yardstick.url, keys, 1000, 8)
        before = server.memory_mb(), yardstick.memory_mb()
        run(server.url, keys, 4000, 8)
        run(yardstick.url, keys, 2000, 8)
        live = server.memory_mb() - before[0]
        plain = yardstick.memory_mb() - before[1]
    table.row("memory per 1,000 calls of live episodes, MB", "<= 10", live / 4, plain / 2)
    with ours(folder, short_answer, batch_tasks=2, repeats=8, **{"batching.drain_s": 0.0}) as server:
        sizes = []
        for _ in range(10):
            finish_episodes(server, 96, 21)  # whole batches: what is left of one would keep the next claims waiting
            sizes.append(server.memory_mb())
    told = " ".join(f"{size:.0f}" for size in sizes)
    table.row("  growth from call 4,000 to call 20,000 of episodes that end, MB", "flat", sizes[-1] - sizes[1])
    print(f"  MB after each 2,000 calls: {told}")


def finish_episodes(server: Running, count: int, calls: int) -> None:
    """Episodes of so many calls each, 8 at a time; the server trains a step after every 16."""

    async def one(number: int, connection: Connected) -> None:
        claim = json.dumps({"task_id": f"t{number // 8}", "wait_s": 30}).encode()
        grant = json.loads((await connection.post("/v1/episodes", "-", claim))[2])
        for _ in range(calls):
            await connection.chat(grant["api_key"], question(PROMPT))
        end = json.dumps({"reward": float(number % 2), "submission_id": uuid.uuid4().hex}).encode()
        await connection.post(f"/v1/episodes/{grant['episode_id']}/end", "-", end)

    async def worker(numbers: Iterator[int]) -> None:
        connection = Connected(server.url)
        await connection.open()
        for number in numbers:
            await one(number, connection)
        connection.close()

    async def everyone() -> None:
        numbers = iter(range(count))
        await asyncio.gather(*(worker(numbers) for _ in range(8)))

    asyncio.run(everyone())


def idle(folder: Path, rounds: int, table: Table) -> None:
    """2,000 open episodes that send a heartbeat every 10 s each."""
    count, every_s, seconds = 2000, 10.0, 12.0
    with ours(folder, short_answer) as server:
        before = server.memory_mb()
        episodes = [episode_id for episode_id, _ in server.claim(count)]
        size = server.memory_mb() - before
        began = server.cpu_s()
        took = asyncio.run(heartbeats(server.url, episodes, every_s, seconds))
        share = (server.cpu_s() - began) / seconds
    took.sort()
    table.row("2,000 open episodes with a heartbeat every 10 s: p99 ms", "<= 50", took[int(len(took) * 0.99)] * 1000)
    table.row("  p50 ms", "", median(took) * 1000)
    table.row("  memory, MB", "stated", size, digits=1)
    table.row("  share of one processor", "", share)


async def heartbeats(url: str, episodes: list[str], every_s: float, seconds: float) -> list[float]:
    connections = [Connected(url) for _ in range(32)]
    await asyncio.gather(*(c.open() for c in connections))
    free: asyncio.Queue[Connected] = asyncio.Queue()
    for connection in connections:
        free.put_nowait(connection)
    took: list[float] = []
    loop = asyncio.get_running_loop()

    async def beat(episode: str) -> None:
        due = loop.time()
        connection = await free.get()
        await connection.post(f"/v1/episodes/{episode}/heartbeat", "-", b"")
        took.append(loop.time() - due)
        free.put_nowait(connection)

    beats: set[asyncio.Task[None]] = set()
    began = loop.time()
    for number in range(int(len(episodes) / every_s * seconds)):
        await asyncio.sleep(max(0.0, began + number * every_s / len(episodes) - loop.time()))
        beats.add(asyncio.create_task(beat(episodes[number % len(episodes)])))
    await asyncio.gather(*beats)
    for connection in connections:
        connection.close()
    return took


LINES: dict[str, Callable[[Path, int, Table], None]] = {
    line.__name__: line for line in (short, many, slow, long, conversation, memory, idle)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a catalogue name or a Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=LINES, default=list(LINES))
    options = parser.parse_args()
    print(
        f"{multiprocessing.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.rounds} rounds, {options.model}"
    )
    table = Table()
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(models.resolve(options.model), Path(scratch) / "model")
        for name in options.only:
            LINES[name](folder, options.rounds, table)
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
