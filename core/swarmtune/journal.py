"""The journal of one run: an SQLite file in the run's folder, the only writer of server state.

What always holds: when `write` returns, its entries are on disk, all in one transaction (WAL, synchronous=FULL); when
it raises, none of them is. One live server has the file; a second is refused. Samples of a batch stay until a
checkpoint at or after its step is saved.

    journal = Journal.create(path, config=…)  |  Journal.open(path)
    recovery = journal.recover(checkpoint_step=…)          # after open, before anything is written
    await journal.write(EpisodeAccepted(…), EventWritten(…))
    journal.close()

Logprobs are kept as 32-bit floats, as engines compute them. Knows nothing of HTTP, policies or models.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import queue
import sqlite3
import threading
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import msgpack

from swarmtune.episodes import Episode
from swarmtune.protocol import CheckpointView, Code, EndResult, EpisodeState, EvaluationRecord, Event, StepRecord
from swarmtune.types import FinishedEpisode, Sample, TrainBatch
from swarmtune.warmup import Warmup

SCHEMA_VERSION = 3
APPLICATION_ID = 0x5A11ED
"""Marks the file as ours, so that another SQLite file is refused by name and not by a missing table."""

RESTART_REASON = "server_restart"
"""Why an episode was aborted that was open when the server died."""


class JournalError(Exception):
    """The journal cannot be opened or written; the message says how to fix it. Nothing of a failed write is on disk."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        """NO_SPACE where a disk or quota is full; INTERNAL for corrupt, read-only, locked or other."""


class JournalClosed(JournalError):
    """Written to after close."""


# -- entries: what can be written


@dataclass(frozen=True, slots=True)
class EpisodeClaimed:
    episode: Episode


@dataclass(frozen=True, slots=True)
class EpisodeClosed:
    """Aborted or expired; reads state and reason."""

    episode: Episode


@dataclass(frozen=True, slots=True)
class EpisodeAccepted:
    """Ended and admitted to the pool: the samples are stored. Write it between begin_end and commit_end."""

    episode_id: str
    submission_id: str
    finished: FinishedEpisode
    result: EndResult


@dataclass(frozen=True, slots=True)
class EpisodeAnswered:
    """Ended without samples to keep: rejected, or an evaluation. Write it between begin_end and commit_end."""

    episode_id: str
    submission_id: str
    reward: float
    result: EndResult


@dataclass(frozen=True, slots=True)
class EpisodesDropped:
    """They were in the pool and will not be trained; their samples are deleted."""

    episode_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class BatchPlanned:
    """These episodes are the batch of `step`. Write it before training starts."""

    step: int
    episode_ids: tuple[str, ...]

    @classmethod
    def of(cls, batch: TrainBatch) -> BatchPlanned:
        return cls(batch.step, tuple(e.episode_id for e in batch.episodes))


@dataclass(frozen=True, slots=True)
class WarmupAccepted:
    """A supervised warm-up will be trained; its rows are stored until a checkpoint at or after its last step."""

    warmup: Warmup


@dataclass(frozen=True, slots=True)
class WarmupPlanned:
    """`step` trains the warm-up's step number `position`. Write it before training starts."""

    step: int
    warmup_id: str
    position: int


@dataclass(frozen=True, slots=True)
class WarmupFailed:
    """The rest of it will not be trained; a step of it that was planned and is not trained is none any more."""

    warmup_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class BatchTrained:
    record: StepRecord


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A complete checkpoint is on disk: samples of batches up to its step are deleted with this write."""

    checkpoint: CheckpointView


@dataclass(frozen=True, slots=True)
class CheckpointRemoved:
    step: int


@dataclass(frozen=True, slots=True)
class EvaluationWritten:
    """Begun, or finished: the record takes the place of the one before."""

    record: EvaluationRecord


@dataclass(frozen=True, slots=True)
class EventWritten:
    event: Event


@dataclass(frozen=True, slots=True)
class ClientRegistered:
    name: str
    share: int | None


@dataclass(frozen=True, slots=True)
class ClientRemoved:
    """It said goodbye: after a restart nobody waits for it."""

    name: str


@dataclass(frozen=True, slots=True)
class MetaSet:
    """A small fact of the server's own under `key`; any JSON value."""

    key: str
    value: Any


Entry = (
    EpisodeClaimed
    | EpisodeClosed
    | EpisodeAccepted
    | EpisodeAnswered
    | EpisodesDropped
    | BatchPlanned
    | WarmupAccepted
    | WarmupPlanned
    | WarmupFailed
    | BatchTrained
    | CheckpointSaved
    | CheckpointRemoved
    | EvaluationWritten
    | EventWritten
    | ClientRegistered
    | ClientRemoved
    | MetaSet
)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a restarted server continues from."""

    config: dict[str, Any]
    """The resolved TrainConfig of the run."""
    step: int
    """Steps that count as trained: the checkpoint's."""
    batches: list[TrainBatch]
    """Steps after the checkpoint, in order: train them again exactly as they are, for their weights are lost. The last
    one may have been planned only."""
    pooled: list[FinishedEpisode]
    """Accepted and in no batch, in order of admission: for SamplePool.add."""
    warmups: list[Warmup]
    """In order of acceptance."""
    aborted: list[str]
    """Episode ids that were open; they are aborted(server_restart) now, on disk too."""
    closed: list[Episode]
    """The last closed episodes, oldest first, those aborted just now included: for EpisodeBook.restore."""
    clients: dict[str, int | None]
    """Name → share of the registered clients: for ClientRegistry.restore."""
    last_seq: int
    """Of the events; 0 without any."""
    steps: list[StepRecord]
    """Records of the steps up to the checkpoint."""
    checkpoints: list[CheckpointView]
    meta: dict[str, Any]
    evaluations: list[EvaluationRecord]
    """In order of weight version and of their beginning."""


@dataclass(frozen=True, slots=True)
class History:
    """What a run has done, as its journal has it."""

    config: dict[str, Any]
    steps: list[StepRecord]
    checkpoints: list[CheckpointView]
    evaluations: list[EvaluationRecord]
    meta: dict[str, Any]


T = TypeVar("T")

GROUP_LIMIT = 1024
"""Most jobs that share a commit: bounds how long the first of them waits."""


@dataclass(frozen=True, slots=True)
class _Write:
    entries: tuple[Entry, ...]
    done: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _Read:
    read: Callable[[_Store], Any]
    done: Future[Any]


_Job = _Write | _Read


class Journal:
    """The journal as the server uses it: opens, queues, commits in a thread of its own. SQL is in _Store."""

    def __init__(self, store: _Store, lock: _FileLock) -> None:
        """Use `create` or `open`."""
        self._store = store
        self._lock = lock
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    @classmethod
    def create(cls, path: Path, *, config: Mapping[str, Any], max_bytes: int | None = None) -> Self:
        """A new journal at `path` for a run with this resolved configuration. `max_bytes` bounds the file.

        Raises:
            JournalError: it exists, the folder is not writable, no space.
        """
        lock = _FileLock.take(path)
        try:
            return cls(_Store.create(path, config, max_bytes), lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, path: Path, *, max_bytes: int | None = None) -> Self:
        """The journal of an earlier run.

        Raises:
            JournalError: missing, corrupt, of a later schema version, read-only, or held by another live server.
        """
        if not path.exists():
            raise JournalError(
                Code.NOT_FOUND, f"{path}: no journal is there; start a new run, or name the run's folder"
            )
        lock = _FileLock.take(path)
        try:
            return cls(_Store.open(path, max_bytes), lock)
        except BaseException:
            lock.release()
            raise

    def recover(self, *, checkpoint_step: int = 0, remember: int = 20_000) -> Recovery:
        """What to continue from, and in one transaction: close what was open, forget that steps after
        `checkpoint_step` were trained. Blocking; call it after open and before the first write.

        Raises:
            JournalError: a batch after the checkpoint has lost its samples (a later checkpoint was saved), or the file
                is damaged.
        """
        return self._call(lambda store: store.recover(checkpoint_step, remember)).result()

    async def write(self, *entries: Entry) -> None:
        """Returns once the entries are on disk, in one transaction with whatever arrived at the same time. Cancelling
        the caller does not undo the write.

        Raises:
            JournalError: none of these entries is on disk.
            JournalClosed: after close.
        """
        self._refuse_closed()
        done = asyncio.get_running_loop().create_future()
        self._jobs.put(_Write(entries, done))
        await done

    def write_now(self, *entries: Entry) -> None:
        """`write` for callers without an event loop. Blocking.

        Raises:
            JournalError: none of these entries is on disk.
        """
        self._call(lambda store: store.write(list(entries))).result()

    async def barrier(self) -> None:
        """Returns once everything written before is on disk or has raised."""
        await asyncio.wrap_future(self._call(lambda store: None))

    async def events_after(self, seq: int, limit: int = 1000) -> list[Event]:
        """Events with a greater sequence number, in order."""
        return await asyncio.wrap_future(self._call(lambda store: store.events_after(seq, limit)))

    async def steps_after(self, step: int) -> list[StepRecord]:
        """Records of the trained steps with a greater number, in order."""
        return await asyncio.wrap_future(self._call(lambda store: store.steps_after(step)))

    async def checkpoints(self) -> list[CheckpointView]:
        """In order of step."""
        return await asyncio.wrap_future(self._call(lambda store: store.checkpoints()))

    @property
    def path(self) -> Path:
        return self._store.path

    def close(self) -> None:
        """Write what is queued, then release the file. Blocking, idempotent."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        self._thread.join()
        self._store.close()
        self._lock.release()

    def _call(self, read: Callable[[_Store], T]) -> Future[T]:
        """Run `read` in the writer thread, after everything queued before it."""
        self._refuse_closed()
        job = _Read(read, Future())
        self._jobs.put(job)
        return job.done

    def _refuse_closed(self) -> None:
        if self._closed:
            raise JournalClosed(Code.STOPPING, f"{self.path}: the journal is closed; the server is stopping")

    # -- the writer thread

    def _work(self) -> None:
        while (jobs := self._next_jobs()) is not None:
            _deliver(self._commit([job for job in jobs if isinstance(job, _Write)]))
            for job in jobs:
                if isinstance(job, _Read):
                    self._answer(job)

    def _next_jobs(self) -> list[_Job] | None:
        """Wait for a job, then take all that are there. None ends the thread, after the jobs before it."""
        first = self._jobs.get()
        if first is None:
            return None
        jobs = [first]
        while len(jobs) < GROUP_LIMIT:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                self._jobs.put(None)
                break
            jobs.append(job)
        return jobs

    def _commit(self, writes: list[_Write]) -> list[tuple[_Write, Exception | None]]:
        """One commit for all; where that fails, each alone, so that one bad write costs the others nothing."""
        if not writes:
            return []
        try:
            self._store.write([entry for write in writes for entry in write.entries])
        except Exception as error:  # noqa: BLE001 - every writer hears its outcome, and the thread lives on
            if len(writes) == 1:
                return [(writes[0], error)]
            return [outcome for write in writes for outcome in self._commit([write])]
        return [(write, None) for write in writes]

    def _answer(self, job: _Read) -> None:
        if not job.done.set_running_or_notify_cancel():
            return
        try:
            job.done.set_result(job.read(self._store))
        except Exception as error:  # noqa: BLE001 - it travels to the caller
            job.done.set_exception(error)


def _deliver(outcomes: list[tuple[_Write, Exception | None]]) -> None:
    """Wake the writers, with one call into each of their event loops."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Write, Exception | None]]] = {}
    for write, error in outcomes:
        by_loop.setdefault(write.done.get_loop(), []).append((write, error))
    for loop, group in by_loop.items():
        with suppress(RuntimeError):  # the loop was closed: nobody is waiting any more
            loop.call_soon_threadsafe(_settle, group)


def _settle(outcomes: list[tuple[_Write, Exception | None]]) -> None:
    for write, error in outcomes:
        if write.done.done():
            continue  # its caller was cancelled; what was written stays written
        if error is None:
            write.done.set_result(None)
        else:
            write.done.set_exception(error)


# -- one server at a time


class _FileLock:
    """An advisory lock on a file beside the journal. The system releases it when its process dies."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def take(cls, journal: Path) -> Self:
        path = journal.with_name(journal.name + ".lock")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "?"
            os.close(fd)
            raise JournalError(
                Code.INTERNAL,
                f"{journal}: held by a live server (process {holder}); stop it first, or use another run's folder",
            ) from None
        except OSError as error:
            os.close(fd)
            raise _unusable(path, error) from error
        return cls(fd)

    def release(self) -> None:
        os.close(self._fd)


def _unusable(path: Path, error: OSError) -> JournalError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return JournalError(Code.NO_SPACE, f"{path}: {error.strerror}; free some space and try again")
    return JournalError(
        Code.INTERNAL, f"{path}: {error.strerror}; the run's folder must exist and be writable for this user"
    )


# -- SQL

FIRST_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE episodes (
  id TEXT PRIMARY KEY,
  key_digest TEXT NOT NULL,
  task_id TEXT NOT NULL,
  kind TEXT NOT NULL,
  client TEXT,
  weight_version INTEGER NOT NULL,
  step INTEGER NOT NULL,
  state TEXT NOT NULL,
  reason TEXT,
  submission_id TEXT,
  reward REAL,
  result TEXT,
  closed_order INTEGER,
  batch_step INTEGER,
  batch_position INTEGER,
  dropped TEXT,
  has_samples INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX episodes_open ON episodes (id) WHERE state = 'claimed';
CREATE INDEX episodes_closed ON episodes (closed_order) WHERE closed_order IS NOT NULL;
CREATE INDEX episodes_with_samples ON episodes (batch_step, closed_order) WHERE has_samples = 1;
CREATE INDEX episodes_by_batch ON episodes (batch_step) WHERE batch_step IS NOT NULL;
CREATE TABLE samples (episode_id TEXT PRIMARY KEY, blob BLOB NOT NULL);
CREATE TABLE batches (step INTEGER PRIMARY KEY, state TEXT NOT NULL, record TEXT);
CREATE TABLE checkpoints (step INTEGER PRIMARY KEY, path TEXT NOT NULL, at REAL NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE events (seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL);
CREATE TABLE clients (name TEXT PRIMARY KEY, share INTEGER) WITHOUT ROWID;
"""

ADDED = {
    1: """
CREATE TABLE evaluations (id TEXT PRIMARY KEY, version INTEGER NOT NULL, began REAL NOT NULL, record TEXT NOT NULL);
""",
    2: """
CREATE TABLE warmups (id TEXT PRIMARY KEY, plan TEXT NOT NULL, blob BLOB, failed TEXT);
CREATE TABLE warmup_steps (step INTEGER PRIMARY KEY, warmup TEXT NOT NULL, position INTEGER NOT NULL);
""",
}
"""Schema version → what the next one has besides. A journal of an earlier version gets it when it is opened."""

CONFIG_KEY = "config"


class _Store:
    """The connection and every statement. Used by one thread at a time."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._db = connection
        self._last_order = 0

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any], max_bytes: int | None) -> Self:
        store = cls._connect(path, max_bytes)
        with store._closing_on_error(), store._explained():
            if store._pragma("application_id") or store._has_tables():
                raise JournalError(
                    Code.INTERNAL, f"{path}: a file is there already; open it to go on, or take a new run folder"
                )
            with store._transaction():
                store._run_script(FIRST_SCHEMA)
                store._add_what_is_new(1)
                store._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                store._set_meta(CONFIG_KEY, dict(config))
        _sync_folder(path.parent)
        return store

    @classmethod
    def open(cls, path: Path, max_bytes: int | None) -> Self:
        store = cls._connect(path, max_bytes)
        with store._closing_on_error(), store._explained():
            store._check_identity()
            store._check_pages()
            with store._transaction():
                # Always a write: a read-only file is found out here and not at the first episode.
                store._add_what_is_new(store._pragma("user_version"))
            store._last_order = store._db.execute("SELECT max(closed_order) FROM episodes").fetchone()[0] or 0
        return store

    @classmethod
    def _connect(cls, path: Path, max_bytes: int | None) -> Self:
        try:
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
        except sqlite3.Error as error:
            raise _explain(path, error) from error
        store = cls(path, connection)
        with store._closing_on_error(), store._explained():
            store._pragma("journal_mode = WAL")
            store._pragma("synchronous = FULL")
            store._pragma(f"journal_size_limit = {64 * 1024 * 1024}")
            if max_bytes is not None:
                store._pragma(f"max_page_count = {max(1, max_bytes // store._pragma('page_size'))}")
        return store

    def close(self) -> None:
        self._db.close()

    def _check_identity(self) -> None:
        if self._pragma("application_id") != APPLICATION_ID:
            raise JournalError(
                Code.INTERNAL,
                f"{self.path}: not a journal, or one whose creation was cut short; take a new run folder",
            )
        version = self._pragma("user_version")
        if not 1 <= version <= SCHEMA_VERSION:
            raise JournalError(
                Code.INTERNAL,
                f"{self.path}: schema version {version}, this program reads 1 to {SCHEMA_VERSION}; "
                "open it with the version of swarmtune that wrote it, or start a new run",
            )

    def _add_what_is_new(self, version: int) -> None:
        """From a schema version to the present one, in the transaction of the caller."""
        for older in range(version, SCHEMA_VERSION):
            self._run_script(ADDED[older])
        self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _run_script(self, script: str) -> None:
        for statement in script.split(";"):
            self._db.execute(statement)

    def _check_pages(self) -> None:
        verdict = self._pragma("quick_check(1)")
        if verdict != "ok":
            raise _damaged(self.path, verdict)

    def _has_tables(self) -> bool:
        return bool(self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])

    def _pragma(self, text: str) -> Any:
        row = self._db.execute(f"PRAGMA {text}").fetchone()
        return row[0] if row else None

    # -- errors and transactions

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _explain(self.path, error) from error

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._db.close()
            raise

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # after a full disk SQLite has rolled back by itself
                self._db.execute("ROLLBACK")
            raise

    # -- writing

    def write(self, entries: list[Entry]) -> None:
        """All entries in one transaction.

        Raises:
            JournalError: none is on disk.
        """
        try:
            with self._explained(), self._transaction():
                for entry in entries:
                    WRITERS[type(entry)](self, entry)
        except (TypeError, ValueError, OverflowError) as error:
            raise JournalError(Code.INTERNAL, f"{self.path}: an entry cannot be stored: {error}") from error

    def _next_order(self) -> int:
        """Rising, not gapless: a number taken in a transaction that failed is not used again."""
        self._last_order += 1
        return self._last_order

    def _claim(self, entry: EpisodeClaimed) -> None:
        self._insert(entry.episode)

    def _insert(self, e: Episode) -> None:
        self._db.execute(
            "INSERT INTO episodes (id, key_digest, task_id, kind, client, weight_version, step, state) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, 'claimed') ON CONFLICT (id) DO NOTHING",
            (e.episode_id, e.key_digest, e.task_id, e.kind, e.client, e.weight_version, e.step),
        )

    def _close_episode(self, entry: EpisodeClosed) -> None:
        episode = entry.episode
        if episode.state not in {EpisodeState.ABORTED, EpisodeState.EXPIRED}:
            raise ValueError(f"episode {episode.episode_id} is {episode.state}, not aborted or expired")
        self._insert(episode)
        changed = self._db.execute(
            "UPDATE episodes SET state = ?, reason = ?, closed_order = ? WHERE id = ? AND state = 'claimed'",
            (str(episode.state), episode.reason, self._next_order(), episode.episode_id),
        )
        self._must_change(changed, episode.episode_id, "is closed already")

    def _accept(self, entry: EpisodeAccepted) -> None:
        self._end(entry.episode_id, entry.submission_id, entry.finished.reward, entry.result, has_samples=True)
        self._db.execute(
            "INSERT OR REPLACE INTO samples (episode_id, blob) VALUES (?, ?)",
            (entry.episode_id, pack_finished(entry.finished)),
        )

    def _record_answer(self, entry: EpisodeAnswered) -> None:
        self._end(entry.episode_id, entry.submission_id, entry.reward, entry.result, has_samples=False)

    def _end(self, episode_id: str, submission_id: str, reward: float, result: EndResult, *, has_samples: bool) -> None:
        """claimed → ended. The same submission may be written again until a batch has it: its caller may have been
        cancelled, which does not undo the write, and come back."""
        changed = self._db.execute(
            "UPDATE episodes SET state = 'ended', submission_id = ?1, reward = ?2, result = ?3, closed_order = ?4, "
            "has_samples = ?5 WHERE id = ?6 AND (state = 'claimed' OR "
            "(state = 'ended' AND submission_id = ?1 AND batch_step IS NULL AND dropped IS NULL))",
            (submission_id, reward, result.model_dump_json(), self._next_order(), has_samples, episode_id),
        )
        self._must_change(changed, episode_id, "was never claimed here, or is closed already")

    def _drop(self, entry: EpisodesDropped) -> None:
        for episode_id in entry.episode_ids:
            changed = self._db.execute(
                "UPDATE episodes SET dropped = ?, batch_step = NULL, has_samples = 0 WHERE id = ? AND has_samples = 1",
                (entry.reason, episode_id),
            )
            self._must_change(changed, episode_id, "has no samples to drop")
            self._db.execute("DELETE FROM samples WHERE episode_id = ?", (episode_id,))

    def _plan(self, entry: BatchPlanned) -> None:
        """A step may be planned again until it is trained; its former episodes are in the pool again."""
        self._plan_step(entry.step)
        for position, episode_id in enumerate(entry.episode_ids):
            changed = self._db.execute(
                "UPDATE episodes SET batch_step = ?, batch_position = ? "
                "WHERE id = ? AND has_samples = 1 AND batch_step IS NULL",
                (entry.step, position, episode_id),
            )
            self._must_change(changed, episode_id, "is not in the pool, or in another batch")

    def _plan_step(self, step: int) -> None:
        """Give the number to what follows; what it was planned for before has it no longer."""
        self._db.execute("UPDATE episodes SET batch_step = NULL WHERE batch_step = ?", (step,))
        self._db.execute("DELETE FROM warmup_steps WHERE step = ?", (step,))
        changed = self._db.execute(
            "INSERT INTO batches (step, state) VALUES (?, 'planned') "
            "ON CONFLICT (step) DO UPDATE SET state = state WHERE state = 'planned'",
            (step,),
        )
        if changed.rowcount != 1:
            raise JournalError(Code.INTERNAL, f"{self.path}: step {step} is trained already; plan the next one")

    def _accept_warmup(self, entry: WarmupAccepted) -> None:
        w = entry.warmup
        plan = {"steps": w.steps, "batch_size": w.batch_size, "lr": w.lr, "seed": w.seed}
        self._db.execute(
            "INSERT INTO warmups (id, plan, blob) VALUES (?, ?, ?)",
            (w.warmup_id, json.dumps(plan), pack_conversations(w.conversations)),
        )

    def _plan_warmup(self, entry: WarmupPlanned) -> None:
        self._plan_step(entry.step)
        self._db.execute("INSERT INTO warmup_steps VALUES (?, ?, ?)", (entry.step, entry.warmup_id, entry.position))

    def _fail_warmup(self, entry: WarmupFailed) -> None:
        self._db.execute("UPDATE warmups SET failed = ? WHERE id = ?", (entry.reason, entry.warmup_id))
        self._db.execute(
            "DELETE FROM warmup_steps WHERE warmup = ? AND step IN (SELECT step FROM batches WHERE state = 'planned')",
            (entry.warmup_id,),
        )

    def _trained(self, entry: BatchTrained) -> None:
        record = entry.record
        changed = self._db.execute(
            "UPDATE batches SET state = 'trained', record = ? WHERE step = ?",
            (json.dumps(record.model_dump()), record.step),
        )
        if changed.rowcount != 1:
            raise JournalError(Code.INTERNAL, f"{self.path}: step {record.step} was never planned; plan it first")

    def _save_checkpoint(self, entry: CheckpointSaved) -> None:
        c = entry.checkpoint
        self._db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", (c.step, c.path, c.at, c.bytes))
        held = "SELECT id FROM episodes WHERE has_samples = 1 AND batch_step <= ?"
        self._db.execute(f"DELETE FROM samples WHERE episode_id IN ({held})", (c.step,))
        self._db.execute("UPDATE episodes SET has_samples = 0 WHERE has_samples = 1 AND batch_step <= ?", (c.step,))
        self._db.execute(
            "UPDATE warmups SET blob = NULL WHERE blob IS NOT NULL AND (SELECT count(*) FROM warmup_steps WHERE "
            "warmup = id AND step <= ?) >= CASE WHEN failed IS NULL THEN json_extract(plan, '$.steps') ELSE "
            "(SELECT count(*) FROM warmup_steps WHERE warmup = id) END",
            (c.step,),
        )

    def _remove_checkpoint(self, entry: CheckpointRemoved) -> None:
        self._db.execute("DELETE FROM checkpoints WHERE step = ?", (entry.step,))

    def _write_evaluation(self, entry: EvaluationWritten) -> None:
        r = entry.record
        self._db.execute(
            "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?)",
            (r.evaluation_id, r.weight_version, r.began_at, r.model_dump_json()),
        )

    def _add_event(self, entry: EventWritten) -> None:
        e = entry.event
        self._db.execute("INSERT INTO events VALUES (?, ?, ?, ?)", (e.seq, e.at, e.kind, json.dumps(e.data)))

    def _add_client(self, entry: ClientRegistered) -> None:
        self._db.execute("INSERT OR REPLACE INTO clients VALUES (?, ?)", (entry.name, entry.share))

    def _remove_client(self, entry: ClientRemoved) -> None:
        self._db.execute("DELETE FROM clients WHERE name = ?", (entry.name,))

    def _write_meta(self, entry: MetaSet) -> None:
        if entry.key == CONFIG_KEY:
            raise ValueError(f"the key {CONFIG_KEY!r} is the run's configuration and does not change")
        self._set_meta(entry.key, entry.value)

    def _set_meta(self, key: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def _must_change(self, cursor: sqlite3.Cursor, episode_id: str, why_not: str) -> None:
        if cursor.rowcount != 1:
            raise JournalError(Code.INTERNAL, f"{self.path}: episode {episode_id} {why_not}")

    # -- reading

    def events_after(self, seq: int, limit: int) -> list[Event]:
        rows = self._select("SELECT seq, at, kind, data FROM events WHERE seq > ? ORDER BY seq LIMIT ?", seq, limit)
        return [Event(seq=seq, at=at, kind=kind, data=json.loads(data)) for seq, at, kind, data in rows]

    def steps_after(self, step: int) -> list[StepRecord]:
        rows = self._select("SELECT record FROM batches WHERE step > ? AND record IS NOT NULL ORDER BY step", step)
        return [StepRecord.model_validate(json.loads(record)) for (record,) in rows]

    def checkpoints(self) -> list[CheckpointView]:
        rows = self._select("SELECT step, path, at, bytes FROM checkpoints ORDER BY step")
        return [CheckpointView(step=step, path=path, at=at, bytes=size) for step, path, at, size in rows]

    def evaluations(self) -> list[EvaluationRecord]:
        if self._pragma("user_version") < 2:  # only read, not opened
            return []
        rows = self._select("SELECT record FROM evaluations ORDER BY version, began, id")
        return [EvaluationRecord.model_validate_json(record) for (record,) in rows]

    def history(self) -> History:
        meta = {key: json.loads(value) for key, value in self._select("SELECT key, value FROM meta")}
        config = meta.pop(CONFIG_KEY)
        return History(config, self.steps_after(0), self.checkpoints(), self.evaluations(), meta)

    def _select(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._explained():
            return self._db.execute(sql, values).fetchall()

    # -- recovery

    def recover(self, checkpoint_step: int, remember: int) -> Recovery:
        warmups = self._warmups(checkpoint_step)
        batches = self._batches_after(checkpoint_step) + self._warmup_batches_after(checkpoint_step, warmups)
        aborted = [episode_id for (episode_id,) in self._select("SELECT id FROM episodes WHERE state = 'claimed'")]
        with self._explained(), self._transaction():
            self._abort_open(aborted)
            self._db.execute("UPDATE batches SET state = 'trained' WHERE step <= ?", (checkpoint_step,))
            self._db.execute("UPDATE batches SET state = 'planned', record = NULL WHERE step > ?", (checkpoint_step,))
        meta = {key: json.loads(value) for key, value in self._select("SELECT key, value FROM meta")}
        return Recovery(
            config=meta.pop(CONFIG_KEY),
            step=checkpoint_step,
            batches=sorted(batches, key=lambda batch: batch.step),
            warmups=list(warmups.values()),
            pooled=self._pooled(),
            aborted=aborted,
            closed=self._closed(remember),
            clients=dict(self._select("SELECT name, share FROM clients ORDER BY name")),
            last_seq=self._select("SELECT coalesce(max(seq), 0) FROM events")[0][0],
            steps=self.steps_after(0),
            checkpoints=self.checkpoints(),
            meta=meta,
            evaluations=self.evaluations(),
        )

    def _abort_open(self, episode_ids: list[str]) -> None:
        for episode_id in episode_ids:
            self._db.execute(
                "UPDATE episodes SET state = 'aborted', reason = ?, closed_order = ? WHERE id = ?",
                (RESTART_REASON, self._next_order(), episode_id),
            )

    def _batches_after(self, step: int) -> list[TrainBatch]:
        """Planned and trained ones, whole or not at all. A batch whose episodes were all dropped is none."""
        rows = self._select(
            "SELECT e.batch_step, e.id, s.blob FROM episodes e LEFT JOIN samples s ON s.episode_id = e.id "
            "WHERE e.batch_step > ? ORDER BY e.batch_step, e.batch_position",
            step,
        )
        batches: dict[int, TrainBatch] = {}
        for batch_step, episode_id, blob in rows:
            if blob is None:
                raise JournalError(
                    Code.INTERNAL,
                    f"{self.path}: step {batch_step} cannot be trained again from checkpoint {step}: the samples of "
                    f"episode {episode_id} were deleted when a later checkpoint was saved; resume from that one",
                )
            batch = batches.setdefault(batch_step, TrainBatch(batch_step, []))
            batch.episodes.append(self._unpack(blob, unpack_finished))
        return list(batches.values())

    def _warmups(self, checkpoint_step: int) -> dict[str, Warmup]:
        """By id; steps up to the checkpoint are done."""
        found = {}
        rows = self._select("SELECT id, plan, blob, failed FROM warmups ORDER BY rowid")
        for warmup_id, plan, blob, failed in rows:
            conversations = [] if blob is None else self._unpack(blob, unpack_conversations)
            found[warmup_id] = Warmup(warmup_id, **json.loads(plan), conversations=conversations, failed=failed)
        for step, warmup_id in self._select("SELECT step, warmup FROM warmup_steps ORDER BY step"):
            found[warmup_id].planned += 1
            if step <= checkpoint_step:
                found[warmup_id].done.append(step)
        return found

    def _warmup_batches_after(self, step: int, warmups: Mapping[str, Warmup]) -> list[TrainBatch]:
        batches = []
        rows = self._select("SELECT step, warmup, position FROM warmup_steps WHERE step > ?", step)
        for planned, warmup_id, position in rows:
            if not warmups[warmup_id].conversations:
                raise JournalError(
                    Code.INTERNAL,
                    f"{self.path}: step {planned} cannot be trained again from checkpoint {step}: the conversations of "
                    f"warm-up {warmup_id} were deleted when a later checkpoint was saved; resume from that one",
                )
            batches.append(warmups[warmup_id].batch(position, planned))
        return batches

    def _pooled(self) -> list[FinishedEpisode]:
        rows = self._select(
            "SELECT s.blob FROM episodes e JOIN samples s ON s.episode_id = e.id "
            "WHERE e.has_samples = 1 AND e.batch_step IS NULL ORDER BY e.closed_order"
        )
        return [self._unpack(blob, unpack_finished) for (blob,) in rows]

    def _unpack(self, blob: bytes, read: Callable[[bytes], T]) -> T:
        try:
            return read(blob)
        except (zlib.error, ValueError, KeyError, TypeError) as error:
            raise _damaged(self.path, f"samples that cannot be read ({error})") from error

    def _closed(self, remember: int) -> list[Episode]:
        rows = self._select(
            "SELECT id, key_digest, task_id, kind, client, weight_version, step, state, reason, submission_id, reward, "
            "result FROM episodes WHERE closed_order IS NOT NULL ORDER BY closed_order DESC LIMIT ?",
            remember,
        )
        return [_closed_episode(*row) for row in reversed(rows)]


def _closed_episode(
    episode_id: str,
    digest: str,
    task_id: str,
    kind: Any,
    client: str | None,
    weight_version: int,
    step: int,
    state: str,
    reason: str | None,
    submission_id: str | None,
    reward: float | None,
    result: str | None,
) -> Episode:
    answer = EndResult.model_validate_json(result) if result is not None else None
    return Episode(
        episode_id=episode_id,
        key=None,
        key_digest=digest,
        task_id=task_id,
        kind=kind,
        client=client,
        lease_s=0.0,
        claim_id=None,
        weight_version=weight_version,
        step=step,
        sampling={},
        claimed_at=0.0,
        last_seen=0.0,
        state=EpisodeState(state),
        reason=reason,
        sampled_tokens=answer.sampled_tokens if answer else 0,
        submission_id=submission_id,
        reward=reward,
        result=answer,
    )


WRITERS: dict[type, Callable[[_Store, Any], None]] = {
    EpisodeClaimed: _Store._claim,
    EpisodeClosed: _Store._close_episode,
    EpisodeAccepted: _Store._accept,
    EpisodeAnswered: _Store._record_answer,
    EpisodesDropped: _Store._drop,
    BatchPlanned: _Store._plan,
    WarmupAccepted: _Store._accept_warmup,
    WarmupPlanned: _Store._plan_warmup,
    WarmupFailed: _Store._fail_warmup,
    BatchTrained: _Store._trained,
    CheckpointSaved: _Store._save_checkpoint,
    CheckpointRemoved: _Store._remove_checkpoint,
    EvaluationWritten: _Store._write_evaluation,
    EventWritten: _Store._add_event,
    ClientRegistered: _Store._add_client,
    ClientRemoved: _Store._remove_client,
    MetaSet: _Store._write_meta,
}


def read_history(path: Path) -> History:
    """What the journal at `path` says, also while a live server writes it. Changes nothing.

    Raises:
        JournalError: missing, damaged, or of a later schema version.
    """
    if not path.is_file():
        raise JournalError(Code.NOT_FOUND, f"{path}: no journal is there; name a run's folder")
    # Closed in order, it has no write-ahead log: then SQLite needs no files of its own beside it to read it.
    closed = not path.with_name(path.name + "-wal").exists()
    uri = f"{path.resolve().as_uri()}?{'immutable=1' if closed else 'mode=ro'}"
    try:
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=5.0)
    except sqlite3.Error as error:
        raise _explain(path, error) from error
    store = _Store(path, connection)
    try:
        with store._explained():
            store._check_identity()
            return store.history()
    finally:
        store.close()


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable, not only its content."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _explain(path: Path, error: sqlite3.Error) -> JournalError:
    """SQLite's error as one that says what to do."""
    code = getattr(error, "sqlite_errorcode", None)
    if code in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE}:
        return JournalError(
            Code.NO_SPACE, f"{path}: no space ({error}); free some (or raise the quota or size limit) and try again"
        )
    match (code or 0) & 0xFF:
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return _damaged(path, str(error))
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            fix = "the file and its folder must exist and be writable for this user"
        case sqlite3.SQLITE_CONSTRAINT:
            fix = "it is stored already; write every event once, with a new sequence number"
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            fix = "another program holds it; close that program"
        case _:
            fix = "check the disk, then start the server again: it continues from the last checkpoint"
    return JournalError(Code.INTERNAL, f"{path}: {error}; {fix}")


def _damaged(path: Path, what: str) -> JournalError:
    return JournalError(
        Code.INTERNAL,
        f"{path}: the file is damaged: {what}; restore it from a copy, or start a new run from the last checkpoint "
        "(episodes accepted since then are lost)",
    )


# -- samples as bytes

BLOB_VERSION = 1


def pack_finished(finished: FinishedEpisode) -> bytes:
    """An episode with its samples in one compact value: 32-bit arrays, zlib level 1.

    Level 1 makes it 4-6 times smaller at 2-4 ms per 50,000 tokens; level 6 gains a tenth more at five times the cost.
    """
    record = {
        "v": BLOB_VERSION,
        "id": finished.episode_id,
        "task": finished.task_id,
        "reward": finished.reward,
        "metrics": finished.metrics,
        "client": finished.client,
        "version": finished.weight_version,
        "samples": [_pack_sample(s) for s in finished.samples],
    }
    return zlib.compress(cast(bytes, msgpack.packb(record)), 1)


def unpack_finished(blob: bytes) -> FinishedEpisode:
    """The reverse of pack_finished.

    Raises:
        ValueError, KeyError, TypeError, zlib.error: not such a value.
    """
    record = msgpack.unpackb(zlib.decompress(blob))
    if record["v"] != BLOB_VERSION:
        raise ValueError(f"samples of format {record['v']}, this program reads {BLOB_VERSION}")
    return FinishedEpisode(
        episode_id=record["id"],
        task_id=record["task"],
        reward=record["reward"],
        samples=[_unpack_sample(s, record["id"], record["task"]) for s in record["samples"]],
        metrics=record["metrics"],
        client=record["client"],
        weight_version=record["version"],
    )


def pack_conversations(conversations: Sequence[FinishedEpisode]) -> bytes:
    """A warm-up's conversations, each as `pack_finished` has it."""
    return cast(bytes, msgpack.packb([pack_finished(c) for c in conversations]))


def unpack_conversations(blob: bytes) -> list[FinishedEpisode]:
    """The reverse of pack_conversations. Raises as unpack_finished does."""
    return [unpack_finished(one) for one in msgpack.unpackb(blob)]


def _pack_sample(sample: Sample) -> dict[str, Any]:
    exact = sample.context_exact
    return {
        "id": sample.sample_id,
        "tokens": array("i", sample.token_ids).tobytes(),
        "mask": bytes(sample.loss_mask),
        "logprobs": array("f", sample.logprobs).tobytes(),
        "versions": array("i", sample.weight_versions).tobytes(),
        "exact": None if exact is None else bytes(exact),
        "temperature": sample.temperature,
        "calls": sample.call_ids,
        "parent": sample.parent_id,
    }


def _unpack_sample(record: Mapping[str, Any], episode_id: str, task_id: str) -> Sample:
    exact = record["exact"]
    return Sample(
        sample_id=record["id"],
        episode_id=episode_id,
        task_id=task_id,
        token_ids=array("i", record["tokens"]).tolist(),
        loss_mask=list(record["mask"]),
        logprobs=array("f", record["logprobs"]).tolist(),
        weight_versions=array("i", record["versions"]).tolist(),
        context_exact=None if exact is None else list(exact),
        temperature=record["temperature"],
        call_ids=record["calls"],
        parent_id=record["parent"],
    )
