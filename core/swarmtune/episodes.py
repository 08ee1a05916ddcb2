"""The episode state machine: claimed → ended | aborted | expired, each episode exactly once.

Owns every episode's id, key, lease and outcome. What always holds: ids and keys are fresh and never reused; an open
episode with a call in flight or an `end` in progress does not expire by its lease; a closed one never opens again; a
submission that was answered gets the same answer for as long as the episode is remembered. Leases are enforced by
`expire_due`, not by looking. Knows nothing of HTTP, disks, tokens or wall-clock time: seconds come from the `clock`.

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
import hashlib
import math
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

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
    evaluation_id: str | None = None
    """kind evaluate: the evaluation it belongs to, if one was begun."""
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
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def validate_reward(value: Any) -> float:
    """The reward as a float.

    Raises:
        BadReward: not an int or float (bool, str and None are not), not finite, or larger than MAX_REWARD.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadReward(f"reward {_short(value)} is not a number but {type(value).__name__}; send a finite number")
    # An int too large for a float is caught by this comparison; float() of it would overflow.
    if not -MAX_REWARD <= value <= MAX_REWARD:
        what = "not finite" if isinstance(value, float) and not math.isfinite(value) else f"beyond ±{MAX_REWARD:g}"
        raise BadReward(f"reward {_short(value)} is {what}; check the reward function (division by zero, log of 0)")
    return float(value)


def _short(value: Any) -> str:
    text = f"an int of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 80 else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


class EpisodeBook:
    def __init__(self, clock: Clock, *, max_open: int, evaluation_slots: int = 0, remember: int = 20_000) -> None:
        """`max_open` bounds open episodes, evaluations left out where they have `evaluation_slots` of their own; the
        last `remember` closed ones still get their reason or answer."""
        self._clock = clock
        self._max_open = max_open
        self._evaluation_slots = evaluation_slots
        self._open_evaluations = 0
        self._remember = remember
        self._open: dict[str, Episode] = {}
        self._closed: OrderedDict[str, Episode] = OrderedDict()
        self._by_digest: dict[str, Episode] = {}
        self._by_claim: dict[str, Episode] = {}
        self._open_tasks: dict[str, OpenTask] = {}
        self._durations: deque[float] = deque(maxlen=64)
        self._late_calls = 0

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
        evaluation_id: str | None = None,
    ) -> Episode:
        """A fresh open episode; a repeated `claim_id` gets the episode it got before while that is open.

        Raises:
            TooManyEpisodes: no place is free for this kind; carries retry_after_s.
            ClaimConflict: the claim id belongs to an episode of another task or kind.
            EpisodeOver, EpisodeExpired: the claim id's episode is closed; claim with a new id.
        """
        if claim_id is not None and claim_id in self._by_claim:
            return self._claimed_before(claim_id, task_id, kind)
        if self.places_left(kind) < 1:
            raise TooManyEpisodes(self._why_full(kind), retry_after_s=1.0)
        now, key = self._clock(), "sk-ep-" + secrets.token_urlsafe(32)
        episode = Episode(
            episode_id="ep-" + secrets.token_hex(12),
            key=key,
            key_digest=key_digest(key),
            task_id=task_id,
            kind=kind,
            client=client,
            lease_s=lease_s,
            claim_id=claim_id,
            weight_version=weight_version,
            step=step,
            sampling=dict(sampling or {}),
            evaluation_id=evaluation_id,
            claimed_at=now,
            last_seen=now,
        )
        self._open[episode.episode_id] = self._by_digest[episode.key_digest] = episode
        if claim_id is not None:
            self._by_claim[claim_id] = episode
        self._count_open(episode)
        return episode

    def claimed_by(self, claim_id: str | None) -> Episode | None:
        """The open episode a repeated claim would get, or None: ask before the pool's may_claim."""
        episode = self._by_claim.get(claim_id) if claim_id is not None else None
        return episode if episode is not None and episode.is_open else None

    def places_left(self, kind: EpisodeKind) -> int:
        """How many more episodes of this kind may be open. One kind never takes the other's places, where evaluations
        have slots."""
        if not self._evaluation_slots:
            return self._max_open - len(self._open)
        if kind == "evaluate":
            return self._evaluation_slots - self._open_evaluations
        return self._max_open - (len(self._open) - self._open_evaluations)

    def _why_full(self, kind: EpisodeKind) -> str:
        if kind == "evaluate" and self._evaluation_slots:
            return (
                f"{self._open_evaluations} evaluation episodes are open, which is the limit; end or abort some, or "
                "raise evaluation.slots"
            )
        return (
            f"{len(self._open)} episodes are open, which is the limit; end or abort some, or raise "
            "batching.max_open_episodes"
        )

    def _claimed_before(self, claim_id: str, task_id: str, kind: EpisodeKind) -> Episode:
        episode = self._by_claim[claim_id]
        if (episode.task_id, episode.kind) != (task_id, kind):
            raise ClaimConflict(
                f"claim id {claim_id!r} was used for task {episode.task_id!r} ({episode.kind}); "
                "use a new id for each claim"
            )
        if not episode.is_open:
            self._refuse_closed(episode, fix="claim again with a new claim id")
        episode.last_seen = self._clock()
        return episode

    # -- looking up

    def get(self, episode_id: str) -> Episode:
        """Open or closed.

        Raises:
            UnknownEpisode
        """
        episode = self._open.get(episode_id) or self._closed.get(episode_id)
        if episode is None:
            raise UnknownEpisode(
                f"no episode {episode_id!r}: never claimed here, or closed long ago; claim one with POST /v1/episodes"
            )
        return episode

    def by_key(self, key: str) -> Episode:
        """The open episode of a key. A closed one counts a late call.

        Raises:
            UnknownEpisode, EpisodeOver, EpisodeExpired
        """
        episode = self._by_digest.get(key_digest(key))
        if episode is None:
            self._late_calls += 1
            raise UnknownEpisode(
                "no episode has this key: it was never given out here, or its episode closed long ago; "
                "use the api_key that the claim returned"
            )
        if not episode.is_open:
            episode.late_calls += 1
            self._late_calls += 1
            self._refuse_closed(episode)
        return episode

    def open_episodes(self) -> list[Episode]:
        """In order of claim."""
        return list(self._open.values())

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def open_tasks(self) -> Mapping[str, OpenTask]:
        """Live view: task id → its open training episodes. Evaluations are not in it."""
        return MappingProxyType(self._open_tasks)

    @property
    def typical_duration_s(self) -> float:
        """Mean time from claim to end of the last training episodes; 0.0 before the first."""
        return sum(self._durations) / len(self._durations) if self._durations else 0.0

    @property
    def late_calls(self) -> int:
        """Calls on closed or unknown episodes since the start."""
        return self._late_calls

    def view(self, episode: Episode) -> EpisodeView:
        return EpisodeView(
            episode_id=episode.episode_id,
            task_id=episode.task_id,
            kind=episode.kind,
            state=episode.state,
            reason=episode.reason,
            reward=episode.reward if episode.state is EpisodeState.ENDED else None,
            calls=episode.calls,
            late_calls=episode.late_calls,
            sampled_tokens=episode.sampled_tokens,
            weight_version=episode.weight_version,
            lease_left_s=max(0.0, self._lease_end(episode) - self._clock()) if episode.is_open else None,
        )

    # -- keeping alive

    def touch(self, episode_id: str) -> Episode:
        """A heartbeat: the lease starts anew.

        Raises:
            UnknownEpisode, EpisodeOver, EpisodeExpired
        """
        episode = self._get_open(episode_id)
        episode.last_seen = self._clock()
        return episode

    def begin_call(self, episode: Episode) -> None:
        """A model call starts; until finish_call the episode does not expire by its lease.

        Raises:
            EpisodeOver: it is closed, or its end is being worked on.
            EpisodeExpired
        """
        if not episode.is_open:
            self._refuse_closed(episode)
        if episode.ending:
            raise EpisodeOver(f"episode {episode.episode_id} is being ended; make every call before `end`")
        episode.calls += 1
        episode.in_flight += 1
        episode.last_seen = self._clock()

    def finish_call(self, episode: Episode, sampled_tokens: int = 0) -> None:
        """The call is over, however it went. Allowed on an episode that was closed meanwhile."""
        if episode.in_flight < 1:
            raise ValueError(f"episode {episode.episode_id}: finish_call without begin_call")
        episode.in_flight -= 1
        episode.sampled_tokens += sampled_tokens
        episode.last_seen = self._clock()

    # -- closing

    def begin_end(self, episode_id: str, submission_id: str, reward: Any) -> BegunEnd:
        """Check an end and hold the episode for it: no expiry, no abort, no call until commit_end or cancel_end.

        Raises:
            UnknownEpisode, EpisodeOver (aborted), EpisodeExpired
            EndConflict: ended, or being ended, under another submission id.
            BadReward: the episode stays open as it was.
        """
        episode = self.get(episode_id)
        if episode.state is EpisodeState.ENDED or episode.ending:
            if episode.submission_id != submission_id:
                raise EndConflict(
                    f"episode {episode_id} was ended by another submission; one episode has one reward: "
                    "repeat an end with its own submission id, or claim a new episode"
                )
            if episode.ending:
                raise RuntimeError(f"episode {episode_id}: two ends at a time; hold episode.lock around end")
            return BegunEnd(episode, episode.reward or 0.0, episode.result)
        if not episode.is_open:
            self._refuse_closed(episode)
        value = validate_reward(reward)
        episode.submission_id, episode.reward = submission_id, value
        return BegunEnd(episode, value, None)

    def commit_end(self, episode_id: str, result: EndResult) -> Episode:
        """claimed → ended; `result` is what this submission will be answered from now on."""
        episode = self._get_ending(episode_id)
        episode.result = result
        if episode.kind == "train":
            self._durations.append(self._clock() - episode.claimed_at)
        self._close(episode, EpisodeState.ENDED, None)
        return episode

    def cancel_end(self, episode_id: str) -> None:
        """The end could not be made durable: the episode is open again, its lease starts anew."""
        episode = self._get_ending(episode_id)
        episode.submission_id = episode.reward = None
        episode.last_seen = self._clock()

    def end(self, episode_id: str, submission_id: str, reward: Any, result: EndResult) -> EndResult:
        """begin_end and commit_end in one, for callers that have nothing to do in between."""
        begun = self.begin_end(episode_id, submission_id, reward)
        if begun.answer is not None:
            return begun.answer
        self.commit_end(episode_id, result)
        return result

    def abort(self, episode_id: str, reason: str = "") -> Episode:
        """claimed → aborted; on an aborted one nothing happens.

        Raises:
            UnknownEpisode, EpisodeExpired
            EpisodeOver: it ended, or is being ended.
        """
        episode = self.get(episode_id)
        if episode.state is EpisodeState.ABORTED:
            return episode
        self._get_closable(episode_id)
        self._close(episode, EpisodeState.ABORTED, reason)
        return episode

    def expire(self, episode_id: str, reason: str) -> Episode:
        """claimed → expired now, whatever its lease; what the drain deadline does under `stragglers: expire`.

        Raises:
            UnknownEpisode, EpisodeOver, EpisodeExpired
        """
        episode = self._get_closable(episode_id)
        self._close(episode, EpisodeState.EXPIRED, reason)
        return episode

    def expire_due(self) -> list[Episode]:
        """Expire and return every open episode whose lease ran out. Calls in flight and ends in progress keep one."""
        now = self._clock()
        due = [e for e in self._open.values() if self._lease_end(e) <= now]
        for episode in due:
            self._close(episode, EpisodeState.EXPIRED, f"no call and no heartbeat for {episode.lease_s:g} s")
        return due

    def next_expiry_s(self) -> float | None:
        """Seconds until the earliest lease runs out; None when none can."""
        ends = [end for e in self._open.values() if math.isfinite(end := self._lease_end(e))]
        return max(0.0, min(ends) - self._clock()) if ends else None

    # -- after a restart

    def restore(self, episode: Episode) -> None:
        """Remember a closed episode from the journal: its key is answered "over", its submission as before."""
        if episode.is_open:
            raise ValueError(f"episode {episode.episode_id} is open; only closed ones can be restored")
        self._keep_closed(episode)

    # -- inside

    def _lease_end(self, episode: Episode) -> float:
        """Clock seconds; infinite while a call is in flight or an end in progress."""
        return math.inf if episode.in_flight or episode.ending else episode.last_seen + episode.lease_s

    def _get_open(self, episode_id: str) -> Episode:
        episode = self.get(episode_id)
        if not episode.is_open:
            self._refuse_closed(episode)
        return episode

    def _get_closable(self, episode_id: str) -> Episode:
        episode = self._get_open(episode_id)
        if episode.ending:
            raise EpisodeOver(f"episode {episode_id} is being ended; its reward will count")
        return episode

    def _get_ending(self, episode_id: str) -> Episode:
        episode = self.get(episode_id)
        if not episode.ending:
            raise ValueError(f"episode {episode_id}: no end was begun")
        return episode

    def _refuse_closed(self, episode: Episode, fix: str = "claim a new one with POST /v1/episodes") -> NoReturn:
        because = f" ({episode.reason})" if episode.reason else ""
        if episode.state is EpisodeState.EXPIRED:
            raise EpisodeExpired(
                f"episode {episode.episode_id} has expired{because}; {fix}, and send heartbeats or ask for a longer "
                "lease_s"
            )
        raise EpisodeOver(f"episode {episode.episode_id} is {episode.state}{because}; {fix}")

    def _close(self, episode: Episode, state: EpisodeState, reason: str | None) -> None:
        episode.state, episode.reason, episode.closed_at = state, reason, self._clock()
        del self._open[episode.episode_id]
        self._uncount_open(episode)
        self._keep_closed(episode)

    def _keep_closed(self, episode: Episode) -> None:
        self._closed[episode.episode_id] = self._by_digest[episode.key_digest] = episode
        while len(self._closed) > self._remember:
            _, forgotten = self._closed.popitem(last=False)
            del self._by_digest[forgotten.key_digest]
            if forgotten.claim_id is not None:
                self._by_claim.pop(forgotten.claim_id, None)

    def _count_open(self, episode: Episode) -> None:
        if episode.kind != "train":
            self._open_evaluations += 1
            return
        task = self._open_tasks.setdefault(episode.task_id, OpenTask(0, episode.client, episode.claimed_at))
        task.count += 1
        task.newest_claim = episode.claimed_at

    def _uncount_open(self, episode: Episode) -> None:
        if episode.kind != "train":
            self._open_evaluations -= 1
            return
        task = self._open_tasks[episode.task_id]
        task.count -= 1
        if not task.count:
            del self._open_tasks[episode.task_id]
