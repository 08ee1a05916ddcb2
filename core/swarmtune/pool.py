"""The sample pool: finished episodes by task, and the decision when they are a batch (policies C1-C5).

Owns every admitted episode until a batch takes it or it is dropped. What always holds: an admitted episode is in one
of the pool, one batch, or the dropped (with a reason); the same admissions in the same order give the same batches; a
policy that is not met can say in numbers what is missing. Which claims are worth granting is decided here too, for it
follows from what the batch still needs. Knows nothing of HTTP, disks or wall-clock time. The rules: docs/batching.md.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from swarmtune.clients import ClientRegistry
from swarmtune.config import BatchingConfig
from swarmtune.episodes import EpisodeBook
from swarmtune.protocol import Code, Condition, PoolView
from swarmtune.types import FinishedEpisode, TrainBatch

Clock = Callable[[], float]
"""Monotonic seconds."""


class DropReason(StrEnum):
    """Why an episode that was in the pool will not be trained."""

    ZERO_VARIANCE = "zero_variance"
    """nonzero_variance_task_count: all rewards of its complete task are equal."""
    STALE = "stale"
    """It waited for more than max_staleness weight versions."""
    UPDATE_FAILED = "update_failed"
    """The update of its batch raised; the step's warning has the reason."""


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


@dataclass(slots=True)
class _Entry:
    seq: int
    """Order of admission."""
    episode: FinishedEpisode


@dataclass(slots=True)
class _Group:
    """The pooled episodes of one task, in order of admission."""

    task_id: str
    client: str | None
    """Whose task it is: the client of its first episode."""
    entries: list[_Entry] = field(default_factory=list)
    complete_seq: int | None = None
    """The admission that made it complete; None while it is not."""
    last_admitted: float = -math.inf
    """Clock seconds; -inf when all of it was there before a restart."""

    @property
    def rewards_differ(self) -> bool:
        first = self.entries[0].episode.reward
        return any(e.episode.reward != first for e in self.entries)


PATIENCE_UNKNOWN_S = 120.0
PATIENCE_LEAST_S = 30.0
PATIENCE_FACTOR = 4.0
PATIENCE_IDLE_S = 5.0
"""A task holds a place in the batch while something of it was claimed or finished within the patience: this many times
the usual duration of an episode, at least PATIENCE_LEAST_S; PATIENCE_UNKNOWN_S before the first episode has ended.
PATIENCE_IDLE_S while no episode is open at all: whoever began the tasks has gone, and a claim would wait for nobody."""

RECENT_ADMISSIONS = 64
"""How many admissions the rate, and so the ETA, is taken from."""


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
        self._config = config
        self._batch_tasks = batch_tasks
        self._repeats = repeats
        self._clients = clients
        self._book = book
        self._clock = clock
        self._groups: dict[str, _Group] = {}
        self._pooled: dict[str, _Entry] = {}
        self._next_seq = 0
        self._admitted_at: deque[float] = deque(maxlen=RECENT_ADMISSIONS)
        self._dropped: Counter[DropReason] = Counter()
        self._tasks_completed = 0
        self._tasks_flat = 0

    # -- admission

    def judge(self, episode: FinishedEpisode, *, weight_version: int) -> Rejected | None:
        """Would it be admitted? Changes nothing: ask before the journal is written. None means yes."""
        if not any(any(s.loss_mask) for s in episode.samples):
            return Rejected(
                Code.NO_CALLS,
                f"episode {episode.episode_id} has no sampled token to train on: make at least one model call "
                "with its api_key and base_url before `end`",
            )
        age = weight_version - episode.weight_version
        if age > self._config.max_staleness:
            return Rejected(
                Code.STALE,
                f"episode {episode.episode_id} was claimed {age} weight versions ago, more than "
                f"batching.max_staleness {self._config.max_staleness}; claim a new one, or raise it",
            )
        return None

    def admit(self, episode: FinishedEpisode, *, weight_version: int) -> Admitted | Rejected:
        """Judge, then take it into the pool. An episode id that is here already is a ValueError."""
        return self.judge(episode, weight_version=weight_version) or self.add(episode)

    def restore(self, episode: FinishedEpisode) -> None:
        """Take in what was in the pool of a server that was restarted. Whether anybody goes on with its task is not
        known: until somebody does, an incomplete one holds no place in the batch."""
        self._take_in(episode, now=None)

    def add(self, episode: FinishedEpisode) -> Admitted:
        """Take in what was judged before, after a journal write."""
        return self._take_in(episode, now=self._clock())

    def _take_in(self, episode: FinishedEpisode, *, now: float | None) -> Admitted:
        if episode.episode_id in self._pooled:
            raise ValueError(f"episode {episode.episode_id} is in the pool already")
        entry = _Entry(self._next_seq, episode)
        group = self._groups.setdefault(episode.task_id, _Group(episode.task_id, episode.client))
        self._next_seq += 1
        self._pooled[episode.episode_id] = entry
        group.entries.append(entry)
        if now is not None:
            group.last_admitted = now
            self._admitted_at.append(now)
        if group.complete_seq is None and len(group.entries) >= self._repeats:
            return self._complete(group)
        return Admitted()

    def _complete(self, group: _Group) -> Admitted:
        self._tasks_completed += 1
        group.complete_seq = group.entries[-1].seq
        if group.rewards_differ:
            return Admitted()
        self._tasks_flat += 1
        if self._config.policy != "nonzero_variance_task_count":
            return Admitted()
        return Admitted(tuple(self._drop(list(group.entries), DropReason.ZERO_VARIANCE)))

    def advance(self, weight_version: int) -> list[Dropped]:
        """The weights moved on: drop what is too stale to train. Call after every step."""
        oldest = weight_version - self._config.max_staleness
        stale = [e for e in self._pooled.values() if e.episode.weight_version < oldest]
        return self._drop(stale, DropReason.STALE)

    # -- batches

    def ready(self, step: int) -> bool:
        """Is the policy met for `step`, the step being collected?"""
        return all(c.met for c in self._conditions(step))

    def take_batch(self, step: int) -> TrainBatch:
        """Remove what the policy trains in `step` and return it, grouped by task, episodes of a task in order of
        admission. Tasks come in the order in which they became complete; under a policy that asks for no complete
        tasks, in the order of their first episode. What it does not take stays. It takes what there is even if the
        policy is met no longer (a client came back): a step that began draining is not called off.

        Raises:
            ValueError: there is nothing to train.
        """
        chosen = self._choose()
        if not chosen:
            raise ValueError(f"step {step}: the pool holds nothing that policy {self._config.policy} would train")
        self._remove(chosen)
        return TrainBatch(step, [e.episode for e in chosen])

    def view(self, step: int) -> PoolView:
        """Every condition of the policy in numbers, one sentence on what is missing, and an ETA."""
        conditions = self._conditions(step)
        ready = all(c.met for c in conditions)
        complete = [g for g in self._groups.values() if g.complete_seq is not None]
        return PoolView(
            policy=self._config.policy,
            step=step,
            ready=ready,
            conditions=conditions,
            explanation=self._explain(step, conditions),
            eta_s=0.0 if ready else self._eta_s(),
            episodes=len(self._pooled),
            tasks=len(self._groups),
            tasks_complete=len(complete),
            tasks_with_variance=sum(g.rewards_differ for g in complete),
            open_episodes=self._book.open_count,
        )

    # -- claims

    def may_claim(self, task_id: str, client: str | None = None) -> ClaimWait | None:
        """None when a training claim is worth granting now. Evaluations need not ask."""
        match self._config.policy:
            case "episode_count":
                return self._may_claim_episode(client)
            case "task_count" | "nonzero_variance_task_count":
                return self._may_claim_repeat(task_id) or self._may_claim_task(task_id, client)
            case "all_clients_agree" | "any_client_agrees":
                return self._may_claim_task(task_id, client) if self._sharers()(client) else None

    # -- counts

    def __len__(self) -> int:
        """Episodes in the pool."""
        return len(self._pooled)

    def episodes(self) -> Iterable[FinishedEpisode]:
        """In order of admission."""
        return [e.episode for e in self._pooled.values()]

    @property
    def dropped_counts(self) -> dict[DropReason, int]:
        """Episodes dropped since the start."""
        return {reason: self._dropped[reason] for reason in DropReason}

    # -- what a batch takes

    def _choose(self) -> list[_Entry]:
        """What a batch would take now, in the batch's order."""
        match self._config.policy:
            case "episode_count":
                return self._by_task(self._choose_episodes())
            case "task_count" | "nonzero_variance_task_count":
                return [e for g in self._choose_tasks() for e in g.entries]
            case "all_clients_agree" | "any_client_agrees":
                return self._by_task(list(self._pooled.values()))

    def _choose_episodes(self) -> list[_Entry]:
        """The oldest batch_tasks · repeats episodes, of each sharer at most its share · repeats."""
        left = {holder: places * self._repeats for holder, places in self._places().items()}
        sharer, chosen = self._sharers(), list[_Entry]()
        for entry in self._pooled.values():
            holder = sharer(entry.episode.client)
            if left[holder] > 0:
                left[holder] -= 1
                chosen.append(entry)
        return chosen[: self._batch_tasks * self._repeats]

    def _choose_tasks(self) -> list[_Group]:
        """The batch_tasks tasks that were complete first, of each sharer at most its share."""
        complete = [(g.complete_seq, g) for g in self._groups.values() if g.complete_seq is not None]
        left, sharer = self._places(), self._sharers()
        chosen: list[_Group] = []
        for _, group in sorted(complete, key=lambda pair: pair[0]):
            holder = sharer(group.client)
            if left[holder] > 0:
                left[holder] -= 1
                chosen.append(group)
        return chosen[: self._batch_tasks]

    @staticmethod
    def _by_task(entries: list[_Entry]) -> list[_Entry]:
        """Tasks in order of their first entry, entries of a task together."""
        tasks: dict[str, list[_Entry]] = {}
        for entry in entries:
            tasks.setdefault(entry.episode.task_id, []).append(entry)
        return [e for group in tasks.values() for e in group]

    def _remove(self, entries: list[_Entry]) -> None:
        gone = {e.seq for e in entries}
        for task_id in {e.episode.task_id for e in entries}:
            group = self._groups[task_id]
            group.entries = [e for e in group.entries if e.seq not in gone]
            if len(group.entries) < self._repeats:
                group.complete_seq = None
            if not group.entries:
                del self._groups[task_id]
        for entry in entries:
            del self._pooled[entry.episode.episode_id]

    def _drop(self, entries: list[_Entry], reason: DropReason) -> list[Dropped]:
        self._remove(entries)
        self._dropped[reason] += len(entries)
        return [Dropped(e.episode.episode_id, e.episode.task_id, reason) for e in entries]

    # -- shares

    def _sharers(self) -> Callable[[str | None], str | None]:
        """Client → itself where it is alive and has a share; None stands for everybody else together."""
        shares = self._clients.live_shares()  # once for all the episodes that are then asked about
        return lambda client: client if client in shares else None

    def _places(self) -> dict[str | None, int]:
        """Tasks of a batch by holder: each live sharer's share; under None what is left for everybody else."""
        shares: dict[str | None, int] = {**self._clients.live_shares()}
        return {**shares, None: max(0, self._batch_tasks - sum(shares.values()))}

    def _fillable(self, others: int, unit: int) -> int:
        """Places, in units of a task, that somebody alive can fill; `others` are filled by those without a live share.

        All of the batch, unless a client with a share is gone and only clients with a share are left: they could never
        fill its places, and training must not wait for the dead.
        """
        everything = self._batch_tasks * unit
        shares = self._clients.live_shares()
        if not self._clients.lapsed_shares() or not shares or len(shares) < len(self._clients.live()):
            return everything
        return min(everything, sum(shares.values()) * unit + others)

    # -- conditions

    def _conditions(self, step: int) -> list[Condition]:
        match self._config.policy:
            case "episode_count":
                return self._count_conditions("episodes", self._chosen_by_sharer(), self._repeats)
            case "task_count":
                return self._count_conditions("complete_tasks", self._chosen_by_sharer(), 1)
            case "nonzero_variance_task_count":
                return self._count_conditions("tasks_with_variance", self._chosen_by_sharer(), 1)
            case "all_clients_agree":
                return [self._all_agree(step), self._not_empty()]
            case "any_client_agrees":
                return [self._any_agrees(step), self._not_empty()]

    def _chosen_by_sharer(self) -> Counter[str | None]:
        """What a batch would take now: episodes under C1, tasks under C2 and C3."""
        sharer = self._sharers()
        if self._counts_tasks:
            return Counter(sharer(g.client) for g in self._choose_tasks())
        return Counter(sharer(e.episode.client) for e in self._choose_episodes())

    def _count_conditions(self, name: str, chosen: Counter[str | None], unit: int) -> list[Condition]:
        have, need = chosen.total(), self._fillable(chosen[None], unit)
        total = _condition(name, have, max(need, unit), self._count_detail(need // unit))
        return [total] + [
            _condition(f"{name}_of:{client}", chosen[client], share * unit)
            for client, share in sorted(self._clients.live_shares().items())
        ]

    def _count_detail(self, places: int) -> str:
        if places >= self._batch_tasks:
            return ""
        gone = ", ".join(sorted(self._clients.lapsed_shares()))
        missing = self._batch_tasks - places
        return f"{missing} of {self._batch_tasks} tasks are not waited for: their client is gone ({gone})"

    def _all_agree(self, step: int) -> Condition:
        agreement = self._clients.agreement(step)
        deadline, age = self._config.agree_deadline_s, agreement.first_age_s
        late = deadline is not None and age is not None and age >= deadline
        if late and agreement.agreed < agreement.needed:
            detail = f"the deadline of {deadline:g} s after the first agreement has passed"
        elif not agreement.live:
            detail = "no registered client is alive: register one and let it agree"
        elif agreement.missing:
            detail = f"not agreed: {', '.join(agreement.missing)}"
        else:
            detail = ""
        met = late or agreement.agreed >= agreement.needed
        return Condition(name="agreeing_clients", have=agreement.agreed, need=agreement.needed, met=met, detail=detail)

    def _any_agrees(self, step: int) -> Condition:
        agreement = self._clients.agreement(step)
        detail = "" if agreement.live else "no registered client is alive: register one and let it agree"
        return _condition("agreeing_clients", agreement.signals, 1, detail)

    def _not_empty(self) -> Condition:
        return _condition("episodes", len(self._pooled), 1)

    # -- words and times

    def _explain(self, step: int, conditions: list[Condition]) -> str:
        unmet = [c for c in conditions if not c.met]
        if not unmet:
            return f"step {step} can start: " + ", ".join(f"{_words(c)} {c.have:g}" for c in conditions)
        parts = [f"step {step} waits for " + " and ".join(_in_numbers(c) for c in unmet)]
        if self._counts_tasks and (partial := self._partial_groups()):
            shown = ", ".join(f"{g.task_id[:40]!r} {len(g.entries)}/{self._repeats}" for g in partial[:3])
            parts.append(f"closest: {shown}")
        if flat := self._dropped[DropReason.ZERO_VARIANCE]:
            parts.append(f"{flat} episodes were dropped because their task's rewards were all equal")
        parts.append(self._movement())
        return "; ".join(parts)

    @property
    def _counts_tasks(self) -> bool:
        return self._config.policy in {"task_count", "nonzero_variance_task_count"}

    def _movement(self) -> str:
        if self._book.open_count:
            return f"{self._book.open_count} episodes are open"
        if not self._admitted_at:
            return "no episode is open, none was admitted yet"
        return f"no episode is open, the last was admitted {self._clock() - self._admitted_at[-1]:.0f} s ago"

    def _partial_groups(self) -> list[_Group]:
        """Incomplete tasks, the nearest to completion first."""
        partial = [g for g in self._groups.values() if g.complete_seq is None]
        return sorted(partial, key=lambda g: -len(g.entries))

    def _eta_s(self) -> float | None:
        missing, rate = self._missing_episodes(), self._admissions_per_s()
        return None if missing is None or rate is None else missing / rate

    def _missing_episodes(self) -> float | None:
        """Admissions until the policy is met; None where it does not follow from admissions."""
        if self._config.policy == "episode_count":
            chosen = self._chosen_by_sharer()
            return max(0, self._fillable(chosen[None], self._repeats) - chosen.total())
        if not self._counts_tasks:
            return None
        chosen = self._chosen_by_sharer()
        tasks = max(0, self._fillable(chosen[None], 1) - chosen.total())
        begun = sum(len(g.entries) for g in self._partial_groups()[:tasks])
        missing = tasks * self._repeats - begun
        return missing / self._useful_part() if self._config.policy == "nonzero_variance_task_count" else missing

    def _useful_part(self) -> float:
        """Part of the complete tasks so far whose rewards differed, smoothed so that it is never 0."""
        return (self._tasks_completed - self._tasks_flat + 1) / (self._tasks_completed + 1)

    def _admissions_per_s(self) -> float | None:
        """Over the recent admissions and the silence since; None when nothing is moving."""
        if len(self._admitted_at) < 2:
            return None
        first, last, now = self._admitted_at[0], self._admitted_at[-1], self._clock()
        gap = (last - first) / (len(self._admitted_at) - 1)
        if now - last > max(self._patience_s(), 10 * gap):
            return None
        return (len(self._admitted_at) - 1) / max(now - first, 1e-3)

    # -- which claims are worth granting

    def _patience_s(self) -> float:
        usual = self._book.typical_duration_s
        return max(PATIENCE_LEAST_S, PATIENCE_FACTOR * usual) if usual else PATIENCE_UNKNOWN_S

    def _moves(self, task_id: str) -> bool:
        """Was something of this task claimed or finished lately? A stuck or abandoned one gives up its place."""
        group, opened = self._groups.get(task_id), self._book.open_tasks.get(task_id)
        last = max(group.last_admitted if group else -math.inf, opened.newest_claim if opened else -math.inf)
        patience_s = self._patience_s() if self._book.open_tasks else PATIENCE_IDLE_S
        return self._clock() - last <= patience_s

    def _may_claim_repeat(self, task_id: str) -> ClaimWait | None:
        """A task with enough episodes, finished or open, needs no more.

        Unless nothing else is running: a client that runs a task more often than `repeats`, one episode after the
        other, would wait for itself. Its surplus is trained with the task. Once two batches are in the pool it comes no
        faster than one per patience.
        """
        pooled = len(self._groups[task_id].entries) if task_id in self._groups else 0
        opened = self._book.open_tasks.get(task_id)
        total = pooled + (opened.count if opened else 0)
        roomy = len(self._pooled) < 2 * self._batch_tasks * self._repeats or not self._moves(task_id)
        if total < self._repeats or (roomy and not self._book.open_tasks and not self._enough()):
            return None
        return self._wait(
            Code.TOO_MANY_EPISODES,
            f"task {task_id!r} has {total} episodes finished or open and needs {self._repeats}; "
            "claim another task, or wait for the next step",
        )

    def _may_claim_task(self, task_id: str, client: str | None) -> ClaimWait | None:
        """A task not yet begun needs a place in the batch; one that was begun may be finished."""
        if task_id in self._groups or task_id in self._book.open_tasks:
            return None
        holder = self._sharers()(client)
        places, held = self._places()[holder], self._tasks_held(holder)
        if held < places:
            return None
        return self._no_place(holder, f"{held} tasks begun or complete, of {places}")

    def _tasks_held(self, holder: str | None) -> int:
        """Places of the batch that the holder's tasks take: complete ones and those that move."""
        held, sharer = 0, self._sharers()
        for task_id in self._groups.keys() | self._book.open_tasks.keys():
            group = self._groups.get(task_id)
            owner = group.client if group else self._book.open_tasks[task_id].client
            held += sharer(owner) == holder and (self._will_train(group) or self._moves(task_id))
        return held

    def _will_train(self, group: _Group | None) -> bool:
        """Is it sure of the next batch? Complete tasks are; under C4 and C5 whatever is in the pool."""
        return group is not None and (group.complete_seq is not None or not self._counts_tasks)

    def _may_claim_episode(self, client: str | None) -> ClaimWait | None:
        sharer = self._sharers()
        holder = sharer(client)
        need = self._places()[holder] * self._repeats
        pooled = sum(sharer(e.episode.client) == holder for e in self._pooled.values())
        opened = sum(
            task.count
            for task_id, task in self._book.open_tasks.items()
            if sharer(task.client) == holder and self._moves(task_id)
        )
        if pooled + opened < need:
            return None
        return self._no_place(holder, f"{pooled + opened} episodes finished or open, of {need}")

    def _no_place(self, holder: str | None, numbers: str) -> ClaimWait:
        if holder is not None:
            return self._wait(
                Code.SHARE_FULL, f"client {holder!r} has its share of this batch: {numbers}; wait for the next step"
            )
        return self._wait(Code.TOO_MANY_EPISODES, f"this batch is being filled: {numbers}; wait for the next step")

    def _enough(self) -> bool:
        """Are C1-C3 met, so that nothing more needs to be claimed? C4 and C5 follow from agreement, not from counts."""
        return self._missing_episodes() == 0

    def _wait(self, code: Code, message: str) -> ClaimWait:
        return ClaimWait(code, message, retry_after_s=min(10.0, max(0.5, self._eta_s() or 1.0)))


def _condition(name: str, have: int, need: int, detail: str = "") -> Condition:
    return Condition(name=name, have=have, need=need, met=have >= need, detail=detail)


def _in_numbers(condition: Condition) -> str:
    detail = f" ({condition.detail})" if condition.detail else ""
    return f"{_words(condition)} {condition.have:g} of {condition.need:g}{detail}"


def _words(condition: Condition) -> str:
    return condition.name.replace("_of:", " of ").replace("_", " ")
