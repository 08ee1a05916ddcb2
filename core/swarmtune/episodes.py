"""The episode state machine: claimed → ended | aborted | expired, each episode exactly once.

Owns every episode's id, key, lease and outcome. What always holds: ids and keys are fresh and never reused; an open episode
with a call in flight or an `end` in progress does not expire; a closed one never opens again; a submission that was
answered gets the same answer for as long as the episode is remembered. Knows nothing of HTTP, disks, tokens or wall-clock
time: seconds come from the `clock` it was given.

Ending is prepared, then committed, because the journal lies between the two:

    async with episode.lock:                                    # repeats of the same end wait here for the first answer
        begun = book.begin_end(episode_id, submission_id, reward)
        if begun.answer is not None:
            return begun.answer                                 # a repeat
        ... merge, judge, await journal.write(...)              # on failure: book.cancel_end(episode_id); raise
        book.commit_end(episode_id, result)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swarmtune.protocol import Code, EndResult, EpisodeKind, EpisodeState, EpisodeView

Clock = Callable[[], float]
"""Monotonic seconds."""

MAX_REWARD = 1e18
"""Largest size of a reward: squares of it, summed over a group, still fit the trainer's 32-bit floats."""


class EpisodeError(Exception):
    """A request about an episode that cannot be carried out: `code`, and a message that says how to fix it."""

    code: Code

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnknownEpisode(EpisodeError):
    """No such id or key, or one that was closed so long ago that it is forgotten."""

    code = Code.UNKNOWN_EPISODE


class EpisodeOver(EpisodeError):
    """Ended or aborted."""

    code = Code.EPISODE_OVER


class EpisodeExpired(EpisodeError):
    """Its lease ran out, or it was still running at the drain deadline."""

    code = Code.EPISODE_EXPIRED


class EndConflict(EpisodeError):
    """Ended already under another submission id."""

    code = Code.END_CONFLICT


class BadReward(EpisodeError):
    """Not a finite number. The episode stays open."""

    code = Code.BAD_REWARD


class TooManyEpisodes(EpisodeError):
    code = Code.TOO_MANY_EPISODES


class ClaimConflict(EpisodeError):
    """The claim id was used for another task or kind."""

    code = Code.BAD_REQUEST


@dataclass(slots=True, eq=False)
class Episode:
    """One agent run. Only EpisodeBook changes it."""

    episode_id: str
    key: str | None
    """The secret that its model calls carry; None on one restored from the journal, which is closed."""
    key_digest: str
    """What is kept of the key on disk and looked up in memory."""
    task_id: str
    kind: EpisodeKind
    client: str | None
    lease_s: float
    claim_id: str | None
    weight_version: int
    """At claim."""
    step: int
    """The step it was claimed for."""
    sampling: dict[str, Any]
    claimed_at: float
    """Clock seconds, like last_seen and closed_at."""
    last_seen: float
    state: EpisodeState = EpisodeState.CLAIMED
    reason: str | None = None
    """Why it was aborted or expired."""
    calls: int = 0
    """Model calls begun."""
    in_flight: int = 0
    sampled_tokens: int = 0
    late_calls: int = 0
    """Calls that came after it was closed."""
    closed_at: float | None = None
    submission_id: str | None = None
    """Set from begin_end on, cleared by cancel_end."""
    reward: float | None = None
    result: EndResult | None = None
    """The answer its end got."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    """The server holds it around end and abort, so that a repeat waits for the first answer."""

    @property
    def is_open(self) -> bool:
        return self.state is EpisodeState.CLAIMED

    @property
    def ending(self) -> bool:
        """Between begin_end and commit_end or cancel_end."""
        return self.is_open and self.submission_id is not None


@dataclass(frozen=True, slots=True)
class BegunEnd:
    episode: Episode
    reward: float
    answer: EndResult | None
    """Set on a repeat: give it again and do nothing else."""


@dataclass(slots=True)
class OpenTask:
    """The open training episodes of one task."""

    count: int
    client: str | None
    """Whose task it is: the client of the first of them."""
    newest_claim: float
    """Clock seconds of the latest claim."""


def key_digest(key: str) -> str:
    """What stands for a key on disk: its SHA-256, in hex."""
    raise NotImplementedError


def validate_reward(value: Any) -> float:
    """The reward as a float.

    Raises:
        BadReward: not an int or float (bool, str and None are not), not finite, or larger than MAX_REWARD.
    """
    raise NotImplementedError


class EpisodeBook:
    def __init__(self, clock: Clock, *, max_open: int, remember: int = 20_000) -> None:
        """`max_open` bounds open episodes; the last `remember` closed ones still get their reason or answer."""
        raise NotImplementedError

    # -- claiming

    def claim(
        self,
        task_id: str,
        *,
        lease_s: float,
        kind: EpisodeKind = "train",
        client: str | None = None,
        claim_id: str | None = None,
        weight_version: int = 0,
        step: int = 0,
        sampling: Mapping[str, Any] | None = None,
    ) -> Episode:
        """A fresh open episode; a repeated `claim_id` gets the episode it got before while that is open.

        Raises:
            TooManyEpisodes: `max_open` are open; carries retry_after_s.
            ClaimConflict: the claim id belongs to an episode of another task or kind.
            EpisodeOver, EpisodeExpired: the claim id's episode is closed; claim with a new id.
        """
        raise NotImplementedError

    def claimed_by(self, claim_id: str | None) -> Episode | None:
        """The open episode a repeated claim would get: ask before the pool's may_claim. None when it would be a new one."""
        raise NotImplementedError

    # -- looking up

    def get(self, episode_id: str) -> Episode:
        """Open or closed.

        Raises:
            UnknownEpisode
        """
        raise NotImplementedError

    def by_key(self, key: str) -> Episode:
        """The open episode of a key. A closed one counts a late call.

        Raises:
            UnknownEpisode, EpisodeOver, EpisodeExpired
        """
        raise NotImplementedError

    def open_episodes(self) -> list[Episode]:
        """In order of claim."""
        raise NotImplementedError

    @property
    def open_count(self) -> int:
        raise NotImplementedError

    @property
    def open_tasks(self) -> Mapping[str, OpenTask]:
        """Live view: task id → its open training episodes. Evaluations are not in it."""
        raise NotImplementedError

    @property
    def typical_duration_s(self) -> float:
        """Mean time from claim to end of the last training episodes; 0.0 before the first."""
        raise NotImplementedError

    @property
    def late_calls(self) -> int:
        """Calls on closed or unknown episodes since the start."""
        raise NotImplementedError

    def view(self, episode: Episode) -> EpisodeView:
        raise NotImplementedError

    # -- keeping alive

    def touch(self, episode_id: str) -> Episode:
        """A heartbeat: the lease starts anew.

        Raises:
            UnknownEpisode, EpisodeOver, EpisodeExpired
        """
        raise NotImplementedError

    def begin_call(self, episode: Episode) -> None:
        """A model call starts; until finish_call the episode does not expire.

        Raises:
            EpisodeOver, EpisodeExpired: it was closed meanwhile.
        """
        raise NotImplementedError

    def finish_call(self, episode: Episode, sampled_tokens: int = 0) -> None:
        """The call is over, however it went. Allowed on an episode that was closed meanwhile."""
        raise NotImplementedError

    # -- closing

    def begin_end(self, episode_id: str, submission_id: str, reward: Any) -> BegunEnd:
        """Check an end and hold the episode for it: no expiry, no abort, no further call until commit_end or cancel_end.

        Raises:
            UnknownEpisode, EpisodeOver (aborted), EpisodeExpired
            EndConflict: ended, or being ended, under another submission id.
            BadReward: the episode stays open as it was.
        """
        raise NotImplementedError

    def commit_end(self, episode_id: str, result: EndResult) -> Episode:
        """claimed → ended; `result` is what this submission will be answered from now on."""
        raise NotImplementedError

    def cancel_end(self, episode_id: str) -> None:
        """The end could not be made durable: the episode is open again, its lease starts anew."""
        raise NotImplementedError

    def end(self, episode_id: str, submission_id: str, reward: Any, result: EndResult) -> EndResult:
        """begin_end and commit_end in one, for callers that have nothing to do in between."""
        raise NotImplementedError

    def abort(self, episode_id: str, reason: str = "") -> Episode:
        """claimed → aborted; on an aborted one nothing happens.

        Raises:
            UnknownEpisode, EpisodeExpired
            EpisodeOver: it ended, or is being ended.
        """
        raise NotImplementedError

    def expire(self, episode_id: str, reason: str) -> Episode:
        """claimed → expired now, whatever its lease; what the drain deadline does under `stragglers: expire`.

        Raises:
            UnknownEpisode, EpisodeOver, EpisodeExpired
        """
        raise NotImplementedError

    def expire_due(self) -> list[Episode]:
        """Expire every open episode whose lease ran out, and return them. Calls in flight and ends in progress keep one."""
        raise NotImplementedError

    def next_expiry_s(self) -> float | None:
        """Seconds until the earliest lease could run out; None when nothing is open."""
        raise NotImplementedError

    # -- after a restart

    def restore(self, episode: Episode) -> None:
        """Remember a closed episode from the journal: its key is answered "over", its submission as before."""
        raise NotImplementedError
