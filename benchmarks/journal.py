"""How many acknowledged writes a second the journal takes, and how long each waits.

    python benchmarks/journal.py [--seconds 3] [--folder DIR]

A write is what a finished episode costs: its claim, then its end, samples and an event in one transaction; both count.
Two sizes of episode: short (80 tokens) and long (50,000 tokens). The comparison, in the same run and folder, is the
plain way: the same bytes, one INSERT and one commit a write, on the caller's thread. DIR should be on the disk that
runs live on, for what is measured is mostly its fsync. Latency is that of the end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "core"))

from swarmtune.episodes import EpisodeBook
from swarmtune.journal import EpisodeAccepted, EpisodeClaimed, EventWritten, Journal, pack_finished
from swarmtune.protocol import EndResult, Event
from swarmtune.types import FinishedEpisode, Sample

SIZES = {"short": (80, 16), "long": (50_000, 5_000)}
"""Name → tokens of an episode, and how many of them were sampled."""
WRITERS = (1, 64)


@dataclass
class Measured:
    name: str
    writes: int
    seconds: float
    latencies_ms: list[float]

    def row(self) -> str:
        quantiles = statistics.quantiles(self.latencies_ms, n=100) if len(self.latencies_ms) > 1 else [0.0] * 99
        rate = self.writes / self.seconds
        return (
            f"{self.name:<34} {rate:>9.0f} {quantiles[49]:>9.2f} {quantiles[98]:>9.2f} {max(self.latencies_ms):>9.2f}"
        )


def make_finished(episode_id: str, tokens: int, sampled: int) -> FinishedEpisode:
    chance = random.Random(0)
    mask = [0] * (tokens - sampled) + [1] * sampled
    sample = Sample(
        sample_id=f"{episode_id}/0",
        episode_id=episode_id,
        task_id="t",
        token_ids=[min(49_000, int(chance.paretovariate(0.5))) for _ in range(tokens)],
        loss_mask=mask,
        logprobs=[-chance.expovariate(2.0) * m for m in mask],
        weight_versions=[0 if m else -1 for m in mask],
    )
    return FinishedEpisode(episode_id, "t", 1.0, [sample])


async def measure_journal(path: Path, size: str, writers: int, seconds: float) -> Measured:
    journal = Journal.create(path, config={})
    book = EpisodeBook(time.monotonic, max_open=10_000_000)
    template = make_finished("e", *SIZES[size])
    latencies: list[float] = []
    seq = 0

    async def write_on(until: float) -> None:
        nonlocal seq
        while time.perf_counter() < until:
            episode = book.claim("t", lease_s=60.0)
            await journal.write(EpisodeClaimed(episode))
            finished = FinishedEpisode(episode.episode_id, "t", 1.0, template.samples)
            result = EndResult(episode_id=episode.episode_id, outcome="admitted")
            seq += 1
            began = time.perf_counter()
            await journal.write(
                EpisodeAccepted(episode.episode_id, "s", finished, result),
                EventWritten(Event(seq=seq, at=0.0, kind="episode", data={"id": episode.episode_id})),
            )
            latencies.append(1000 * (time.perf_counter() - began))

    began = time.perf_counter()
    await asyncio.gather(*(write_on(began + seconds) for _ in range(writers)))
    took = time.perf_counter() - began
    journal.close()

    return Measured(f"journal, {size}, {writers} writers", 2 * len(latencies), took, latencies)


def measure_plain(path: Path, size: str, seconds: float) -> Measured:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, blob BLOB)")
    template = make_finished("e", *SIZES[size])
    latencies = []
    began = time.perf_counter()
    while time.perf_counter() < began + seconds:
        start = time.perf_counter()
        db.execute("INSERT INTO samples (blob) VALUES (?)", (pack_finished(template),))
        latencies.append(1000 * (time.perf_counter() - start))
    took = time.perf_counter() - began
    db.close()
    return Measured(f"one commit a write, {size}", len(latencies), took, latencies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="per line")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where the journals are written for the run")
    options = parser.parse_args()
    print(f"{'acknowledged writes':<34} {'writes/s':>9} {'p50 ms':>9} {'p99 ms':>9} {'max ms':>9}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for size, (tokens, sampled) in SIZES.items():
            for writers in WRITERS:
                path = Path(folder) / f"{size}-{writers}.sqlite"
                print(asyncio.run(measure_journal(path, size, writers, options.seconds)).row())
            print(measure_plain(Path(folder) / f"{size}-plain.sqlite", size, options.seconds).row())
            stored = len(pack_finished(make_finished("e", tokens, sampled)))
            print(f"  {size}: {tokens} tokens, {stored} bytes stored, {stored / tokens:.1f} bytes a token")


if __name__ == "__main__":
    main()
