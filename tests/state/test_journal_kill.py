"""What was acknowledged before kill -9 is there after it, and only once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from swarmtune.journal import Journal, JournalError, Recovery

HERE = Path(__file__).parent
KILLS = 20


def start_writer(journal: Path, checkpoint_step: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HERE / "journal_writer.py"), str(journal), str(checkpoint_step)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1] / "core")},
    )


def acknowledged_until_killed(writer: subprocess.Popen[str], lines: int) -> list[list[str]]:
    """Read that many lines, kill, and return all that it still got out."""
    assert writer.stdout is not None
    said = [writer.stdout.readline() for _ in range(lines)]
    os.kill(writer.pid, signal.SIGKILL)
    said += writer.stdout.readlines()
    writer.wait()
    return [line.split() for line in said if line.endswith("\n")]


class Acknowledged:
    """Everything the killed writers were told is on disk."""

    def __init__(self) -> None:
        self.submissions: dict[str, str] = {}
        self.batches: dict[int, list[str]] = {}
        self.trained = 0
        self.checkpoint = 0

    def add(self, lines: list[list[str]]) -> None:
        for what, *rest in lines:
            if what == "ended":
                self.submissions[rest[0]] = rest[1]
            elif what == "planned":
                self.batches[int(rest[0])] = rest[1:]
            elif what == "trained":
                self.trained = int(rest[0])
            else:
                self.checkpoint = int(rest[0])


def check(recovery: Recovery, told: Acknowledged) -> None:
    closed = {e.episode_id: e for e in recovery.closed}
    for episode_id, submission in told.submissions.items():
        episode = closed[episode_id]
        assert (episode.state, episode.submission_id, episode.reward) == ("ended", submission, 1.0)
        assert episode.result is not None and episode.result.outcome == "admitted"
    again = [e.episode_id for b in recovery.batches for e in b.episodes]
    pooled = [e.episode_id for e in recovery.pooled]
    assert len(set(again + pooled)) == len(again) + len(pooled), "no episode twice"
    first = recovery.step + 1
    assert [b.step for b in recovery.batches] == list(range(first, first + len(recovery.batches)))
    done = {i for step, ids in told.batches.items() if step <= recovery.step for i in ids}
    assert set(told.submissions) - done <= set(again + pooled), "no accepted episode is lost"
    assert not done & set(again + pooled), "what a checkpoint holds is not trained again"
    for batch in recovery.batches:
        ids = [e.episode_id for e in batch.episodes]
        assert told.batches.setdefault(batch.step, ids) == ids, "trained again exactly as it was planned"
    assert all(e.samples[0].logprobs == [0.0, -0.5, -0.5] for b in recovery.batches for e in b.episodes)


def test_everything_acknowledged_survives_kill_nine(journal_path):
    told, chance = Acknowledged(), random.Random(0)
    for _ in range(KILLS):
        writer = start_writer(journal_path, told.checkpoint)
        told.add(acknowledged_until_killed(writer, chance.randint(1, 40)))
        journal = Journal.open(journal_path)
        # One may be on disk that the writer was not told of before it died: the newest counts, as at a restart.
        newest = max((c.step for c in asyncio.run(journal.checkpoints())), default=0)
        assert newest >= told.checkpoint
        told.checkpoint = newest
        check(journal.recover(checkpoint_step=newest), told)
        journal.close()
    assert len(told.submissions) > KILLS and told.checkpoint > 0


def test_a_live_server_keeps_a_second_one_out_and_its_death_lets_it_in(journal_path):
    writer = start_writer(journal_path, 0)
    assert writer.stdout is not None and writer.stdout.readline()
    with pytest.raises(JournalError, match=f"process {writer.pid}"):
        Journal.open(journal_path)
    acknowledged_until_killed(writer, 1)
    Journal.open(journal_path).close()
