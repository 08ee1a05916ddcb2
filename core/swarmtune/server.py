"""The owner: builds the parts of a training, moves its state, runs the step loop, and stops everything in bound.

Owns the state machine and the one run that is live. What always holds: states change along protocol.TRANSITIONS only,
each change is an event; at most one run is open; a client hears "admitted" after the episode is on disk; a lost
backend is started again from the last checkpoint and trains again what came after it. Knows nothing of HTTP: gateway/
asks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import swarmtune
from swarmtune.backend import Backend, BackendError, BackendInfo, BackendLost, StartFailed, UpdateFailed
from swarmtune.checkpoints import Branch, CheckpointError, StoredRun
from swarmtune.config import BASELINE_METRIC, BatchingConfig, ConfigError, SamplingConfig, TrainConfig, explain
from swarmtune.engines.scripted import ScriptedBackend
from swarmtune.episodes import Episode, EpisodeError
from swarmtune.events import EventLog
from swarmtune.export_process import ExportFailed, export_apart
from swarmtune.gateway.control import ControlRefused
from swarmtune.journal import (
    ClientRegistered,
    ClientRemoved,
    EpisodeAccepted,
    EpisodeAnswered,
    EpisodeClaimed,
    EpisodeClosed,
    JournalError,
)
from swarmtune.models import ENTRIES
from swarmtune.pool import Rejected
from swarmtune.protocol import (
    TRANSITIONS,
    CheckpointView,
    ClaimRequest,
    ClientView,
    Code,
    EndRequest,
    EndResult,
    EngineState,
    EpisodeGrant,
    EpisodeView,
    EvaluationOutcome,
    EvaluationRecord,
    EvaluationRequest,
    ExportRequest,
    ExportView,
    IllegalTransition,
    PoolView,
    RegisterRequest,
    ServerStatus,
    StepRecord,
    WarmupRequest,
    WarmupView,
)
from swarmtune.run import Merged, Run, StepTimes, merge_numbers
from swarmtune.types import FinishedEpisode, StepResult, TrainBatch
from swarmtune.warmup import BadConversation, Warmup, render_conversations

log = logging.getLogger(__name__)

MAX_LOSSES = 3
"""Lost backends without a completed step in between, until the training is given up."""
TICK_S = 0.5
"""How often leases and deadlines are looked at."""
MAX_FAILED_UPDATES = 2
"""Updates in a row that raised, until the training is given up; each one before that costs its batch."""
UPDATE_GRACE_S = 15.0
"""How long a stop waits for an update in progress."""
SETTLE_S = 1.0
"""How long a stop waits for what only has to notice it; a start of the engine is cut short."""
SAVE_GRACE_S = 60.0
"""How long a stop waits for the last checkpoint."""
BACKEND_GRACE_S = 10.0
UNTAKEN_GRACE_S = 5.0
"""How long an episode waits whose client hung up before it had the grant: a repeated claim may still fetch it."""
RETRY_AFTER_S = 2.0

START_AFRESH = "to leave it alone and begin a new run, start with another configuration, or the server with --fresh"

_LIVE = frozenset({EngineState.BOOTING, EngineState.ROLLING, EngineState.ROLLING_POST, EngineState.WEIGHT_SYNCING})
_SERVING = frozenset({EngineState.ROLLING, EngineState.ROLLING_POST, EngineState.WEIGHT_SYNCING})


def _process_backend() -> Backend:
    from swarmtune.engines.process import ProcessBackend

    return ProcessBackend()


BACKENDS: dict[str, Callable[[], Backend]] = {
    "hf": _process_backend,
    "vllm": _process_backend,
    "verl": _process_backend,
    "scripted": ScriptedBackend,
}


class _Stopped(Exception):
    """The training was told to stop."""


class _UpdatesFail(Exception):
    """Updates raise again and again: no other batch would help."""


class SwarmServer:
    def __init__(
        self,
        data_dir: Path,
        *,
        fresh: bool = False,
        from_step: int | None = None,
        from_run: str | None = None,
        backends: Mapping[str, Callable[[], Backend]] = BACKENDS,
    ) -> None:
        """`fresh`: leave earlier runs in `data_dir` alone instead of going on with the last one. `from_step`: begin a
        new run at that checkpoint of `from_run` (a name, or a folder; the last one in `data_dir` where None)."""
        self.server_id = secrets.token_hex(6)
        self.events = EventLog()
        self.closing = asyncio.Event()
        """Set once: the process is to end."""
        self._data_dir = data_dir
        self._fresh = fresh
        self._from_step, self._from_run = from_step, from_run
        self._backends = backends
        self._started_at = time.monotonic()
        self._state = EngineState.OFFLINE
        self._changed = asyncio.Event()
        self._lifecycle = asyncio.Lock()
        self._run: Run | None = None
        self._backend: Backend | None = None
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._lost: str | None = None
        """Why the backend's present life is over; None while it is well."""
        self._life = 0
        """Counts starts of backends, so that a late report of a loss is not taken for a new one."""
        self._failure: tuple[str, str] | None = None
        self._failed_updates = 0
        """In a row."""
        self._warming = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._untaken: dict[str, float] = {}
        """Episode id → when it is given up because its client hung up before it had the grant."""

    # -- the server's life

    async def open(self) -> None:
        """Go on with the training that was live when the last process ended, if there was one; or branch off a run.

        Raises:
            OSError: the data folder is not writable.
            CheckpointError: there is no such run or checkpoint to begin at.
        """
        self._data_dir.mkdir(parents=True, exist_ok=True)
        self._ticker = asyncio.create_task(self._tick())
        if self._from_step is not None:
            async with self._lifecycle:
                await self._launch(await asyncio.to_thread(self._branch, None, self._from_step, self._from_run))
            return
        folder = None if self._fresh else self._remembered_run()
        if folder is None:
            return
        async with self._lifecycle:
            try:
                await self._launch(await asyncio.to_thread(Run.resume, folder))
            except Exception as error:
                known = isinstance(error, JournalError | ConfigError | OSError)
                log.error("cannot go on with the last training", exc_info=None if known else error)
                reason = str(error) if known else f"{type(error).__name__}: {error}"
                self._failure = (f"{folder}: {reason}; {START_AFRESH}", "")
                self._move(EngineState.BOOTING)
                self._move(EngineState.FAILED, reason=reason)

    async def close(self) -> None:
        """Stop the training, keep what is needed to go on with it, and leave nothing behind."""
        self.closing.set()
        await self.stop(forget=False)
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        self._wake()

    def request_shutdown(self) -> None:
        self.closing.set()
        self._wake()

    # -- start and stop

    async def start(
        self, raw: Mapping[str, Any], *, from_step: int | None = None, from_run: str | None = None
    ) -> ServerStatus:
        """Wake the server with a configuration; the one that is running joins. See StartRequest for `from_step`.

        Raises:
            ConfigError: it cannot be used.
            ControlRefused: another configuration is running; unknown model; stopping; no space.
        """
        config = TrainConfig.from_dict(raw)
        if self.closing.is_set():
            raise ControlRefused(Code.STOPPING, "this server is shutting down; start another one")
        async with self._lifecycle:
            if self._state in _LIVE and self._run is not None:
                self._join(self._run, config)
                _check_origin(self._run, from_step)
                return self.status()
            check_model_name(config.model)
            if config.engine.kind not in self._backends:
                known = ", ".join(sorted(self._backends))
                raise ConfigError(f"engine.kind: this server has no engine {config.engine.kind!r}; it has {known}")
            await self._retire()
            try:
                if from_step is not None:
                    run = await asyncio.to_thread(self._branch, config, from_step, from_run)
                else:
                    run = await asyncio.to_thread(self._open_run, config)
                await self._launch(run)
            except CheckpointError as error:
                raise ControlRefused(Code.NOT_FOUND, str(error)) from error
            except OSError as error:
                raise _unusable_folder(self._data_dir, error) from error
            self._fresh = False
        return self.status()

    def _join(self, run: Run, config: TrainConfig) -> None:
        differences = run.config.differences(config)
        if differences:
            told = {key: [ours, theirs] for key, (ours, theirs) in differences.items()}
            lines = "; ".join(
                f"{key} is {ours!r}, you asked for {theirs!r}" for key, (ours, theirs) in differences.items()
            )
            raise ControlRefused(
                Code.CONFIG_CONFLICT,
                f"another configuration is running: {lines}. Stop it first, or join with the same one",
                details={"differences": told},
            )

    def _open_run(self, config: TrainConfig) -> Run:
        """The last run, if it was made with this configuration and is not to be left alone; else a new one."""
        runs = self._data_dir / "runs"
        folders = sorted(p for p in runs.glob("[0-9]*") if p.is_dir()) if runs.exists() else []
        if folders and not self._fresh:
            try:
                stored = Run.stored_config(folders[-1])
            except (ConfigError, ValueError):
                stored = None
            if stored is not None and not stored.differences(config):
                return self._resume(folders[-1])
        return Run.create(runs, config)

    def _branch(self, config: TrainConfig | None, step: int, name: str | None) -> Run:
        """A new run that begins at a step of an earlier one, with its configuration where none is given.

        Raises:
            CheckpointError, JournalError, OSError
        """
        runs = self._data_dir / "runs"
        if name is None:
            folders = sorted(p for p in runs.glob("[0-9]*") if p.is_dir()) if runs.exists() else []
            if not folders:
                raise CheckpointError(f"{runs}: there is no run to begin at step {step} of; name one with from_run")
            source = folders[-1]
        else:
            source = runs / name if (runs / name / "journal.db").is_file() else Path(name)
        if config is None:
            config = StoredRun.read(source).config
        return Run.create(runs, config, branch=Branch.of(source, step))

    def _resume(self, folder: Path) -> Run:
        try:
            return Run.resume(folder)
        except JournalError as error:
            if error.code is Code.NO_SPACE:
                raise
            raise ControlRefused(error.code, f"{error}; {START_AFRESH}") from error

    async def _launch(self, run: Run) -> None:
        """Make this run the live one.

        Raises:
            OSError: its files cannot be written; no run is live.
        """
        self._run = run
        self._failure = None
        self._failed_updates = 0
        self._lost = None
        try:
            self.events.attach(run.journal, run.folder / "events.jsonl", last_seq=run.last_seq)
            self._remember_run(run.folder)
        except OSError:
            await self._retire()
            raise
        self._backend = self._backends[run.config.engine.kind]()
        self._move(EngineState.BOOTING, run=run.folder.name, step=run.step)
        self._task = asyncio.create_task(self._live(run, self._backend))

    async def stop(self, *, forget: bool = True) -> ServerStatus:
        """Stop training: the step in progress may finish, a checkpoint is written, no process stays. Idempotent.

        `forget`: a server started again on the same data folder does not go on with this training by itself.
        """
        async with self._lifecycle:
            if self._state is EngineState.OFFLINE:
                return self.status()
            if forget:
                self._forget_run()
            run = self._run
            updating = run is not None and run.training is not None
            self._move(EngineState.STOPPING)
            try:
                await self._wind_down(run, updating=updating)
            finally:
                self._move(EngineState.OFFLINE)
        return self.status()

    async def _wind_down(self, run: Run | None, *, updating: bool) -> None:
        """From stopping to nothing: episodes aborted, the step in progress waited for, a checkpoint, no backend."""
        try:
            if run is not None:
                await self._abort_open(run, "server_stopped")
            if self._task is not None:
                done, _ = await asyncio.wait([self._task], timeout=UPDATE_GRACE_S if updating else SETTLE_S)
                if not done:
                    self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
            if run is not None and self._lost is None and self._failure is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SAVE_GRACE_S):
                        await self._save_if_needed(run)
        finally:
            await self._retire()

    async def _retire(self) -> None:
        """Let go of backend and run; both may be gone already."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._backend is not None:
            await self._backend.stop(grace_s=BACKEND_GRACE_S)
            self._backend = None
        if self._run is not None:
            run, self._run = self._run, None
            await self.events.detach()
            await asyncio.to_thread(run.close)
        self._task = None

    async def _abort_open(self, run: Run, reason: str) -> None:
        closed = []
        for episode in run.book.open_episodes():
            with contextlib.suppress(EpisodeError):  # one whose end is in progress ends
                closed.append(run.book.abort(episode.episode_id, reason))
                run.forget_session(episode.episode_id)
        try:
            await run.journal.write(*(EpisodeClosed(e) for e in closed))
        except JournalError as error:
            log.warning("aborts not journalled; a restart aborts them again", extra={"reason": str(error)})

    # -- the training

    async def _live(self, run: Run, backend: Backend) -> None:
        """Boot, roll and step; start a lost backend again; end when told to stop, or failed."""
        losses, step_before = 0, run.step
        booted = False
        while True:
            try:
                await self._boot(run, backend)
                booted = True
                self._move(EngineState.ROLLING)
                await self._roll(run, backend)
            except _Stopped:
                return
            except BackendError as error:
                if isinstance(error, StartFailed) and not booted:
                    await self._fail(run, error.reason, error.log_tail)
                    return
                losses = 1 if run.step > step_before else losses + 1
                step_before = run.step
                self._lost = self._lost or str(error)
                self.events.emit("engine", lost=str(error), losses=losses, step=run.step)
                log.warning("backend lost", extra={"reason": str(error), "losses": losses, "step": run.step})
                if losses >= MAX_LOSSES:
                    tail = error.log_tail if isinstance(error, StartFailed) else ""
                    await self._fail(run, f"the engine was lost {losses} times without a step: {error}", tail)
                    return
                if self._state is EngineState.STOPPING:
                    return
                if self._state is not EngineState.BOOTING:
                    self._move(EngineState.BOOTING, reason=str(error))
                await backend.stop(grace_s=BACKEND_GRACE_S)
            except _UpdatesFail as error:
                await self._fail(run, str(error), "")
                return
            except JournalError as error:
                await self._fail(run, f"the journal cannot be written: {error}", "")
                return
            except Exception as error:
                log.exception("training stopped by a fault")
                await self._fail(run, f"{type(error).__name__}: {error}", "")
                return

    async def _boot(self, run: Run, backend: Backend) -> None:
        """Bring the model up from the last checkpoint and train again what came after it."""
        from swarmtune.rendering.load import load_renderer

        self._lost = None
        self._life += 1
        run.training = None
        last = run.last_checkpoint
        started = time.monotonic()
        work_dir = run.folder / "engine"
        work_dir.mkdir(exist_ok=True)
        run.info = await _start_backend(backend, run, work_dir)
        self._watch = asyncio.create_task(self._watch_backend(backend, self._life))
        if run.renderer is None:
            run.renderer = await asyncio.to_thread(load_renderer, run.info.model_path)
        self.events.emit(
            "engine",
            started=run.info.model_name,
            context_length=run.info.context_length,
            parameters=run.info.parameters,
            seconds=round(time.monotonic() - started, 3),
            checkpoint=last.step if last else None,
        )
        for batch in list(run.unsaved):
            self._raise_if_over()
            await self._train_again(run, backend, batch)

    async def _train_again(self, run: Run, backend: Backend, batch: TrainBatch) -> None:
        """A batch after the checkpoint: its weights were lost. Recorded only if it was not before."""
        started = time.monotonic()
        result = await self._train_or_drop(run, backend, batch)
        if result is None:
            return
        update_s = time.monotonic() - started
        self.events.emit("engine", trained_again=batch.step, seconds=round(update_s, 3))
        if batch.step > run.step:
            await self._finish_step(run, backend, batch, result, StepTimes(0.0, update_s, update_s))

    async def _watch_backend(self, backend: Backend, life: int) -> None:
        self.report_lost(life, await backend.wait_lost())

    def report_lost(self, life: int, reason: str) -> None:
        """Someone saw the backend of `life` gone; what waits for it learns of it now."""
        if life == self._life and self._lost is None:
            self._lost = reason
            self._wake()

    async def _roll(self, run: Run, backend: Backend) -> None:
        while True:
            since = time.monotonic()
            await self._until(lambda: not run.is_finished and (_teaches(run) or run.pool.ready(run.next_step)))
            if run.config.batching.overlap:
                await self._step_while_rolling(run, backend, since)
                continue
            if _teaches(run):  # open episodes just go on
                self._move(EngineState.ROLLING_POST, step=run.next_step)
                await self._teach(run, backend, since, await self._hold(run))
                self._move(EngineState.ROLLING)
                continue
            await self._drain(run)
            held_s = await self._hold(run)
            if not run.pool.ready(run.next_step):  # a client joined meanwhile and has not agreed
                self._move(EngineState.ROLLING)
                continue
            await self._update(run, backend, since, held_s)
            self._move(EngineState.ROLLING)

    async def _step_while_rolling(self, run: Run, backend: Backend, since: float) -> None:
        """One step with batching.overlap: nothing is drained, episodes of the next one are claimed meanwhile."""
        held_s = await self._hold(run)
        if _teaches(run):
            await self._teach(run, backend, since, held_s)
        elif run.pool.ready(run.next_step):
            await self._update(run, backend, since, held_s)

    async def _drain(self, run: Run) -> None:
        """No new claims; running training episodes finish, or the deadline decides over them."""
        self._move(EngineState.ROLLING_POST, step=run.next_step)
        deadline = time.monotonic() + run.config.batching.drain_s
        await self._until(lambda: not run.book.open_tasks or time.monotonic() >= deadline)
        if run.config.batching.stragglers == "carry":
            return
        expired = []
        for episode in run.book.open_episodes():
            if episode.kind == "train":
                with contextlib.suppress(EpisodeError):  # one whose end is in progress ends
                    expired.append(run.book.expire(episode.episode_id, "still running at the drain deadline"))
        await self._note_expired(run, expired)

    async def _hold(self, run: Run) -> float:
        """Let whoever evaluates the present weights finish, within bounds; seconds waited."""
        if not run.hold_s:
            return 0.0
        began = time.monotonic()
        await self._until(lambda: time.monotonic() - began >= run.hold_s)
        return time.monotonic() - began

    async def _update(self, run: Run, backend: Backend, since: float, held_s: float) -> None:
        """One step: plan it in the journal, train, record.

        Raises:
            BackendError, JournalError, _UpdatesFail
        """
        batch = run.pool.take_batch(run.next_step)
        run.training = batch.step
        self._wake()
        await run.plan(batch)
        await self._train(run, backend, batch, since, held_s)

    async def _teach(self, run: Run, backend: Backend, since: float, held_s: float) -> None:
        """One supervised step of the warm-up that waits. Raises as `_update` does."""
        warmup = run.waiting_warmup()
        assert warmup is not None
        run.training = run.next_step
        await self._train(run, backend, await run.plan_warmup(warmup), since, held_s)

    async def _train(self, run: Run, backend: Backend, batch: TrainBatch, since: float, held_s: float) -> None:
        if run.config.batching.overlap:
            self.events.emit("engine", training=batch.step, episodes=len(batch.episodes))
        else:
            self._move(EngineState.WEIGHT_SYNCING, step=batch.step, episodes=len(batch.episodes))
        started = time.monotonic()
        result = await self._train_or_drop(run, backend, batch)
        if result is None:
            run.training = None
            return
        now = time.monotonic()
        times = StepTimes(started - since, now - started, now - since, held_s)
        await self._finish_step(run, backend, batch, result, times)

    async def _train_or_drop(self, run: Run, backend: Backend, batch: TrainBatch) -> StepResult | None:
        """The update, or None where it raised: then the batch is given up, with its reason, and the next one is tried.

        Raises:
            _UpdatesFail: it is not the first in a row, or what was trained before cannot be trained again.
            BackendError, JournalError
        """
        try:
            result = await backend.train(batch)
        except UpdateFailed as error:
            self._failed_updates += 1
            log.warning("update failed", extra={"step": batch.step, "reason": str(error)})
            if batch.step <= run.step:
                told = f"step {batch.step} was trained before and cannot be trained again: {error}"
                raise _UpdatesFail(told) from error
            if self._failed_updates >= MAX_FAILED_UPDATES:
                raise _UpdatesFail(
                    f"{self._failed_updates} updates in a row failed, the last of step {batch.step}: {error}; its "
                    "batch is kept: with the cause mended, the run goes on with it"
                ) from error
            await run.drop_failed(batch, str(error))
            self.events.emit(
                "warning",
                code=Code.UPDATE_FAILED,
                message=f"step {batch.step}: the update failed and its {len(batch.episodes)} episodes are not trained: "
                f"{error}; the training goes on with the next batch",
                step=batch.step,
                episodes=[e.episode_id for e in batch.episodes],
            )
            self._wake()
            return None
        self._failed_updates = 0
        return result

    async def _finish_step(self, run: Run, backend: Backend, batch: TrainBatch, result: Any, times: StepTimes) -> None:
        record = await run.record(batch, result, times)
        if run.checkpoint_due():
            await self._save_checkpoint(run, backend)
        self.events.emit("step", **record.model_dump())
        if run.is_finished:
            self.events.emit("finished", step=run.step)
        self._wake()

    async def _save_checkpoint(self, run: Run, backend: Backend) -> CheckpointView | None:
        """Save; a disk that refuses is a warning, the training goes on from the previous one.

        Raises:
            BackendError: the backend was lost.
        """
        try:
            async with self._saving:
                view = await run.save_checkpoint(backend)
        except (OSError, JournalError) as error:
            log.warning(
                "checkpoint not saved; the previous one is intact", extra={"step": run.step, "reason": str(error)}
            )
            self.events.emit(
                "warning",
                code=Code.NO_SPACE,
                message=f"checkpoint of step {run.step} not saved: {error}; free some space, the next follows as usual",
            )
            return None
        self.events.emit("checkpoint", **view.model_dump())
        return view

    async def _save_if_needed(self, run: Run) -> None:
        # An update that was cut off here goes on in the engine: its weights are not this step's.
        whole = run.info is not None and run.training is None
        if self._backend is not None and whole and run.needs_checkpoint():
            try:
                await self._save_checkpoint(run, self._backend)
            except BackendError as error:
                log.warning("no last checkpoint: the backend is lost", extra={"reason": str(error)})

    async def _fail(self, run: Run, reason: str, log_tail: str) -> None:
        if self._state is EngineState.STOPPING:
            return
        self._failure = (reason, log_tail)
        await self._abort_open(run, "training_failed")
        self._move(EngineState.FAILED, reason=reason)
        if self._backend is not None:
            await self._backend.stop(grace_s=BACKEND_GRACE_S)

    # -- waiting and changing

    @property
    def state(self) -> EngineState:
        return self._state

    def _move(self, state: EngineState, **data: Any) -> None:
        """Raises:
        IllegalTransition
        """
        if self._state is EngineState.STOPPING and state is not EngineState.OFFLINE:
            raise _Stopped
        if state not in TRANSITIONS[self._state]:
            raise IllegalTransition(f"{self._state} → {state}")
        before, self._state = self._state, state
        self.events.emit("state", before=before, state=state, **data)
        log.info("state changed", extra={"before": before.value, "state": state.value})
        self._wake()

    def _wake(self) -> None:
        """Something changed that someone may be waiting for."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, predicate: Callable[[], bool]) -> None:
        """Raises:
        _Stopped, BackendLost: instead of waiting on.
        """
        while True:
            changed = self._changed
            self._raise_if_over()
            if predicate():
                return
            await changed.wait()

    def _raise_if_over(self) -> None:
        if self._state is EngineState.STOPPING:
            raise _Stopped
        if self._lost is not None:
            raise BackendLost(self._lost)

    async def _wait_changed(self, predicate: Callable[[], bool], wait_s: float) -> bool:
        """Whether `predicate` became true within `wait_s`, or the process is to end."""
        deadline = time.monotonic() + wait_s
        while not predicate():
            left = deadline - time.monotonic()
            if left <= 0 or self.closing.is_set():
                return False
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await changed.wait()
        return True

    async def _tick(self) -> None:
        """Leases and deadlines."""
        while True:
            await asyncio.sleep(TICK_S)
            run = self._run
            if run is None or self._state not in _SERVING:
                continue
            try:
                await self._note_expired(run, run.book.expire_due())
                await self._give_up_untaken(run)
                for record in await run.note_abandoned():
                    self.events.emit(
                        "evaluation", name=record.name, weight_version=record.weight_version, abandoned=True
                    )
            except JournalError as error:
                log.warning("expiry not journalled; a restart closes them too", extra={"reason": str(error)})
            except Exception:
                log.exception("a look at the leases failed; the next one follows")
            self._wake()

    async def _note_expired(self, run: Run, expired: list[Episode]) -> None:
        if not expired:
            return
        for episode in expired:
            run.forget_session(episode.episode_id)
            run.tally.expired += 1
            self.events.emit("episode", id=episode.episode_id, task=episode.task_id, expired=episode.reason)
        await run.journal.write(*(EpisodeClosed(e) for e in expired))

    # -- what the gateway asks: the model

    def live_run(self) -> Run:
        """Raises:
        ControlRefused: no training is live.
        """
        if self._run is None or self._state not in _LIVE:
            raise self._not_live()
        return self._run

    def _not_live(self) -> ControlRefused:
        if self._state is EngineState.FAILED and self._failure is not None:
            reason, log_tail = self._failure
            return ControlRefused(
                Code.START_FAILED,
                f"the training failed: {reason}; fix it and start again (POST /v1/start)",
                details={"log_tail": log_tail},
            )
        if self._state is EngineState.STOPPING:
            return ControlRefused(Code.STOPPING, "the training is being stopped", retry_after_s=RETRY_AFTER_S)
        return ControlRefused(
            Code.NOT_STARTED, "no training is running; start one: SwarmClient.start(TrainConfig(...))"
        )

    async def serving(self) -> tuple[Backend, int]:
        """The backend and its life; waits while a lost one is started again.

        Raises:
            ControlRefused: no training is live.
        """
        while True:
            self.live_run()
            if self._state in _SERVING and self._lost is None and self._backend is not None:
                return self._backend, self._life
            await self._changed.wait()

    # -- what the gateway asks: episodes

    async def claim(self, request: ClaimRequest, *, origin: str) -> EpisodeGrant:
        """Grant an episode, waiting up to `request.wait_s` for the server to take one.

        Raises:
            ControlRefused, EpisodeError, ClientError, JournalError
        """
        _check_sampling(request.sampling)
        sampling = dict(request.sampling) | ({"seed": request.seed} if request.seed is not None else {})
        if request.evaluation_id is not None and request.kind != "evaluate":
            raise ControlRefused(Code.BAD_REQUEST, "evaluation_id: only for episodes of kind evaluate")
        deadline = time.monotonic() + request.wait_s
        while True:
            if self._run is not None:
                self._run.lane.seen(request.evaluation_id)
            refusal = self._why_no_claim(request)
            if refusal is None:
                return await self._grant_or_note(request, sampling, origin)
            left = deadline - time.monotonic()
            if left <= 0 or refusal.body.retry_after_s is None or self.closing.is_set():
                raise refusal
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await changed.wait()

    def _why_no_claim(self, request: ClaimRequest) -> ControlRefused | None:
        if self._run is None or self._state not in _LIVE:
            return self._not_live()
        run = self._run
        run.clients.require(request.client)
        if run.book.claimed_by(request.claim_id) is not None:
            return None
        if request.kind == "evaluate":
            return self._why_no_evaluation(run, request)
        if run.is_collected:
            return ControlRefused(
                Code.FINISHED,
                f"the training is finished: max_steps {run.config.max_steps} is reached",
                details={"step": run.step},
            )
        if self._state is EngineState.ROLLING:
            wait = run.pool.may_claim(request.task_id, request.client)
            return wait and ControlRefused(wait.code, wait.message, retry_after_s=wait.retry_after_s)
        return self._not_rolling()

    def _not_rolling(self) -> ControlRefused:
        return ControlRefused(
            Code.NOT_ROLLING,
            f"no episode can be claimed in state {self._state}; ask again, or send wait_s to wait here",
            retry_after_s=RETRY_AFTER_S,
        )

    def _why_no_evaluation(self, run: Run, request: ClaimRequest) -> ControlRefused | None:
        """An evaluation episode begins under the weights it is to judge, and in a place of its own.

        Raises:
            LaneError: unknown_evaluation
        """
        evaluation = run.lane.get(request.evaluation_id) if request.evaluation_id is not None else None
        if evaluation is not None and (refusal := _why_not_these_weights(run, evaluation)) is not None:
            return refusal
        # A step that begins waits for episodes of an evaluation: those still to come must get in.
        held = evaluation is not None and self._state is EngineState.ROLLING_POST
        if (self._state is not EngineState.ROLLING and not held) or run.training is not None:
            return self._not_rolling()
        if run.book.places_left("evaluate") < 1:
            return ControlRefused(
                Code.TOO_MANY_EPISODES,
                "every place for evaluation episodes is taken (evaluation.slots); ask again, or send wait_s",
                retry_after_s=RETRY_AFTER_S,
            )
        return None

    async def _grant_or_note(self, request: ClaimRequest, sampling: dict[str, Any], origin: str) -> EpisodeGrant:
        """A grant is made to its end; one whose client hung up meanwhile is given up unless it is claimed again."""
        granting = asyncio.ensure_future(self._grant(request, sampling, origin))
        try:
            return await asyncio.shield(granting)
        except asyncio.CancelledError:
            granting.add_done_callback(self._note_untaken)
            raise

    def _note_untaken(self, granting: asyncio.Future[EpisodeGrant]) -> None:
        if not granting.cancelled() and granting.exception() is None:
            self._untaken[granting.result().episode_id] = time.monotonic() + UNTAKEN_GRACE_S

    async def _give_up_untaken(self, run: Run) -> None:
        now = time.monotonic()
        for episode_id in [e for e, due in self._untaken.items() if due <= now]:
            del self._untaken[episode_id]
            with contextlib.suppress(EpisodeError, ControlRefused):  # it, or the training, was closed meanwhile
                episode = run.book.get(episode_id)
                if episode.calls == 0 and episode.last_seen == episode.claimed_at:
                    await self.abort(episode_id, "its client hung up before it had the grant")

    async def _grant(self, request: ClaimRequest, sampling: dict[str, Any], origin: str) -> EpisodeGrant:
        run = self.live_run()
        lease_s = request.lease_s or _lease_s(run.config.batching, heartbeats=request.heartbeats)
        known = run.book.claimed_by(request.claim_id)
        episode = known or run.book.claim(
            request.task_id,
            lease_s=lease_s,
            kind=request.kind,
            client=request.client,
            claim_id=request.claim_id,
            weight_version=run.weight_version,
            step=run.collecting,
            sampling=sampling,
            evaluation_id=request.evaluation_id,
        )
        run.clients.seen(request.client)
        if known is not None:
            run.book.touch(known.episode_id)  # a sign of life: its client is there after all
        else:
            try:
                await run.journal.write(EpisodeClaimed(episode))
            except JournalError:
                run.book.abort(episode.episode_id, "claim could not be journalled")
                raise
        assert episode.key is not None and run.info is not None
        return EpisodeGrant(
            episode_id=episode.episode_id,
            api_key=episode.key,
            base_url=f"{origin}/v1",
            anthropic_base_url=origin,
            weight_version=episode.weight_version,
            step=episode.step,
            context_length=run.info.context_length,
            lease_s=episode.lease_s,
        )

    async def end(self, episode_id: str, request: EndRequest) -> EndResult:
        """Take an episode's reward; the answer is on disk before it is given.

        Raises:
            ControlRefused, EpisodeError, JournalError: the episode is as it was before.
        """
        run = self.live_run()
        episode = run.book.get(episode_id)
        if episode.kind == "train" and episode.is_open:
            _check_metrics(run.config, request.metrics)
        async with episode.lock:
            begun = run.book.begin_end(episode_id, request.submission_id, request.reward)
            if begun.answer is not None:
                return begun.answer
            try:
                merged = run.merge(episode)
                finished, result = self._judge(run, episode, merged, begun.reward, request.metrics)
                if finished is None:
                    entry = EpisodeAnswered(episode_id, request.submission_id, begun.reward, result)
                else:
                    entry = EpisodeAccepted(episode_id, request.submission_id, finished, result)
                await run.journal.write(entry)
            except BaseException:
                run.book.cancel_end(episode_id)
                raise
            run.book.commit_end(episode_id, result)
            run.keep_report(episode, merged)
            run.forget_session(episode_id)
            if finished is not None:
                run.merge_counts[episode_id] = merge_numbers(merged.report)
                await run.note_dropped(run.pool.add(finished).dropped)
        run.clients.seen(episode.client)
        run.lane.seen(episode.evaluation_id)
        self._tell_ended(run, episode, begun.reward, result)
        return result

    def _judge(
        self, run: Run, episode: Episode, merged: Merged, reward: float, metrics: dict[str, float]
    ) -> tuple[FinishedEpisode | None, EndResult]:
        """What becomes of an episode: the samples to keep, and the answer to its client."""
        tokens = sum(sum(s.loss_mask) for s in merged.samples)
        told = {
            "episode_id": episode.episode_id,
            "samples": len(merged.samples),
            "sampled_tokens": tokens,
            "weight_versions": sorted(run.session(episode).versions),
        }
        if episode.kind == "evaluate":
            return None, EndResult(outcome="evaluated", **told)
        if merged.problem is not None:
            message = f"{merged.problem}; the episode is not trained, the training goes on. Please report this"
            return None, EndResult(outcome="rejected", code=Code.CONSERVATION, message=message, **told)
        finished = FinishedEpisode(
            episode_id=episode.episode_id,
            task_id=episode.task_id,
            reward=reward,
            samples=merged.samples,
            metrics=dict(metrics),
            client=episode.client,
            weight_version=episode.weight_version,
        )
        match run.pool.judge(finished, weight_version=run.weight_version):
            case Rejected(code=Code.NO_CALLS) if merged.report.left_out:
                left_out = ", ".join(f"{reason}: {calls}" for reason, calls in sorted(merged.report.left_out.items()))
                message = (
                    f"episode {episode.episode_id} has no sampled token to train on: all its calls are left out "
                    f"({left_out}; docs/merging.md). An answer trains once its client has read it whole"
                )
                return None, EndResult(outcome="rejected", code=Code.NO_CALLS, message=message, **told)
            case Rejected(code=code, message=message):
                return None, EndResult(outcome="rejected", code=code, message=message, **told)
        return finished, EndResult(outcome="admitted", **told)

    def _tell_ended(self, run: Run, episode: Episode, reward: float, result: EndResult) -> None:
        if result.outcome != "evaluated":
            run.tally.ended += 1
        if result.code is not None:
            run.tally.rejected[result.code.value] += 1
        self.events.emit(
            "episode",
            id=episode.episode_id,
            task=episode.task_id,
            outcome=result.outcome,
            code=result.code,
            reward=reward,
            client=episode.client,
        )
        self._wake()

    async def abort(self, episode_id: str, reason: str) -> EpisodeView:
        run = self.live_run()
        episode = run.book.get(episode_id)
        async with episode.lock:
            was_open = episode.is_open
            run.book.abort(episode_id, reason)
            run.forget_session(episode_id)
            if was_open:
                run.tally.aborted += 1
                self.events.emit("episode", id=episode_id, task=episode.task_id, aborted=reason)
                await run.journal.write(EpisodeClosed(episode))
        self._wake()
        return run.book.view(episode)

    def heartbeat(self, episode_id: str) -> EpisodeView:
        run = self.live_run()
        return run.book.view(run.book.touch(episode_id))

    def episode_view(self, episode_id: str) -> EpisodeView:
        run = self.live_run()
        return run.book.view(run.book.get(episode_id))

    # -- what the gateway asks: supervised warm-up

    async def warm_up(self, request: WarmupRequest) -> WarmupView:
        """Take given conversations to be learned in steps of this run; they begin as soon as it rolls. Idempotent.

        Raises:
            ControlRefused: no training is live, a conversation cannot be taught, or max_steps leaves no room.
            JournalError: nothing is taken.
        """
        async with self._warming:
            run = self.live_run()
            if (known := run.warmups.get(request.warmup_id)) is not None:
                return warmup_view(known)
            if run.renderer is None or run.info is None:
                raise ControlRefused(
                    Code.NOT_ROLLING, "the model is still being brought up; ask again", retry_after_s=RETRY_AFTER_S
                )
            _check_room(run, request.steps)
            try:
                conversations = await asyncio.to_thread(
                    render_conversations,
                    request.conversations,
                    run.renderer,
                    context_length=run.info.context_length,
                )
            except BadConversation as error:
                raise ControlRefused(Code.BAD_REQUEST, str(error)) from None
            warmup = Warmup(
                request.warmup_id,
                steps=request.steps,
                batch_size=request.batch_size,
                lr=request.lr or run.config.optim.lr,
                seed=request.seed,
                conversations=conversations,
            )
            await run.accept_warmup(warmup)
            view = warmup_view(warmup)
            self.events.emit("warmup", conversations=len(conversations), **view.model_dump())
        self._wake()
        return view

    async def warmup_when(self, warmup_id: str, *, after: int, wait_s: float) -> WarmupView:
        """The warm-up as it is, as soon as more than `after` of its steps are done, or it will do no more.

        Raises:
            ControlRefused: no training is live, or it has no such warm-up.
        """

        def found() -> Warmup:
            run = self.live_run()
            if warmup_id not in run.warmups:
                raise ControlRefused(Code.NOT_FOUND, f"no warm-up {warmup_id!r} in this training; send it again")
            return run.warmups[warmup_id]

        found()
        await self._wait_changed(
            lambda: self._state not in _LIVE or len(found().done) > after or found().failed is not None, wait_s
        )
        return warmup_view(found())

    # -- what the gateway asks: clients

    async def register(self, request: RegisterRequest) -> ClientView:
        run = self.live_run()
        view = run.clients.register(request.name, request.share)
        await run.journal.write(ClientRegistered(request.name, request.share))
        self.events.emit("client", name=request.name, share=request.share)
        self._wake()
        return view

    async def leave(self, name: str) -> None:
        run = self.live_run()
        run.clients.remove(name)
        await run.journal.write(ClientRemoved(name))
        self.events.emit("client", name=name, left=True)
        self._wake()

    def client_heartbeat(self, name: str) -> ClientView:
        return self.live_run().clients.heartbeat(name)

    def agree(self, name: str, step: int) -> ClientView:
        run = self.live_run()
        view = run.clients.agree(name, step, expected=run.collecting)
        self.events.emit("client", name=name, agreed=step)
        self._wake()
        return view

    def client_views(self) -> list[ClientView]:
        return self._run.clients.views() if self._run is not None else []

    # -- what the gateway asks: looking

    def status(self) -> ServerStatus:
        run = self._run
        reason, log_tail = self._failure or (None, None)
        return ServerStatus(
            server_id=self.server_id,
            version=swarmtune.__version__,
            state=self._state,
            step=run.step if run else 0,
            training_step=run.training if run else None,
            weight_version=run.weight_version if run else 0,
            model=run.config.model if run else None,
            context_length=run.info.context_length if run and run.info else None,
            open_episodes=run.book.open_count if run else 0,
            pooled_episodes=len(run.pool) if run else 0,
            clients=sum(v.alive for v in run.clients.views()) if run else 0,
            uptime_s=time.monotonic() - self._started_at,
            run_dir=str(run.folder) if run else None,
            reason=reason,
            log_tail=log_tail or None,
        )

    async def status_when(self, *, leaves: str | None, wait_s: float) -> ServerStatus:
        """The status, at once or as soon as the state is not `leaves` any more."""
        if leaves is not None:
            await self._wait_changed(lambda: self._state != leaves, wait_s)
        return self.status()

    def config(self) -> dict[str, Any]:
        if self._run is None:
            raise self._not_live()
        return self._run.config.model_dump(mode="json")

    def pool_view(self) -> PoolView:
        run = self.live_run()
        view = run.pool.view(run.collecting)
        if view.ready and run.collecting > run.next_step:
            view.explanation += f"; it starts when step {run.training} is trained"
        return view

    async def pool_when(self, *, after: int, wait_s: float) -> PoolView:
        """The pool, at once or as soon as a step later than `after` is collected."""
        await self._wait_changed(lambda: self.live_run().collecting > after, wait_s)
        return self.pool_view()

    async def steps_after(self, step: int, *, wait_s: float) -> list[StepRecord]:
        """Records of later steps; waits for the first one, or for the training to end."""

        def found() -> list[StepRecord]:
            return [r for r in self._run.records if r.step > step] if self._run else []

        await self._wait_changed(lambda: bool(found()) or self._state not in _LIVE, wait_s)
        return found()

    def checkpoints(self) -> list[CheckpointView]:
        return self._run.judged_checkpoints() if self._run else []

    async def save_checkpoint(self) -> CheckpointView:
        """Raises:
        ControlRefused: nothing is trained yet, an update is running, or there is no space.
        """
        run = self.live_run()
        backend = self._backend
        if backend is None or self._state not in (EngineState.ROLLING, EngineState.ROLLING_POST):
            raise ControlRefused(
                Code.NOT_ROLLING, f"no checkpoint in state {self._state}; ask again", retry_after_s=RETRY_AFTER_S
            )
        if run.training is not None:
            raise ControlRefused(
                Code.NOT_ROLLING, f"step {run.training} is being trained; ask again", retry_after_s=RETRY_AFTER_S
            )
        if (last := run.last_checkpoint) is not None and not run.needs_checkpoint():
            return last
        view = await self._save_checkpoint(run, backend)
        if view is None:
            raise ControlRefused(Code.NO_SPACE, "the checkpoint could not be saved; the event log has the reason")
        return view

    async def export(self, request: ExportRequest) -> ExportView:
        """Weights of a checkpoint as a Hugging Face folder; the training goes on meanwhile.

        Raises:
            ControlRefused: no such checkpoint, none can be saved now, or it cannot be written as asked.
        """
        run = self.live_run()
        view = await self.save_checkpoint() if request.step is None else self._checkpoint_of(run, request.step)
        with run.pinned(view.step):
            try:
                exported = await export_apart(Path(view.path), request)
            except ExportFailed as error:
                raise ControlRefused(error.code, str(error)) from error
        self.events.emit("export", **exported.model_dump())
        return exported

    def _checkpoint_of(self, run: Run, step: int) -> CheckpointView:
        for view in run.checkpoints:
            if view.step == step:
                return view
        there = ", ".join(str(v.step) for v in run.checkpoints) or "none"
        raise ControlRefused(Code.NOT_FOUND, f"no checkpoint of step {step}; there are: {there}")

    # -- what the gateway asks: evaluations

    async def begin_evaluation(self, request: EvaluationRequest) -> EvaluationRecord:
        """Raises:
        ControlRefused, LaneError, JournalError
        """
        run = self.live_run()
        _check_sampling(request.sampling)
        if request.weight_version is not None and (refusal := _why_never(run, request.weight_version)) is not None:
            raise refusal
        return await run.begin_evaluation(request)

    async def finish_evaluation(self, evaluation_id: str, outcome: EvaluationOutcome) -> EvaluationRecord:
        """Raises:
        ControlRefused, LaneError, JournalError
        """
        record = await self.live_run().finish_evaluation(evaluation_id, outcome)
        mean = record.mean.value if record.mean is not None else None
        self.events.emit(
            "evaluation",
            name=record.name,
            weight_version=record.weight_version,
            mean=mean,
            episodes=record.episodes,
            mixed=record.mixed,
            skipped=record.skipped,
            failed=record.failed,
        )
        self._wake()
        return record

    def evaluation(self, evaluation_id: str) -> EvaluationRecord:
        """Raises:
        ControlRefused, LaneError
        """
        return self.live_run().lane.get(evaluation_id)

    def evaluations(self, name: str | None = None) -> list[EvaluationRecord]:
        return self._run.lane.records(name) if self._run is not None else []

    def merge_report(self, episode_id: str) -> dict[str, Any]:
        """How the calls of an open episode would merge now."""
        run = self.live_run()
        try:
            return run.merge_report(run.book.get(episode_id))
        except LookupError as error:
            raise ControlRefused(Code.NOT_FOUND, str(error)) from None

    # -- what survives the process

    @property
    def _memory(self) -> Path:
        return self._data_dir / "training.json"

    def _remember_run(self, folder: Path) -> None:
        scratch = self._memory.with_suffix(".tmp")
        scratch.write_text(json.dumps({"run": folder.name}) + "\n")
        os.replace(scratch, self._memory)

    def _forget_run(self) -> None:
        """Needs no space: a training can be stopped on a full disk."""
        try:
            self._memory.unlink(missing_ok=True)
        except OSError as error:
            log.warning(
                "the training will go on at the next start of the server, unless that is told --fresh",
                extra={"reason": str(error)},
            )

    def _remembered_run(self) -> Path | None:
        """The folder of the training to go on with. One whose note cannot be read is the last one there is."""
        runs = self._data_dir / "runs"
        if not self._memory.is_file():
            return None
        try:
            name = json.loads(self._memory.read_text()).get("run")
        except (ValueError, AttributeError):
            names = sorted(p.parent.name for p in runs.glob("[0-9]*/journal.db"))
            name = names[-1] if names else None
            log.warning("training.json is damaged; going on with the last run", extra={"run": name})
        folder = runs / str(name) if name else None
        return folder if folder is not None and (folder / "journal.db").is_file() else None


def _check_origin(run: Run, from_step: int | None) -> None:
    """Raises:
    ControlRefused: the live run does not begin at that step of another one.
    """
    if from_step is not None and (run.origin is None or run.origin["step"] != from_step):
        raise ControlRefused(
            Code.CONFIG_CONFLICT,
            f"a training is live at step {run.step}; stop it first to begin again at step {from_step}",
            details={"differences": {"from_step": [run.origin and run.origin["step"], from_step]}},
        )


def _why_not_these_weights(run: Run, evaluation: EvaluationRecord) -> ControlRefused | None:
    wanted = evaluation.weight_version
    if wanted < run.weight_version:
        return ControlRefused(
            Code.VERSION_PASSED,
            f"evaluation {evaluation.name!r} is of the weights of step {wanted}, which were replaced by those of step "
            f"{run.weight_version}; allow a longer hold_sync_s, or evaluate less at a time",
        )
    if wanted == run.weight_version:
        return None
    return _why_never(run, wanted) or ControlRefused(
        Code.NOT_ROLLING, f"the weights of step {wanted} are not there yet", retry_after_s=RETRY_AFTER_S
    )


def _why_never(run: Run, version: int) -> ControlRefused | None:
    """The refusal where the training ends before the weights of that step."""
    limit = run.config.max_steps
    if limit is None or version <= limit:
        return None
    return ControlRefused(
        Code.FINISHED, f"the weights of step {version} will not come: the training ends at max_steps {limit}"
    )


def _check_sampling(overrides: Mapping[str, Any]) -> None:
    """Raises:
    ControlRefused: bad_request; SamplingConfig does not take them.
    """
    try:
        SamplingConfig.model_validate(overrides)
    except ValidationError as error:
        raise ControlRefused(Code.BAD_REQUEST, f"sampling: {'; '.join(explain(error, SamplingConfig))}") from None


def _teaches(run: Run) -> bool:
    return run.waiting_warmup() is not None


def _check_room(run: Run, steps: int) -> None:
    """Raises:
    ControlRefused: more steps than max_steps leaves.
    """
    limit = run.config.max_steps
    if limit is None:
        return
    left = limit - run.step - sum(w.steps - len(w.done) for w in run.warmups.values() if w.failed is None)
    if steps > left:
        raise ControlRefused(
            Code.FINISHED,
            f"steps: max_steps {limit} leaves {max(0, left)} steps after step {run.step}, and {steps} were asked for; "
            "ask for fewer, or train with a larger max_steps",
            details={"step": run.step},
        )


def warmup_view(warmup: Warmup) -> WarmupView:
    return WarmupView(
        warmup_id=warmup.warmup_id,
        steps=warmup.steps,
        batch_size=warmup.batch_size,
        lr=warmup.lr,
        done=list(warmup.done),
        failed=warmup.failed,
    )


def _check_metrics(config: TrainConfig, metrics: Mapping[str, float]) -> None:
    """What the estimator cannot do without must come with each episode: a batch that lacks it could never be trained.

    Raises:
        ControlRefused: bad_request; the episode stays open.
    """
    if config.algorithm.advantage == "remax" and not math.isfinite(metrics.get(BASELINE_METRIC, math.nan)):
        raise ControlRefused(
            Code.BAD_REQUEST,
            f"metrics.{BASELINE_METRIC}: algorithm.advantage 'remax' needs it with each end, a finite number: the "
            "reward of the task's greedy answer. Send it, or train with another estimator",
        )


def _lease_s(batching: BatchingConfig, *, heartbeats: bool) -> float:
    longest = batching.episode_lease_s
    return min(longest, batching.heartbeat_lease_s) if heartbeats else longest


async def _start_backend(backend: Backend, run: Run, work_dir: Path) -> BackendInfo:
    """Bring the model up as its last checkpoint has it.

    Raises:
        StartFailed: names the checkpoint, where there is one, and the way around it.
    """
    last = run.last_checkpoint
    try:
        return await backend.start(run.config, work_dir=work_dir, resume=Path(last.path) if last else None)
    except StartFailed as error:
        if last is None:
            raise
        raise StartFailed(
            f"{error.reason}; it was to go on from {last.path}: restore that if it is damaged; {START_AFRESH}",
            error.log_tail,
        ) from error


def _unusable_folder(data_dir: Path, error: OSError) -> ControlRefused:
    """A data folder that cannot be written, by its reason."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return ControlRefused(Code.NO_SPACE, f"{data_dir}: {error}; free some space or give another --data-dir")
    return ControlRefused(
        Code.INTERNAL, f"{data_dir}: {error}; the folder must be writable for this user, or give another --data-dir"
    )


def _is_folder(name: str) -> bool:
    try:
        return bool(name) and Path(name).expanduser().is_dir()
    except (OSError, RuntimeError):  # too long for a path; a home that is nobody's
        return False


def check_model_name(model: str) -> None:
    """Refuse what can be seen to be no model; a hub id is tried while booting.

    Raises:
        ControlRefused: unknown_model, with the names there are.
    """
    if model in ENTRIES or _is_folder(model):
        return
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        names = ", ".join(ENTRIES)
        raise ControlRefused(
            Code.UNKNOWN_MODEL,
            f"model: no such model or folder {model!r}; known names: {names}; a local folder works too",
        )
