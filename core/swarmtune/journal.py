"""The journal of one run: an SQLite file in the run's folder, the only writer of server state.

What always holds: when `write` returns, its entries are on disk, all of them in one transaction (WAL, synchronous=FULL);
when it raises, none is. Entries that arrive together share a commit. Writes take effect in the order of their calls. One
live server has the file; a second is refused. Samples of a batch stay until a checkpoint at or after its step exists.

    journal = Journal.create(path, config=…)  |  Journal.open(path)
    recovery = journal.recover(checkpoint_step=…)          # once, before anything is written
    await journal.write(EpisodeAccepted(…), EventWritten(…))
    journal.close()

Knows nothing of HTTP, policies or models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmtune.episodes import Episode
from swarmtune.protocol import CheckpointView, Code, EndResult, Event, StepRecord
from swarmtune.types import FinishedEpisode, TrainBatch

SCHEMA_VERSION = 1


class JournalError(Exception):
    """The journal cannot be opened or written; the message says how to fix it. Nothing of the failed write is on disk."""

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
class EventWritten:
    event: Event


@dataclass(frozen=True, slots=True)
class ClientRegistered:
    name: str
    share: int | None


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
    | BatchTrained
    | CheckpointSaved
    | CheckpointRemoved
    | EventWritten
    | ClientRegistered
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
    """Steps after the checkpoint, in order: train them again exactly as they are (their weights are lost). The last one may
    have been planned only."""
    pooled: list[FinishedEpisode]
    """Accepted and in no batch, in order of admission: for SamplePool.add."""
    aborted: list[str]
    """Episode ids that were open; they are aborted(server_restart) now, on disk too."""
    closed: list[Episode]
    """The last closed episodes, oldest first, those aborted just now included: for EpisodeBook.restore."""
    clients: dict[str, int | None]
    """Name → share of the registered clients."""
    last_seq: int
    """Of the events; 0 without any."""
    steps: list[StepRecord]
    """Records of the steps up to the checkpoint."""
    checkpoints: list[CheckpointView]
    meta: dict[str, Any]


class Journal:
    @classmethod
    def create(cls, path: Path, *, config: Mapping[str, Any], max_bytes: int | None = None) -> Journal:
        """A new journal at `path` for a run with this resolved configuration. `max_bytes` bounds the file.

        Raises:
            JournalError: it exists, the folder is not writable, no space.
        """
        raise NotImplementedError

    @classmethod
    def open(cls, path: Path, *, max_bytes: int | None = None) -> Journal:
        """The journal of an earlier run.

        Raises:
            JournalError: missing, corrupt, of another schema version, read-only, or held by another live server.
        """
        raise NotImplementedError

    def recover(self, *, checkpoint_step: int = 0, remember: int = 20_000) -> Recovery:
        """Blocking. Closes what was open and forgets that steps after `checkpoint_step` were trained, in one transaction;
        running it twice gives the same. Call it once, after open and before the first write.

        Raises:
            JournalError: a batch after the checkpoint whose samples are gone (the checkpoint is older than one that was
            saved), or a corrupt page.
        """
        raise NotImplementedError

    async def write(self, *entries: Entry) -> None:
        """Returns once the entries are on disk, in one transaction with whatever arrived at the same time. Cancelling the
        caller does not undo the write.

        Raises:
            JournalError: none of these entries is on disk. JournalClosed after close.
        """
        raise NotImplementedError

    async def barrier(self) -> None:
        """Returns once everything written before is on disk or has raised."""
        raise NotImplementedError

    async def events_after(self, seq: int, limit: int = 1000) -> list[Event]:
        """Events with a greater sequence number, in order."""
        raise NotImplementedError

    async def steps_after(self, step: int) -> list[StepRecord]:
        """Records of the trained steps with a greater number, in order."""
        raise NotImplementedError

    async def checkpoints(self) -> list[CheckpointView]:
        """In order of step."""
        raise NotImplementedError

    @property
    def path(self) -> Path:
        raise NotImplementedError

    def close(self) -> None:
        """Write what is queued, then release the file. Blocking, idempotent."""
        raise NotImplementedError
