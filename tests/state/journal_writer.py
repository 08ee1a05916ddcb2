"""A process that writes to a journal and says what was acknowledged; its test kills it.

    python journal_writer.py JOURNAL_FILE CHECKPOINT_STEP

prints a line per acknowledged write: "ended ID SUBMISSION", "planned STEP IDS…", "trained STEP", "checkpoint STEP".
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from state_parts import end_result, finished_of

from swarmtune.episodes import Episode, EpisodeBook
from swarmtune.journal import (
    BatchPlanned,
    BatchTrained,
    CheckpointSaved,
    EpisodeAccepted,
    EpisodeClaimed,
    EventWritten,
    Journal,
)
from swarmtune.protocol import CheckpointView, Event, StepRecord

WRITERS = 6
BATCH = 4


class Writing:
    def __init__(self, path: Path) -> None:
        exists = path.exists()
        self.journal = Journal.open(path) if exists else Journal.create(path, config={"model": "tiny"})
        self.recovery = self.journal.recover(checkpoint_step=int(sys.argv[2])) if exists else None
        self.book = EpisodeBook(time.monotonic, max_open=10_000)
        self.pooled: list[str] = []
        self.step = 0
        self.seq = 0
        self.grown = asyncio.Event()
        if self.recovery is not None:
            self.pooled = [e.episode_id for e in self.recovery.pooled]
            self.step = max([b.step for b in self.recovery.batches], default=self.recovery.step)
            self.seq = self.recovery.last_seq

    async def work(self) -> None:
        await asyncio.gather(*(self.one_client(n) for n in range(WRITERS)), self.trainer())

    async def one_client(self, n: int) -> None:
        while True:
            episode = self.book.claim(f"task-{n}", lease_s=60.0)
            await self.journal.write(EpisodeClaimed(episode))
            await self.finish(episode)

    async def finish(self, episode: Episode) -> None:
        submission = f"sub-{episode.episode_id}"
        self.book.begin_end(episode.episode_id, submission, 1.0)
        result = end_result(episode.episode_id)
        self.seq += 1
        await self.journal.write(
            EpisodeAccepted(episode.episode_id, submission, finished_of(episode, 1.0), result),
            EventWritten(Event(seq=self.seq, at=0.0, kind="episode", data={"id": episode.episode_id})),
        )
        self.book.commit_end(episode.episode_id, result)
        self.pooled.append(episode.episode_id)
        self.grown.set()
        say("ended", episode.episode_id, submission)

    async def trainer(self) -> None:
        for batch in self.recovery.batches if self.recovery is not None else []:
            await self.train(batch.step)
        while True:
            while len(self.pooled) < BATCH:
                self.grown.clear()
                await self.grown.wait()
            ids, self.pooled = tuple(self.pooled[:BATCH]), self.pooled[BATCH:]
            self.step += 1
            await self.journal.write(BatchPlanned(self.step, ids))
            say("planned", str(self.step), *ids)
            await self.train(self.step)

    async def train(self, step: int) -> None:
        record = StepRecord(step=step, weight_version=step, ended_at=0.0, metrics={"reward/mean": 1.0})
        await self.journal.write(BatchTrained(record))
        say("trained", str(step))
        if step % 3 == 0:
            view = CheckpointView(step=step, path=f"step-{step}", at=0.0, bytes=1)
            await self.journal.write(CheckpointSaved(view))
            say("checkpoint", str(step))


def say(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(Writing(Path(sys.argv[1])).work())
