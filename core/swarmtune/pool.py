"""The sample pool: finished episodes by task, and the decision when they are a batch (policies C1-C5).

Owns every admitted episode until a batch takes it or it is dropped. What always holds: an admitted episode is in exactly one
of the pool, one batch, or the dropped (with a reason); the same admissions in the same order give the same batches; a
policy that is not met can say in numbers what is missing. Which claims are worth granting is decided here too, because
it follows from what the batch still needs. Knows nothing of HTTP, disks or wall-clock time. docs/batching.md has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from swarmtune.clients import ClientRegistry
from swarmtune.config import BatchingConfig
from swarmtune.episodes import EpisodeBook
from swarmtune.protocol import Code, PoolView
from swarmtune.types import FinishedEpisode, TrainBatch

Clock = Callable[[], float]
"""Monotonic seconds."""


class DropReason(StrEnum):
    """Why an episode that was in the pool will not be trained."""

    ZERO_VARIANCE = "zero_variance"
    """nonzero_variance_task_count: all rewards of its complete task are equal."""
    STALE = "stale"
    """It waited for more than max_staleness weight versions."""


@dataclass(frozen=True, slots=True)
class Dropped:
    episode_id: str
    task_id: str
    reason: DropReason


@dataclass(frozen=True, slots=True)
class Admitted:
    """In the pool. `dropped` are episodes of the same task that this admission showed to be of no use."""

    dropped: tuple[Dropped, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """Not in the pool: NO_CALLS or STALE, and a sentence."""

    code: Code
    message: str


@dataclass(frozen=True, slots=True)
class ClaimWait:
    """Not now: SHARE_FULL or TOO_MANY_EPISODES, a sentence, and when to ask again."""

    code: Code
    message: str
    retry_after_s: float


class SamplePool:
    def __init__(
        self,
        config: BatchingConfig,
        *,
        batch_tasks: int,
        repeats: int,
        clients: ClientRegistry,
        book: EpisodeBook,
        clock: Clock,
    ) -> None:
        """`book` is read for the open episodes of each task; the pool never changes it."""
        raise NotImplementedError

    # -- admission

    def judge(self, episode: FinishedEpisode, *, weight_version: int) -> Rejected | None:
        """Would it be admitted? Changes nothing: ask before the journal is written. None means yes."""
        raise NotImplementedError

    def admit(self, episode: FinishedEpisode, *, weight_version: int) -> Admitted | Rejected:
        """Judge, then take it into the pool. An episode id that is here already is a ValueError."""
        raise NotImplementedError

    def add(self, episode: FinishedEpisode) -> Admitted:
        """Take in what was judged before: what follows a journal write, and a restart."""
        raise NotImplementedError

    def advance(self, weight_version: int) -> list[Dropped]:
        """The weights moved on: drop what is too stale to train. Call after every step."""
        raise NotImplementedError

    # -- batches

    def ready(self, step: int) -> bool:
        """Is the policy met for `step`, the step being collected?"""
        raise NotImplementedError

    def take_batch(self, step: int) -> TrainBatch:
        """Remove what the policy trains in `step` and return it, grouped by task: tasks in the order in which they became
        complete, episodes of a task in order of admission. What it does not take stays.

        Raises:
            ValueError: the policy is not met.
        """
        raise NotImplementedError

    def view(self, step: int) -> PoolView:
        """Every condition of the policy in numbers, one sentence on what is missing, and an ETA."""
        raise NotImplementedError

    # -- claims

    def may_claim(self, task_id: str, client: str | None = None) -> ClaimWait | None:
        """None when a training claim is worth granting now. Evaluations need not ask."""
        raise NotImplementedError

    # -- counts

    def __len__(self) -> int:
        """Episodes in the pool."""
        raise NotImplementedError

    def episodes(self) -> Iterable[FinishedEpisode]:
        """In order of admission."""
        raise NotImplementedError

    @property
    def dropped_counts(self) -> dict[DropReason, int]:
        """Since the start."""
        raise NotImplementedError
