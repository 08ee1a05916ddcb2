"""One training: its folder on disk and its parts in memory.

    <data-dir>/runs/0001/   config.json · journal.db · metrics.jsonl · events.jsonl · checkpoints/step-000005/ · engine/

Owns the run's journal, episode book, clients, pool, step records and checkpoint list. What always holds: a run that
was opened from its folder stands where its last complete checkpoint stands, with the batches trained since to be
trained again. Knows nothing of HTTP and starts no process; the server drives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import orjson

from swarmtune import checkpoints as stored
from swarmtune.backend import Backend, BackendInfo
from swarmtune.clients import ClientRegistry
from swarmtune.config import SamplingConfig, TrainConfig
from swarmtune.episodes import Episode, EpisodeBook
from swarmtune.gateway.conversations import Conversations, StoredAnswers
from swarmtune.journal import (
    BatchPlanned,
    BatchTrained,
    CheckpointRemoved,
    CheckpointSaved,
    EpisodesDropped,
    EvaluationWritten,
    Journal,
    Recovery,
    WarmupAccepted,
    WarmupFailed,
    WarmupPlanned,
)
from swarmtune.lane import EvaluationLane
from swarmtune.merger import ConservationViolated, MergeReport, check_conservation, merge
from swarmtune.pool import Dropped, DropReason, SamplePool
from swarmtune.protocol import (
    CheckpointView,
    EvaluationOutcome,
    EvaluationRecord,
    EvaluationRequest,
    StepRecord,
)
from swarmtune.rendering.renderer import Renderer
from swarmtune.tracker import Tracker
from swarmtune.types import FinishedEpisode, Sample, SamplingParams, StepResult, TrainBatch
from swarmtune.warmup import Warmup

log = logging.getLogger(__name__)

REMEMBERED_REPORTS = 500
"""Merge reports kept of episodes that are over."""


@dataclass(slots=True)
class StepTimes:
    """Seconds a step took."""

    rollout_s: float
    update_s: float
    step_s: float
    held_s: float = 0.0
    """Of the rollout: waited for an evaluation of the weights that were to be replaced."""


@dataclass(slots=True)
class Tally:
    """What happened to episodes since the last step."""

    ended: int = 0
    aborted: int = 0
    expired: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """What a call asked for and what was used."""

    turn_id: str
    dialect: str
    asked: dict[str, Any]
    used: SamplingParams
    ignored: tuple[str, ...]
    """Fields of the request without effect."""


@dataclass(slots=True)
class Session:
    """What an open episode's calls need and leave."""

    tracker: Tracker
    sampling: SamplingConfig
    """The configuration's, with the claim's overrides."""
    seed: int | None
    turns: list[TurnRecord] = field(default_factory=list)
    conversations: Conversations = field(default_factory=Conversations)
    answers: StoredAnswers = field(default_factory=StoredAnswers)
    versions: set[int] = field(default_factory=set)
    """Of the weights that sampled its answers."""

    def seed_for(self, position: int, choice: int, *, asked: int | None = None) -> int | None:
        """The seed of one answer: the request's own unless that is pinned, else one from the claim's and the call's
        position. Further answers of one call get seeds of their own, so that they are not all the same."""
        if asked is not None and not self.sampling.pinned:
            return asked if choice == 0 else _mixed(asked, choice)
        return None if self.seed is None else _mixed(self.seed, position, choice)

    def note(
        self, turn_id: str, dialect: str, asked: dict[str, Any], used: SamplingParams, ignored: tuple[str, ...]
    ) -> None:
        """Record a call; what equals the call before is shared with it."""
        if self.turns:
            last = self.turns[-1]
            asked = last.asked if last.asked == asked else asked
            used = last.used if last.used == used else used
            ignored = last.ignored if last.ignored == ignored else ignored
        self.turns.append(TurnRecord(turn_id, dialect, asked, used, ignored))


def _mixed(*numbers: int) -> int:
    """A seed from 0 to 2**63 - 1 that depends on all of `numbers`."""
    digest = hashlib.blake2b("/".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


@dataclass(frozen=True, slots=True)
class Merged:
    """An episode's rows; `problem` says why they must not train."""

    samples: list[Sample]
    report: MergeReport
    problem: str | None


class Run:
    def __init__(self, folder: Path, config: TrainConfig, journal: Journal) -> None:
        self.folder = folder
        self.config = config
        self.journal = journal
        batching = config.batching
        self.clients = ClientRegistry(batching, config.batch_tasks, time.monotonic)
        self.book = EpisodeBook(
            time.monotonic, max_open=batching.max_open_episodes, evaluation_slots=config.evaluation.slots
        )
        self.lane = EvaluationLane(config.evaluation, time.monotonic)
        self.pool = SamplePool(
            batching,
            batch_tasks=config.batch_tasks,
            repeats=config.repeats,
            clients=self.clients,
            book=self.book,
            clock=time.monotonic,
        )
        self.started_at = time.time()
        self._sessions: dict[str, Session] = {}
        """By episode id; open episodes that made a call."""
        self._ended: dict[str, tuple[Merged, list[TurnRecord]]] = {}
        """Episode id → its merge without the rows, and its turns, of the last episodes that ended."""
        self.records: list[StepRecord] = []
        self.checkpoints: list[CheckpointView] = []
        self.origin: dict[str, Any] | None = None
        """{"run", "step"} this run was branched from."""
        self._pinned: Counter[int] = Counter()
        """Steps whose checkpoints somebody reads."""
        self.unsaved: list[TrainBatch] = []
        """Batches since the last checkpoint, in order: what a backend that was lost must train again."""
        self.warmups: dict[str, Warmup] = {}
        """Supervised warm-ups by id, in order of acceptance."""
        self.merge_counts: dict[str, dict[str, float]] = {}
        """Episode id → numbers of its merge, until its step."""
        self.tally = Tally()
        self.last_seq = 0
        self.step = 0
        self.training: int | None = None
        """The step that is being trained now."""
        self.weight_version = 0
        self.info: BackendInfo | None = None
        self.renderer: Renderer | None = None

    # -- opening and closing

    @classmethod
    def create(cls, runs: Path, config: TrainConfig, *, branch: stored.Branch | None = None) -> Self:
        """A new run in the next free folder under `runs`, beginning where `branch` does.

        Raises:
            JournalError, OSError: no space, or not writable.
        """
        numbers = [int(p.name) for p in runs.glob("[0-9]*") if p.name.isdecimal()] if runs.exists() else []
        folder = runs / f"{max(numbers, default=0) + 1:04d}"
        resolved = config.model_dump(mode="json")
        journal = None
        try:
            folder.mkdir(parents=True)
            journal = Journal.create(folder / "journal.db", config=resolved)
            if branch is not None:
                branch.copy_into(folder, journal)
            # Last: a folder without it was cut short while it was made, and is no run.
            (folder / "config.json").write_text(json.dumps(resolved, indent=2) + "\n")
        except BaseException:
            if journal is not None:
                journal.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if branch is None:
            return cls(folder, config, journal)
        journal.close()
        return cls.resume(folder)

    @classmethod
    def resume(cls, folder: Path) -> Self:
        """An earlier run, standing at its last complete checkpoint.

        Raises:
            JournalError: the journal cannot be read, or does not fit the checkpoints.
            ConfigError: it was written by a version with other keys.
        """
        journal = Journal.open(folder / "journal.db")
        try:
            stored.sweep(folder)
            on_disk = stored.find(folder)
            recovery = journal.recover(checkpoint_step=max(on_disk, default=0))
            run = cls(folder, TrainConfig.from_dict(recovery.config), journal)
            run._restore(recovery, on_disk)
        except BaseException:
            journal.close()
            raise
        return run

    @staticmethod
    def stored_config(folder: Path) -> TrainConfig | None:
        """The configuration a run folder was made with; None when there is no run to resume."""
        path = folder / "config.json"
        if not path.is_file() or not (folder / "journal.db").is_file():
            return None
        return TrainConfig.from_dict(json.loads(path.read_text()))

    def _restore(self, recovery: Recovery, on_disk: dict[int, Path]) -> None:
        for episode in recovery.closed:
            self.book.restore(episode)
        self.clients.restore(recovery.clients)
        for finished in recovery.pooled:
            self.pool.restore(finished)
        self.records = list(recovery.steps)
        known = {view.step: view for view in recovery.checkpoints}
        self.checkpoints = [known.get(step) or stored.describe(step, path) for step, path in on_disk.items()]
        self.lane.restore(recovery.evaluations)
        self.origin = recovery.meta.get(stored.ORIGIN_KEY)
        self.unsaved = list(recovery.batches)
        self.warmups = {warmup.warmup_id: warmup for warmup in recovery.warmups}
        self.last_seq = recovery.last_seq
        self.step = self.weight_version = recovery.step
        keep_metrics(self.folder / "metrics.jsonl", up_to_step=recovery.step)

    def close(self) -> None:
        self.journal.close()

    # -- calls

    def session(self, episode: Episode) -> Session:
        """What the episode's calls share; made at the first one."""
        session = self._sessions.get(episode.episode_id)
        if session is None:
            assert self.renderer is not None
            overrides = dict(episode.sampling)
            seed = overrides.pop("seed", None)
            session = self._sessions[episode.episode_id] = Session(
                Tracker(episode.episode_id, self.renderer, history=self.config.history),
                SamplingConfig.model_validate(self.config.sampling.model_dump() | overrides),
                seed,
            )
        return session

    def forget_session(self, episode_id: str) -> None:
        self._sessions.pop(episode_id, None)

    def merge(self, episode: Episode) -> Merged:
        """The training rows of an episode's calls; changes nothing."""
        tracker = self.session(episode).tracker
        side_calls = self.config.train_side_calls
        merged = merge(tracker, match=self.config.match, task_id=episode.task_id, include_side_calls=side_calls)
        try:
            check_conservation(tracker, merged.samples, include_side_calls=side_calls)
        except ConservationViolated as violation:
            return Merged(merged.samples, merged.report, violation.reason)
        return Merged(merged.samples, merged.report, None)

    def merge_report(self, episode: Episode) -> dict[str, Any]:
        """How the episode's calls merge, and what each asked for and got. Kept for a while after its end.

        Raises:
            LookupError: it is over and its report is gone.
        """
        kept = self._ended.get(episode.episode_id)
        if kept is not None:
            return describe_merge(episode.episode_id, *kept)
        if not episode.is_open:
            raise LookupError(
                f"{episode.episode_id}: no merge report; they are kept of the last {REMEMBERED_REPORTS} ended"
            )
        return describe_merge(episode.episode_id, self.merge(episode), self.session(episode).turns)

    def keep_report(self, episode: Episode, merged: Merged) -> None:
        self._ended[episode.episode_id] = (replace(merged, samples=[]), self.session(episode).turns)
        while len(self._ended) > REMEMBERED_REPORTS:
            del self._ended[next(iter(self._ended))]

    # -- steps

    @property
    def next_step(self) -> int:
        return self.step + 1

    @property
    def collecting(self) -> int:
        """The step that episodes claimed now are for: under overlap the one after the step that trains."""
        return self.next_step + (self.config.batching.overlap and self.training is not None)

    @property
    def is_finished(self) -> bool:
        limit = self.config.max_steps
        return limit is not None and self.step >= limit

    @property
    def is_collected(self) -> bool:
        """The last step has its episodes; it may be training still."""
        limit = self.config.max_steps
        return limit is not None and self.collecting > limit

    async def plan(self, batch: TrainBatch) -> None:
        """The next step trains this batch, whatever happens to this process.

        Raises:
            JournalError: nothing is planned.
        """
        await self.journal.write(BatchPlanned.of(batch))
        self.unsaved.append(batch)

    async def drop_failed(self, batch: TrainBatch, reason: str) -> None:
        """The batch of a planned step could not be trained: its episodes, or the rest of its warm-up, will not be.

        Raises:
            JournalError: nothing is dropped.
        """
        if batch.supervised_lr is None:
            gone = [Dropped(e.episode_id, e.task_id, DropReason.UPDATE_FAILED) for e in batch.episodes]
            await self.note_dropped(gone)
        else:
            warmup = self._warmup_of(batch)
            await self.journal.write(WarmupFailed(warmup.warmup_id, reason))
            warmup.failed = reason
        self.unsaved.remove(batch)

    # -- supervised warm-up

    def waiting_warmup(self) -> Warmup | None:
        """The first one that has steps to begin."""
        return next((w for w in self.warmups.values() if w.waits), None)

    async def accept_warmup(self, warmup: Warmup) -> None:
        """Raises:
        JournalError: it is not accepted.
        """
        await self.journal.write(WarmupAccepted(warmup))
        self.warmups[warmup.warmup_id] = warmup

    async def plan_warmup(self, warmup: Warmup) -> TrainBatch:
        """The next step trains this warm-up's next batch, whatever happens to this process.

        Raises:
            JournalError: nothing is planned.
        """
        batch = warmup.batch(warmup.planned, self.next_step)
        await self.journal.write(WarmupPlanned(batch.step, warmup.warmup_id, warmup.planned))
        warmup.planned += 1
        self.unsaved.append(batch)
        return batch

    def _warmup_of(self, batch: TrainBatch) -> Warmup:
        return self.warmups[batch.episodes[0].episode_id.rsplit("/", 2)[0]]

    async def record(self, batch: TrainBatch, result: StepResult, times: StepTimes) -> StepRecord:
        """The step is trained: in the journal, in metrics.jsonl, and the pool knows the new weights.

        Raises:
            JournalError: the step is not recorded.
        """
        metrics = step_metrics(batch, self.merge_counts, self.tally, times) | result.metrics
        metrics["weight_version"] = float(result.weight_version)
        record = StepRecord(
            step=batch.step, weight_version=result.weight_version, ended_at=time.time(), metrics=finite(metrics)
        )
        await self.journal.write(BatchTrained(record))
        self.step, self.weight_version, self.training = batch.step, result.weight_version, None
        self.records.append(record)
        if batch.supervised_lr is not None:
            self._warmup_of(batch).done.append(batch.step)
        self.tally = Tally()
        for episode in batch.episodes:
            self.merge_counts.pop(episode.episode_id, None)
        self.lane.reached(self.weight_version)
        await self._drop_stale()
        append_line(self.folder / "metrics.jsonl", {"step": record.step, **record.metrics})
        return record

    async def _drop_stale(self) -> None:
        dropped = self.pool.advance(self.weight_version)
        if dropped:
            await self.note_dropped(dropped)

    async def note_dropped(self, dropped: Iterable[Dropped]) -> None:
        """Write down episodes that left the pool untrained.

        Raises:
            JournalError
        """
        by_reason: dict[str, list[str]] = {}
        for item in dropped:
            by_reason.setdefault(item.reason.value, []).append(item.episode_id)
            self.merge_counts.pop(item.episode_id, None)
        for reason, ids in by_reason.items():
            self.tally.dropped[reason] += len(ids)
        if by_reason:
            await self.journal.write(*(EpisodesDropped(tuple(ids), reason) for reason, ids in by_reason.items()))

    # -- evaluations

    async def begin_evaluation(self, request: EvaluationRequest) -> EvaluationRecord:
        """Raises:
        LaneError, JournalError
        """
        # While a step trains, an episode that is claimed next runs under the weights that come of it.
        record = self.lane.prepare(request, weight_version=self.training or self.weight_version)
        await self.journal.write(EvaluationWritten(record))
        self.lane.put(record)
        return record

    async def finish_evaluation(self, evaluation_id: str, outcome: EvaluationOutcome) -> EvaluationRecord:
        """Raises:
        LaneError, JournalError: it is as it was before.
        """
        record = self.lane.outcome(evaluation_id, outcome)
        await self.journal.write(EvaluationWritten(record))
        self.lane.put(record)
        return record

    async def note_abandoned(self) -> list[EvaluationRecord]:
        """Write down which evaluations nobody works on any more.

        Raises:
            JournalError
        """
        abandoned = self.lane.abandoned(self.book.open_episodes())
        if abandoned:
            await self.journal.write(*map(EvaluationWritten, abandoned))
        for record in abandoned:
            self.lane.put(record)
        return abandoned

    @property
    def hold_s(self) -> float:
        """How long the next step is to wait for the evaluation of the present weights; 0.0 when for none."""
        return self.lane.hold_s(self.weight_version, self.book.open_episodes())

    # -- checkpoints

    @property
    def last_checkpoint(self) -> CheckpointView | None:
        return self.checkpoints[-1] if self.checkpoints else None

    def checkpoint_due(self) -> bool:
        every = self.config.checkpoint.every_steps
        return self.step > self._saved_step and ((every > 0 and self.step % every == 0) or self.is_finished)

    @property
    def _saved_step(self) -> int:
        return self.checkpoints[-1].step if self.checkpoints else 0

    def needs_checkpoint(self) -> bool:
        """Steps were trained since the last one."""
        return self.step > self._saved_step

    async def save_checkpoint(self, backend: Backend) -> CheckpointView:
        """Save the weights of the current step, then remove checkpoints beyond keep_last.

        Raises:
            OSError, JournalError: nothing is lost; the previous checkpoint is intact.
        """
        path = stored.folder_of(self.folder, self.step)
        await backend.save(path)
        view = await asyncio.to_thread(stored.describe, self.step, path)
        await self.journal.write(CheckpointSaved(view))
        self.checkpoints = [c for c in self.checkpoints if c.step != view.step] + [view]
        self.unsaved = [batch for batch in self.unsaved if batch.step > view.step]
        await self._remove_old()
        return view

    def judged_checkpoints(self) -> list[CheckpointView]:
        """The checkpoints, in order of step, with what each is kept for."""
        return stored.judged(self.checkpoints, self.config.checkpoint, self.records, self.lane.records())

    @contextlib.contextmanager
    def pinned(self, step: int) -> Iterator[None]:
        """Keep the checkpoint of a step for the length of a block."""
        self._pinned[step] += 1
        try:
            yield
        finally:
            self._pinned[step] -= 1

    async def _remove_old(self) -> None:
        """Beyond keep_last and keep_best, but for what is being read or evaluated."""
        used = self.lane.versions_in_use(self.book.open_episodes()) | set(+self._pinned)
        old = [v for v in self.judged_checkpoints() if not v.kept and v.step not in used]
        for view in old:
            try:
                await asyncio.to_thread(stored.remove, Path(view.path))
            except OSError as error:
                log.warning("old checkpoint not removed", extra={"path": view.path, "reason": str(error)})
        gone = {view.step for view in old}
        self.checkpoints = [v for v in self.checkpoints if v.step not in gone]
        if old:
            await self.journal.write(*(CheckpointRemoved(step) for step in gone))


# -- numbers


def describe_merge(episode_id: str, merged: Merged, turns: Iterable[TurnRecord]) -> dict[str, Any]:
    """The merge report as JSON."""
    told = [asdict(turn) for turn in turns]
    return {"episode_id": episode_id, **merged.report.to_dict(), "problem": merged.problem, "turns": told}


def merge_numbers(report: MergeReport) -> dict[str, float]:
    """A merge report as flat numbers that can be summed over a batch."""
    numbers: dict[str, float] = {"calls": report.calls, "inexact_tokens": report.inexact_tokens}
    numbers |= {f"rows_{policy}": count for policy, count in report.rows.items()}
    numbers |= {f"tokens_{policy}": count for policy, count in report.tokens.items()}
    numbers |= {f"left_out_{reason}": count for reason, count in report.left_out.items()}
    numbers |= {f"break_{reason}": count for reason, count in Counter(b.reason.value for b in report.breaks).items()}
    return numbers


def step_metrics(
    batch: TrainBatch, merge_counts: dict[str, dict[str, float]], tally: Tally, times: StepTimes
) -> dict[str, float]:
    """What the server knows of a step; the backend adds its own."""
    metrics = _what_was_trained(batch) | {
        "episodes/ended": tally.ended,
        "episodes/aborted": tally.aborted,
        "episodes/expired": tally.expired,
        "batch/rows": sum(len(e.samples) for e in batch.episodes),
        "batch/tokens": sum(len(s.token_ids) for e in batch.episodes for s in e.samples),
        "batch/sampled_tokens": sum(e.sampled_tokens for e in batch.episodes),
        "timing/rollout_s": times.rollout_s,
        "timing/update_s": times.update_s,
        "timing/step_s": times.step_s,
    }
    if times.held_s:
        metrics["timing/evaluation_hold_s"] = times.held_s
    metrics |= {f"rejected/{code}": count for code, count in tally.rejected.items()}
    metrics |= {f"dropped/{reason}": count for reason, count in tally.dropped.items()}
    merged: Counter[str] = Counter()
    for episode in batch.episodes:
        merged.update(merge_counts.get(episode.episode_id, {}))
    metrics |= {f"merge/{name}": count for name, count in merged.items()}
    metrics |= _client_metrics(batch.episodes)
    return {name: float(value) for name, value in metrics.items()}


def _what_was_trained(batch: TrainBatch) -> dict[str, float]:
    """Rewards and counts of episodes; of a supervised step the count of its conversations, which have no reward."""
    if batch.supervised_lr is not None:
        return {"sft/conversations": len(batch.episodes)}
    ages = [batch.step - 1 - v for e in batch.episodes for s in e.samples for v in s.weight_versions if v >= 0]
    rewards = [episode.reward for episode in batch.episodes]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards)) if rewards else 0.0,
        "reward/min": min(rewards, default=0.0),
        "reward/max": max(rewards, default=0.0),
        "staleness/mean": sum(ages) / len(ages) if ages else 0.0,
        "staleness/max": max(ages, default=0),
        "episodes/trained": len(batch.episodes),
        "episodes/tasks": len({e.task_id for e in batch.episodes}),
    }


def _client_metrics(episodes: Iterable[FinishedEpisode]) -> dict[str, float]:
    """Means of what clients reported with `end`, over the episodes that reported it."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            values.setdefault(name, []).append(value)
    return {f"client/{name}": sum(v) / len(v) for name, v in values.items()}


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """JSON has no NaN: what is not finite is left out."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


# -- files


def append_line(path: Path, payload: dict) -> None:
    """A report, not a promise: a full disk costs the line, with a warning, not the training."""
    try:
        with path.open("ab") as file:
            file.write(orjson.dumps(payload) + b"\n")
    except OSError as error:
        log.warning("line not written", extra={"path": str(path), "reason": str(error)})


def keep_metrics(path: Path, *, up_to_step: int) -> None:
    """Drop the lines of steps that will be trained again, and what is no line of a step: one cut short by a crash."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            if orjson.loads(line)["step"] <= up_to_step:
                kept.append(line + b"\n")
        except (orjson.JSONDecodeError, LookupError, TypeError):
            continue
    scratch = path.with_suffix(".tmp")
    scratch.write_bytes(b"".join(kept))
    os.replace(scratch, path)
