"""The journal of one campaign: what was decided, in the order in which it was decided, and the state that follows.

- Every change is one event and the rows it changes, in one transaction (SQLite, WAL, synchronous FULL): a killed leader
  has either done both or neither.
- Events form a hash chain and carry their rows, so the tables can be replayed from them; opening compares both.
- `events.jsonl` beside the database repeats the events. When the database is damaged it is set aside and rebuilt from
  there; when the copy is damaged it is rewritten from the database. Either is an event itself.
- Nothing else writes the journal. One leader at a time: the campaign's lock, not this module, sees to that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Table = Literal["campaign", "runs", "attempts", "leases", "spending", "plans", "llm", "arms", "hosts"]
TABLES: tuple[Table, ...] = ("campaign", "runs", "attempts", "leases", "spending", "plans", "llm", "arms", "hosts")
GENESIS = "0" * 64

SCHEMA = (
    """CREATE TABLE IF NOT EXISTS events (
        seq INTEGER PRIMARY KEY, body TEXT NOT NULL, prev TEXT NOT NULL, sha TEXT NOT NULL)""",
    *(f"CREATE TABLE IF NOT EXISTS {table} (key TEXT PRIMARY KEY, data TEXT NOT NULL)" for table in TABLES),
    """CREATE UNIQUE INDEX IF NOT EXISTS one_run_per_seed ON runs (
        json_extract(data, '$.blueprint'), json_extract(data, '$.seed'), json_extract(data, '$.replicate'))""",
)


class JournalDamaged(RuntimeError):
    """Neither the journal nor its copy can be read whole."""


class DiskFull(RuntimeError):
    """The journal cannot grow; nothing was changed."""


class Conflict(RuntimeError):
    """A row that must be new exists already: a slot taken twice, a run declared twice."""


def reached(point: str) -> None:
    """A named point of the journal; tests replace this function to die there."""


@dataclass(frozen=True)
class Put:
    table: Table
    key: str
    data: dict[str, Any]
    new: bool = False
    """The row must not exist yet."""


@dataclass(frozen=True)
class Drop:
    table: Table
    key: str


Change = Put | Drop


@dataclass(frozen=True)
class Event:
    """One line of the history."""

    seq: int
    at: float
    """Unix time, for people."""
    boottime: float
    """Seconds since boot, for durations."""
    boot: str
    actor: str
    kind: str
    run: str | None
    attempt: int | None
    data: dict[str, Any]
    changes: list[dict[str, Any]] = field(default_factory=list)
    prev: str = GENESIS
    sha: str = ""

    def body(self) -> str:
        names = ("seq", "at", "boottime", "boot", "actor", "kind", "run", "attempt", "data", "changes")
        return canonical({name: getattr(self, name) for name in names})

    def computed_sha(self) -> str:
        return hashlib.sha256(f"{self.prev}\n{self.body()}".encode()).hexdigest()

    @classmethod
    def parse(cls, body: str, prev: str, sha: str) -> Event:
        return cls(**json.loads(body), prev=prev, sha=sha)


def canonical(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), default=str)


def boottime() -> float:
    """Seconds since boot, suspended time included: not moved by changes of the wall clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def chain_breaks(events: Iterable[Event]) -> int | None:
    """Sequence number of the first event that does not follow from the one before it; None when all do."""
    prev = GENESIS
    for seq, event in enumerate(events, 1):
        if event.seq != seq or event.prev != prev or event.computed_sha() != event.sha:
            return seq
        prev = event.sha
    return None


def replay(events: Iterable[Event]) -> dict[Table, dict[str, dict[str, Any]]]:
    """The tables that the events lead to."""
    tables: dict[Table, dict[str, dict[str, Any]]] = {name: {} for name in TABLES}
    for event in events:
        for change in event.changes:
            if "put" in change:
                tables[change["table"]][change["put"]] = change["data"]
            else:
                tables[change["table"]].pop(change["drop"], None)
    return tables


class Store:
    """Reads and writes one journal. `open` first; `close` when done."""

    def __init__(self, directory: Path, read_only: bool = False) -> None:
        self.path = directory / "journal.db"
        self.mirror_path = directory / "events.jsonl"
        self.read_only = read_only
        self._boot = boot_id()
        self._db: sqlite3.Connection | None = None
        self._last: tuple[int, str] = (0, GENESIS)
        self._cache: dict[Table, dict[str, dict[str, Any]]] | None = None

    # -- opening

    @classmethod
    def open(cls, directory: Path) -> Store:
        """Open for writing; checks the journal and repairs it from its copy where it must.

        Raises:
            JournalDamaged: both are unusable.
        """
        store = cls(directory)
        try:
            store._connect()
            problem = store.problem()
        except sqlite3.DatabaseError as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            store._rebuild(problem)
        store._reconcile_mirror()
        store._cache = {name: store.table(name) for name in TABLES}
        return store

    @classmethod
    def open_read_only(cls, directory: Path) -> Store:
        """Open for looking, beside a running leader.

        Raises:
            FileNotFoundError: no journal there.
        """
        if not (directory / "journal.db").exists():
            raise FileNotFoundError(f"{directory}: no study here (journal.db is missing)")
        store = cls(directory, read_only=True)
        store._connect()
        return store

    def _connect(self) -> None:
        if self.read_only:
            self._db = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, isolation_level=None, timeout=10.0)
            return
        self._db = sqlite3.connect(self.path, isolation_level=None, timeout=10.0)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        for statement in SCHEMA:
            self._db.execute(statement)
        row = self.db.execute("SELECT seq, sha FROM events ORDER BY seq DESC LIMIT 1").fetchone()
        self._last = (row[0], row[1]) if row else (0, GENESIS)

    @property
    def db(self) -> sqlite3.Connection:
        if self._db is None:
            raise RuntimeError("the journal is closed")
        return self._db

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def problem(self) -> str | None:
        """What is wrong with the journal: a bad page, a broken chain, rows that no event made. None: nothing."""
        found = self.db.execute("PRAGMA quick_check").fetchone()[0]
        if found != "ok":
            return f"SQLite reports: {found.splitlines()[0]}"
        events = list(self.events())
        broken = chain_breaks(events)
        if broken is not None:
            return f"the hash chain breaks at event {broken}"
        expected = replay(events)
        for name in TABLES:
            if self.table(name) != expected[name]:
                return f"table {name} holds rows that no event made"
        return None

    def _rebuild(self, problem: str) -> None:
        """Set the damaged database aside and replay the copy's events into a new one."""
        events = self._mirror_events()
        if not events and self._last[0] > 0:
            raise JournalDamaged(f"{self.path}: {problem}; and {self.mirror_path.name} holds no usable event")
        self.close()
        if not events and not self.mirror_path.exists():
            raise JournalDamaged(f"{self.path}: {problem}; and there is no {self.mirror_path.name} to rebuild it from")
        number = 1
        while self.path.with_name(f"journal.damaged-{number}.db").exists():
            number += 1
        for suffix in ("", "-wal", "-shm"):
            source = Path(f"{self.path}{suffix}")
            if source.exists():
                os.replace(source, self.path.with_name(f"journal.damaged-{number}.db{suffix}"))
        self._connect()
        with self._transaction():
            for event in events:
                self._insert(event)
                self._apply(event.changes)
        self._last = (events[-1].seq, events[-1].sha) if events else (0, GENESIS)
        self.commit("JOURNAL_REBUILT", data={"problem": problem, "events": len(events), "kept_as": number})

    def _mirror_events(self) -> list[Event]:
        """The longest unbroken prefix of the copy."""
        events: list[Event] = []
        prev = GENESIS
        try:
            lines = self.mirror_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        for line in lines:
            try:
                record = json.loads(line)
                event = Event.parse(record["body"], record["prev"], record["sha"])
            except (ValueError, KeyError, TypeError):
                break
            if event.prev != prev or event.seq != len(events) + 1 or event.computed_sha() != event.sha:
                break
            events.append(event)
            prev = event.sha
        return events

    def _reconcile_mirror(self) -> None:
        """Bring the copy up to the database: a leader killed between the two left it short."""
        copied = self._mirror_events()
        mine = list(self.events())
        if copied == mine[: len(copied)] and self._mirror_is_exactly(copied):
            self._append_mirror(mine[len(copied) :])
            return
        temporary = self.mirror_path.with_suffix(".jsonl.new")
        temporary.write_text("".join(map(mirror_line, mine)), encoding="utf-8")
        os.replace(temporary, self.mirror_path)
        self.commit("MIRROR_REWRITTEN", data={"usable_events": len(copied)})

    def _mirror_is_exactly(self, events: list[Event]) -> bool:
        """Whether nothing follows the usable prefix, except a torn last line, which is cut off here."""
        usable = "".join(map(mirror_line, events)).encode()
        try:
            data = self.mirror_path.read_bytes()
        except FileNotFoundError:
            return not events
        if data == usable:
            return True
        rest = data[len(usable) :]
        if data[: len(usable)] == usable and b"\n" not in rest:
            os.truncate(self.mirror_path, len(usable))
            return True
        return False

    def _append_mirror(self, events: list[Event]) -> None:
        if not events:
            return
        with open(self.mirror_path, "a", encoding="utf-8") as file:
            file.write("".join(map(mirror_line, events)))

    # -- writing

    def commit(
        self,
        kind: str,
        changes: Iterable[Change] = (),
        *,
        actor: str = "leader",
        run: str | None = None,
        attempt: int | None = None,
        data: dict[str, Any] | None = None,
    ) -> Event:
        """Record an event and the rows it changes: both, or neither.

        Raises:
            Conflict: a row that had to be new exists.
            DiskFull: no room; nothing was changed.
        """
        recorded = json.loads(canonical([as_record(c) for c in changes]))
        event = Event(
            seq=self._last[0] + 1,
            at=time.time(),
            boottime=boottime(),
            boot=self._boot,
            actor=actor,
            kind=kind,
            run=run,
            attempt=attempt,
            data=json.loads(canonical(data or {})),
            changes=recorded,
            prev=self._last[1],
        )
        event = Event(**{**event.__dict__, "sha": event.computed_sha()})
        reached(f"{kind}:before")
        with self._transaction():
            self._insert(event)
            self._apply(recorded)
        self._last = (event.seq, event.sha)
        self._remember(recorded)
        reached(f"{kind}:after")
        with contextlib.suppress(OSError):
            self._append_mirror([event])
        return event

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self.db.execute("BEGIN IMMEDIATE")
            yield
            self.db.execute("COMMIT")
        except sqlite3.IntegrityError as error:
            self._roll_back()
            raise Conflict(str(error)) from None
        except sqlite3.DatabaseError as error:
            self._roll_back()
            if "full" in str(error) or "disk I/O" in str(error):
                raise DiskFull(f"{self.path}: {error}") from None
            if isinstance(error, sqlite3.OperationalError):
                raise
            raise JournalDamaged(f"{self.path}: {error}") from None

    def _roll_back(self) -> None:
        with contextlib.suppress(sqlite3.DatabaseError):
            self.db.execute("ROLLBACK")

    def _insert(self, event: Event) -> None:
        self.db.execute(
            "INSERT INTO events (seq, body, prev, sha) VALUES (?, ?, ?, ?)",
            (event.seq, event.body(), event.prev, event.sha),
        )

    def _apply(self, changes: list[dict[str, Any]]) -> None:
        for change in changes:
            table = change["table"]
            if "drop" in change:
                self.db.execute(f"DELETE FROM {table} WHERE key = ?", (change["drop"],))
                continue
            verb = "INSERT" if change.get("new") else "REPLACE"
            if verb == "REPLACE":
                self.db.execute(f"DELETE FROM {table} WHERE key = ?", (change["put"],))
            self.db.execute(
                f"INSERT INTO {table} (key, data) VALUES (?, ?)", (change["put"], canonical(change["data"]))
            )

    def _remember(self, changes: list[dict[str, Any]]) -> None:
        """Keep the only writer's copy of the tables in step."""
        for change in changes if self._cache is not None else ():
            rows = self._cache[change["table"]]  # type: ignore[index]  # checked by the loop's condition
            if "put" in change:
                rows[change["put"]] = change["data"]
            else:
                rows.pop(change["drop"], None)

    # -- reading

    def table(self, name: Table) -> dict[str, dict[str, Any]]:
        """All rows: key → data. Not to be changed: changes are committed."""
        if self._cache is not None:
            return self._cache[name]
        rows = self.db.execute(f"SELECT key, data FROM {name} ORDER BY rowid").fetchall()
        return {key: json.loads(data) for key, data in rows}

    def row(self, name: Table, key: str) -> dict[str, Any] | None:
        if self._cache is not None:
            return self._cache[name].get(key)
        found = self.db.execute(f"SELECT data FROM {name} WHERE key = ?", (key,)).fetchone()
        return json.loads(found[0]) if found else None

    def moments(self) -> Iterator[tuple[str, str, float]]:
        """(kind, boot id, seconds since boot) of every event, in order, without reading what they carry."""
        columns = "json_extract(body, '$.kind'), json_extract(body, '$.boot'), json_extract(body, '$.boottime')"
        yield from self.db.execute(f"SELECT {columns} FROM events ORDER BY seq")

    def events(self, *, after: int = 0, run: str | None = None) -> Iterator[Event]:
        """Events in order."""
        rows = self.db.execute("SELECT body, prev, sha FROM events WHERE seq > ? ORDER BY seq", (after,))
        for body, prev, sha in rows:
            event = Event.parse(body, prev, sha)
            if run is None or event.run == run:
                yield event


def as_record(change: Change) -> dict[str, Any]:
    if isinstance(change, Drop):
        return {"table": change.table, "drop": change.key}
    record: dict[str, Any] = {"table": change.table, "put": change.key, "data": change.data}
    return record | {"new": True} if change.new else record


def mirror_line(event: Event) -> str:
    return json.dumps({"body": event.body(), "prev": event.prev, "sha": event.sha}) + "\n"
