"""What the journal keeps, what it gives back after a restart, and how it refuses."""

from __future__ import annotations

import asyncio
import math
import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from state_parts import FakeClock, end_result, finished_of

from swarmtune.episodes import Episode, EpisodeBook
from swarmtune.journal import (
    RESTART_REASON,
    BatchPlanned,
    BatchTrained,
    CheckpointRemoved,
    CheckpointSaved,
    ClientRegistered,
    ClientRemoved,
    EpisodeAccepted,
    EpisodeAnswered,
    EpisodeClaimed,
    EpisodeClosed,
    EpisodesDropped,
    EventWritten,
    Journal,
    JournalClosed,
    JournalError,
    MetaSet,
    Recovery,
    pack_finished,
    read_history,
    unpack_finished,
)
from swarmtune.protocol import CheckpointView, Code, EndResult, EpisodeState, Event, StepRecord
from swarmtune.types import FinishedEpisode, Sample, TrainBatch

CONFIG = {"model": "tiny", "repeats": 2, "optim": {"lr": 1e-6}}


class Written:
    """A journal and a book that write as a server does."""

    def __init__(self, path: Path, **options: int) -> None:
        self.journal = Journal.create(path, config=CONFIG, **options)
        self.book = EpisodeBook(FakeClock(), max_open=1000)

    async def claim(self, task_id: str = "t", kind="train") -> Episode:
        episode = self.book.claim(task_id, lease_s=5.0, client="x", weight_version=2, step=3, kind=kind)
        await self.journal.write(EpisodeClaimed(episode))
        return episode

    async def accept(self, episode: Episode | None = None, submission: str = "s", reward: float = 1.0) -> Episode:
        episode = episode or await self.claim()
        await self.journal.write(accepted(episode, submission, reward))
        return episode

    async def train(self, step: int, ids: list[str]) -> None:
        await self.journal.write(BatchPlanned(step, tuple(ids)))
        await self.journal.write(BatchTrained(record(step)))

    def restart(self, checkpoint_step: int = 0) -> Recovery:
        self.journal.close()
        self.journal = Journal.open(self.journal.path)
        return self.journal.recover(checkpoint_step=checkpoint_step)


def accepted(episode: Episode, submission: str = "s", reward: float = 1.0) -> EpisodeAccepted:
    result = end_result(episode.episode_id)
    return EpisodeAccepted(episode.episode_id, submission, finished_of(episode, reward), result)


def record(step: int) -> StepRecord:
    return StepRecord(step=step, weight_version=step, ended_at=1.5, metrics={"reward/mean": 0.5, "kl": math.inf})


def checkpoint(step: int) -> CheckpointSaved:
    return CheckpointSaved(CheckpointView(step=step, path=f"checkpoints/{step}", at=2.5, bytes=10))


def ids_of(episodes) -> list[str]:
    return [e.episode_id for e in episodes]


@pytest.fixture
def written(journal_path):
    made = Written(journal_path)
    yield made
    made.journal.close()


# -- recovery


async def test_a_new_run_recovers_as_empty(written):
    recovery = written.restart()
    assert recovery.config == CONFIG
    assert (recovery.batches, recovery.pooled, recovery.aborted, recovery.closed) == ([], [], [], [])
    assert (recovery.last_seq, recovery.steps, recovery.checkpoints, recovery.meta) == (0, [], [], {})


async def test_pooled_episodes_come_back_whole_and_in_order_of_their_ends(written):
    first, second = await written.claim("a"), await written.claim("b")
    await written.accept(second, reward=0.25)
    await written.accept(first)
    recovery = written.restart()
    assert recovery.pooled == [finished_of(second, 0.25), finished_of(first, 1.0)]


async def test_what_ends_after_a_restart_comes_after_what_ended_before(written):
    before = [(await written.accept()).episode_id for _ in range(3)]
    written.restart()
    after = (await written.accept()).episode_id
    recovery = written.restart()
    assert ids_of(recovery.pooled) == ids_of(recovery.closed) == [*before, after]


async def test_open_episodes_are_aborted_by_the_restart_on_disk_too(written):
    opened = await written.claim()
    for _ in range(2):
        recovery = written.restart()
        assert [(e.episode_id, e.state, e.reason) for e in recovery.closed] == [
            (opened.episode_id, EpisodeState.ABORTED, RESTART_REASON)
        ]
    assert recovery.aborted == []


async def test_batches_after_the_checkpoint_are_trained_again_exactly_as_they_were(written):
    ids = [(await written.accept()).episode_id for _ in range(7)]
    await written.train(1, ids[:2])
    await written.journal.write(checkpoint(1))
    await written.train(2, [ids[3], ids[2]])
    await written.journal.write(BatchPlanned(3, (ids[5], ids[4])))
    for _ in range(2):
        recovery = written.restart(checkpoint_step=1)
        assert [(b.step, ids_of(b.episodes)) for b in recovery.batches] == [
            (2, [ids[3], ids[2]]),
            (3, [ids[5], ids[4]]),
        ]
        assert ids_of(recovery.pooled) == [ids[6]]
        assert recovery.step == 1
        assert [s.step for s in recovery.steps] == [1]
        assert recovery.checkpoints == [checkpoint(1).checkpoint]
    await written.train(2, [ids[3], ids[2]])
    assert [s.step for s in await written.journal.steps_after(1)] == [2]


async def test_a_step_whose_record_was_lost_counts_as_trained_when_its_checkpoint_is_on_disk(written):
    ids = [(await written.accept()).episode_id for _ in range(2)]
    await written.journal.write(BatchPlanned(1, tuple(ids)))
    recovery = written.restart(checkpoint_step=1)
    assert (recovery.batches, recovery.pooled, recovery.step) == ([], [], 1)


async def test_samples_are_deleted_only_with_a_checkpoint_at_or_after_their_step(written, journal_path):
    ids = [(await written.accept()).episode_id for _ in range(3)]
    for step, episode_id in enumerate(ids, start=1):
        await written.train(step, [episode_id])
    assert stored_samples(journal_path) == set(ids)
    await written.journal.write(checkpoint(2))
    assert stored_samples(journal_path) == {ids[2]}
    with pytest.raises(JournalError, match="step 2 cannot be trained again from checkpoint 1"):
        written.restart(checkpoint_step=1)
    assert ids_of(written.restart(checkpoint_step=2).batches[0].episodes) == [ids[2]]


def stored_samples(path: Path) -> set[str]:
    with sqlite3.connect(path) as db:
        return {i for (i,) in db.execute("SELECT episode_id FROM samples")}


async def test_dropped_episodes_are_neither_pooled_nor_trained(written):
    ids = [(await written.accept()).episode_id for _ in range(4)]
    await written.journal.write(BatchPlanned(1, (ids[0],)))
    await written.journal.write(BatchPlanned(2, (ids[1], ids[2])))
    await written.journal.write(EpisodesDropped((ids[0], ids[1], ids[3]), "zero_variance"))
    recovery = written.restart()
    assert [(b.step, ids_of(b.episodes)) for b in recovery.batches] == [(2, [ids[2]])]
    assert recovery.pooled == []
    with pytest.raises(JournalError, match="no samples"):
        await written.journal.write(EpisodesDropped((ids[0],), "stale"))


async def test_a_repeated_end_after_the_crash_gets_the_same_answer(written):
    good = await written.accept(submission="s1", reward=0.5)
    stale = await written.claim()
    refused = EndResult(episode_id=stale.episode_id, outcome="rejected", code=Code.STALE, message="too old")
    await written.journal.write(EpisodeAnswered(stale.episode_id, "s2", 1.0, refused))
    test = await written.claim(kind="evaluate")
    told = EndResult(episode_id=test.episode_id, outcome="evaluated", samples=1)
    await written.journal.write(EpisodeAnswered(test.episode_id, "s3", 0.0, told))
    aborted = await written.claim()
    written.book.abort(aborted.episode_id, "tool died")
    await written.journal.write(EpisodeClosed(aborted))

    book = EpisodeBook(FakeClock(), max_open=10)
    for episode in written.restart().closed:
        book.restore(episode)
    assert book.end(good.episode_id, "s1", 0.5, refused) == end_result(good.episode_id)
    assert book.end(stale.episode_id, "s2", 1.0, told) == refused
    assert book.end(test.episode_id, "s3", 0.0, refused) == told
    assert (book.get(aborted.episode_id).state, book.get(aborted.episode_id).reason) == ("aborted", "tool died")
    with pytest.raises(Exception, match="episode") as refusal:
        book.by_key(good.key or "")
    assert refusal.value.code is Code.EPISODE_OVER  # type: ignore[attr-defined]


async def test_only_the_last_closed_episodes_are_given_back(written):
    ids = [(await written.accept()).episode_id for _ in range(5)]
    written.journal.close()
    written.journal = Journal.open(written.journal.path)
    assert ids_of(written.journal.recover(remember=2).closed) == ids[3:]


async def test_events_clients_checkpoints_and_facts_come_back(written):
    events = [Event(seq=i, at=float(i), kind="step", data={"step": i, "kl": math.inf}) for i in (1, 2, 5)]
    await written.journal.write(
        *(EventWritten(e) for e in events),
        ClientRegistered("x", 3),
        ClientRegistered("y", None),
        ClientRegistered("x", 2),
        ClientRegistered("z", 1),
        ClientRemoved("z"),
        checkpoint(1),
        checkpoint(2),
        CheckpointRemoved(1),
        MetaSet("seed", [1, "two"]),
    )
    assert await written.journal.events_after(1) == events[1:]
    assert await written.journal.events_after(0, limit=2) == events[:2]
    recovery = written.restart()
    assert recovery.clients == {"x": 2, "y": None}
    assert (recovery.last_seq, recovery.meta) == (5, {"seed": [1, "two"]})
    assert [c.step for c in recovery.checkpoints] == [2]


async def test_secrets_are_not_on_disk(written, journal_path):
    episode = await written.accept()
    written.journal.close()
    assert (episode.key or "?").encode() not in journal_path.read_bytes()


# -- samples as bytes

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def finished_episodes(draw):
    def sample():
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), max_size=20))
        size = len(tokens)
        per_token = lambda values: draw(st.lists(values, min_size=size, max_size=size))  # noqa: E731 - a local shorthand
        return Sample(
            sample_id=draw(st.text(max_size=8)),
            episode_id="e",
            task_id="t",
            token_ids=tokens,
            loss_mask=per_token(st.integers(0, 1)),
            logprobs=per_token(numbers),
            weight_versions=per_token(st.integers(-1, 10**6)),
            context_exact=draw(st.sampled_from([None, [1] * size])),
            temperature=draw(numbers),
            call_ids=draw(st.lists(st.text(max_size=4), max_size=3)),
            parent_id=draw(st.sampled_from([None, "p"])),
        )

    return FinishedEpisode(
        episode_id="e",
        task_id="t",
        reward=draw(st.floats(allow_nan=False)),
        samples=[sample() for _ in range(draw(st.integers(0, 3)))],
        metrics=draw(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3)),
        client=draw(st.sampled_from([None, "x"])),
        weight_version=draw(st.integers(0, 10**6)),
    )


@settings(deadline=None)
@given(finished_episodes())
def test_an_episode_comes_back_from_its_bytes_equal(finished):
    assert unpack_finished(pack_finished(finished)) == finished


# -- writing


async def test_many_writers_share_a_commit(written):
    episodes = [written.book.claim("t", lease_s=5.0) for _ in range(300)]
    commits = count_commits(written.journal)
    await asyncio.gather(*(written.journal.write(EpisodeClaimed(e), accepted(e)) for e in episodes))
    assert len(commits) < 30
    assert len(written.restart().pooled) == 300


def count_commits(journal: Journal) -> list[int]:
    sizes: list[int] = []
    write = journal._store.write
    journal._store.write = lambda entries: (sizes.append(len(entries)), write(entries))[1]
    return sizes


async def test_one_bad_write_costs_the_others_nothing(written):
    good = [written.book.claim("t", lease_s=5.0) for _ in range(20)]
    stranger = written.book.claim("t", lease_s=5.0)
    writes = [written.journal.write(EpisodeClaimed(e), accepted(e)) for e in good]
    writes.insert(10, written.journal.write(MetaSet("half", 1), accepted(stranger)))
    writes.insert(15, written.journal.write(MetaSet("unstorable", object())))
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    refused = {i: str(o) for i, o in enumerate(outcomes) if o is not None}
    assert set(refused) == {10, 15}
    assert "never claimed" in refused[10] and "cannot be stored" in refused[15]
    recovery = written.restart()
    assert ids_of(recovery.pooled) == ids_of(good)
    assert recovery.meta == {}


async def test_writes_take_effect_in_the_order_of_their_calls(written):
    await asyncio.gather(*(written.journal.write(MetaSet("last", n)) for n in range(50)))
    assert written.restart().meta == {"last": 49}


async def test_a_write_whose_caller_was_cancelled_stands_and_may_be_repeated(written):
    episode = await written.claim()
    task = asyncio.create_task(written.journal.write(accepted(episode, "s1")))
    await asyncio.sleep(0)
    task.cancel()
    await written.journal.barrier()
    await written.journal.write(accepted(episode, "s1", reward=0.5))
    with pytest.raises(JournalError, match="closed already"):
        await written.journal.write(accepted(episode, "s2"))
    assert [e.reward for e in written.restart().pooled] == [0.5]


async def test_a_cancelled_caller_does_not_keep_the_others_of_its_group_waiting(written):
    tasks = [asyncio.create_task(written.journal.write(MetaSet(f"k{n}", n))) for n in range(20)]
    await asyncio.sleep(0)
    for task in tasks[:10]:
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks[10:]), timeout=30)
    assert len(written.restart().meta) == 20


async def test_an_episode_is_planned_into_one_batch_only(written):
    ids = [(await written.accept()).episode_id for _ in range(3)]
    await written.journal.write(BatchPlanned(1, (ids[0], ids[1])))
    with pytest.raises(JournalError, match="another batch"):
        await written.journal.write(BatchPlanned(2, (ids[1],)))
    await written.journal.write(BatchPlanned.of(TrainBatch(1, [finished_of(e, 1.0) for e in [named(ids[2])]])))
    await written.journal.write(BatchTrained(record(1)))
    with pytest.raises(JournalError, match="trained already"):
        await written.journal.write(BatchPlanned(1, (ids[0],)))
    with pytest.raises(JournalError, match="never planned"):
        await written.journal.write(BatchTrained(record(9)))
    recovery = written.restart()
    assert ids_of(recovery.batches[0].episodes) == [ids[2]] and ids_of(recovery.pooled) == ids[:2]


def named(episode_id: str) -> Episode:
    episode = EpisodeBook(FakeClock(), max_open=1).claim("t", lease_s=1.0)
    episode.episode_id = episode_id
    return episode


async def test_an_episode_is_closed_once(written):
    episode = await written.accept()
    with pytest.raises(JournalError, match="not aborted"):
        await written.journal.write(EpisodeClosed(episode))
    episode = await written.claim()
    written.book.abort(episode.episode_id)
    await written.journal.write(EpisodeClosed(episode))
    with pytest.raises(JournalError, match="closed already"):
        await written.journal.write(EpisodeClosed(episode))


async def test_after_close_nothing_is_taken_and_what_was_queued_is_on_disk(journal_path):
    written = Written(journal_path)
    writes = [asyncio.create_task(written.journal.write(MetaSet(f"k{n}", n))) for n in range(5)]
    await asyncio.sleep(0)
    written.journal.close()
    written.journal.close()
    await asyncio.gather(*writes)
    with pytest.raises(JournalClosed):
        await written.journal.write(MetaSet("k", 1))
    assert len(written.restart().meta) == 5
    written.journal.close()


# -- a full disk and unusable files


async def test_a_full_disk_refuses_with_no_space_and_keeps_what_was_acknowledged(journal_path):
    written = Written(journal_path, max_bytes=200_000)
    kept, error = [], None
    for _ in range(1000):
        episode = written.book.claim("t", lease_s=5.0)
        try:
            await written.journal.write(EpisodeClaimed(episode), big(episode))
        except JournalError as full:
            error = full
            break
        kept.append(episode.episode_id)
    assert error is not None and error.code is Code.NO_SPACE and "free some" in str(error)
    assert kept
    recovery = written.restart()  # opened without the limit: there is space again
    assert ids_of(recovery.pooled) == kept
    await written.accept()
    written.journal.close()


def big(episode: Episode) -> EpisodeAccepted:
    finished = finished_of(episode, 1.0)
    finished.samples[0].call_ids = [os.urandom(10_000).hex()]
    return EpisodeAccepted(episode.episode_id, "s", finished, end_result(episode.episode_id))


FILE_LIMIT_SCRIPT = """
import asyncio, os, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from swarmtune.journal import EpisodeClaimed, Journal, JournalError, MetaSet
journal = Journal.create(Path(sys.argv[1]), config={})
async def main():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    kept = 0
    try:
        while True:
            await journal.write(MetaSet(f"k{kept}", os.urandom(5000).hex()))
            kept += 1
    except JournalError as error:
        print(error.code, flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await journal.write(MetaSet(f"k{kept}", "after"))
    print(kept + 1)
asyncio.run(main())
journal.close()
"""


def test_when_the_disk_takes_no_more_bytes_writes_fail_and_work_again_after_space_was_made(journal_path):
    run = subprocess.run(
        [sys.executable, "-c", FILE_LIMIT_SCRIPT, str(journal_path), str(Path(__file__).parents[2] / "core")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    code, kept = run.stdout.split()
    assert (run.returncode, code) == (0, Code.NO_SPACE), run.stderr
    journal = Journal.open(journal_path)
    assert len(journal.recover().meta) == int(kept) > 1
    journal.close()


def test_a_second_journal_in_one_folder_is_refused(journal_path):
    Journal.create(journal_path, config={}).close()
    with pytest.raises(JournalError, match="there already"):
        Journal.create(journal_path, config={})
    Journal.open(journal_path).close()


def test_a_creation_that_was_cut_short_can_be_done_again(journal_path):
    journal_path.touch()
    with pytest.raises(JournalError, match="cut short"):
        Journal.open(journal_path)
    Journal.create(journal_path, config=CONFIG).close()
    journal = Journal.open(journal_path)
    assert journal.recover().config == CONFIG
    journal.close()


def test_a_journal_that_is_not_there_is_not_made(journal_path):
    with pytest.raises(JournalError, match="no journal") as refusal:
        Journal.open(journal_path)
    assert refusal.value.code is Code.NOT_FOUND
    assert list(journal_path.parent.iterdir()) == []


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(JournalError, match="must exist"):
        Journal.create(tmp_path / "nowhere" / "journal.sqlite", config={})


def test_a_held_journal_is_refused_and_free_after_close(journal_path):
    journal = Journal.create(journal_path, config={})
    with pytest.raises(JournalError, match=f"process {os.getpid()}"):
        Journal.open(journal_path)
    journal.close()
    Journal.open(journal_path).close()


@pytest.mark.parametrize(
    ("version", "lacks"), [(1, ["evaluations", "warmups", "warmup_steps"]), (2, ["warmups", "warmup_steps"])]
)
def test_a_journal_of_an_earlier_version_is_read_and_gone_on_with(journal_path, version, lacks):
    journal = Journal.create(journal_path, config={"model": "tiny"})
    journal.write_now(MetaSet("origin", {"step": 3}), BatchPlanned(1, ()))
    journal.close()
    with sqlite3.connect(journal_path) as db:
        for table in lacks:
            db.execute(f"DROP TABLE {table}")
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    before = journal_path.read_bytes()
    history = read_history(journal_path)
    assert (history.meta, history.evaluations, journal_path.read_bytes()) == ({"origin": {"step": 3}}, [], before)
    for _ in range(2):  # the second time it is of the present version
        reopened = Journal.open(journal_path)
        recovery = reopened.recover()
        assert (recovery.config, recovery.warmups, recovery.evaluations) == ({"model": "tiny"}, [], [])
        reopened.close()


def test_a_later_schema_version_is_refused(journal_path):
    Journal.create(journal_path, config={}).close()
    with sqlite3.connect(journal_path) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(JournalError, match="schema version 99"):
        Journal.open(journal_path)


@pytest.mark.parametrize("content", [b"not a database, but long enough to look like a file" * 40, b"SQLite format 3\0"])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(journal_path, content):
    journal_path.write_bytes(content)
    for attempt in (Journal.open, lambda path: Journal.create(path, config={})):
        with pytest.raises(JournalError):
            attempt(journal_path)
    assert journal_path.read_bytes() == content


def test_another_programs_database_is_left_alone(journal_path):
    with sqlite3.connect(journal_path) as db:
        db.execute("CREATE TABLE precious (id)")
    with pytest.raises(JournalError, match="there already"):
        Journal.create(journal_path, config={})
    with pytest.raises(JournalError, match="not a journal"):
        Journal.open(journal_path)


async def test_a_damaged_page_is_found_at_open(journal_path):
    written = Written(journal_path)
    for _ in range(60):
        await written.accept()
    written.journal.close()
    content = bytearray(journal_path.read_bytes())
    content[3 * 4096 : 3 * 4096 + 2000] = os.urandom(2000)
    journal_path.write_bytes(content)
    with pytest.raises(JournalError, match="damaged"):
        Journal.open(journal_path)


def test_damaged_samples_are_an_error_and_not_an_episode():
    for blob in (b"junk", pack_finished(finished_of(named("e"), 1.0))[:-9]):
        with pytest.raises(Exception) as refusal:
            unpack_finished(blob)
        assert type(refusal.value).__name__ in {"error", "ValueError", "KeyError", "TypeError"}


READ_ONLY_SCRIPT = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from swarmtune.journal import Journal, JournalError
if os.getuid() == 0:
    os.setuid(65534)
try:
    Journal.open(Path(sys.argv[1]))
except JournalError as error:
    print(error)
"""


def test_a_journal_that_cannot_be_written_is_refused_at_open():
    """In a folder that another user can reach: root may write whatever the mode says, so the child becomes nobody."""
    with tempfile.TemporaryDirectory(prefix="swarmtune-") as folder:
        path = Path(folder) / "journal.sqlite"
        Journal.create(path, config={}).close()
        path.chmod(0o444)
        (path.parent / "journal.sqlite.lock").chmod(0o666)
        path.parent.chmod(0o777)
        core = Path(__file__).parents[2] / "core"
        run = subprocess.run(
            [sys.executable, "-c", READ_ONLY_SCRIPT, str(path), str(core)], capture_output=True, text=True, timeout=60
        )
        assert "writable for this user" in run.stdout, run.stderr
