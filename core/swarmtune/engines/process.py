"""The server's side of the engine process: start it, call it, notice its death, leave nothing behind.

One child at a time, in a session of its own, joined by a socket pair: no address, no file. A child that dies makes
every pending call raise BackendLost at once, and `start` may be called again on the same object. The child dies with
this process, also on `kill -9`. Never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from swarmtune import models
from swarmtune.backend import BackendError, BackendInfo, BackendLost, StartFailed
from swarmtune.config import TrainConfig
from swarmtune.engines import frames
from swarmtune.engines.frames import Frame
from swarmtune.types import GenerateChunk, GenerateRequest, StepResult, TrainBatch

log = logging.getLogger(__name__)

LOG_NAME = "engine.log"
_TAIL_LINES = 40
_SETTLE_S = 1.0
"""Between the two signs of an end, the closed connection and the exit: the other one follows at once, or never."""
SILENT_S = 120.0
"""A process that answers no ping for so long is lost: frozen, or stuck where its event loop cannot run. It does answer
while a torch thread computes, so only a machine out of breath comes near this."""
_STRETCHES = 12
"""Of SILENT_S, after each of which the process is looked at. Counted, not measured: time in which this process itself
was stopped is one stretch, however long."""
_POLITE_SHARE, _TERM_SHARE = 0.7, 0.2
"""Of a stop's grace: for the polite request, then for SIGTERM; the rest is SIGKILL's."""

Pending = asyncio.Future[Any] | asyncio.Queue[GenerateChunk | Exception]


class ProcessBackend:
    """A backend.Backend in a process of its own (module `host`)."""

    def __init__(self, *, resolve: Callable[[str], Path] = models.resolve) -> None:
        self._resolve = resolve
        self._child: _Child | None = None
        self._up = asyncio.Event()
        """Set from a successful start until a stop or the next start: there is a child whose death means something."""

    @property
    def pid(self) -> int | None:
        """Of the engine process; None when there is none."""
        return self._child.pid if self._child else None

    async def start(self, config: TrainConfig, *, work_dir: Path, resume: Path | None) -> BackendInfo:
        if self._child is not None and not self._child.over.done():
            raise StartFailed("the engine process is running already; stop it first")
        self._up.clear()
        model_path = await self._find_model(config.model)
        child = self._child = await _Child.spawn(work_dir, config.engine.threads)
        started: Frame | None = None
        try:
            started = await child.call(
                "start",
                config=config.model_dump(mode="json"),
                model_path=str(model_path),
                work_dir=str(work_dir),
                resume=str(resume) if resume else None,
            )
        except (BackendError, OSError) as error:
            raise StartFailed(str(error), child.log_tail()) from error
        finally:
            if started is None:
                await child.end(grace_s=0.0)
        assert started is not None
        self._up.set()
        return BackendInfo(
            model_path=model_path,
            model_name=config.model,
            context_length=started["context_length"],
            weight_version=started["weight_version"],
            parameters=started["parameters"],
            constrains=started["constrains"],
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        child = self._running()
        call_id, chunks = child.open_stream()
        child.send({"id": call_id, "op": "generate"} | frames.request_fields(request))
        finished = False
        try:
            while not finished:
                item = await chunks.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            child.close(call_id)
            if not finished:
                child.send({"id": call_id, "op": "cancel"})

    async def train(self, batch: TrainBatch) -> StepResult:
        result = await self._running().call("train", batch=frames.batch_fields(batch))
        return StepResult(result["step"], result["weight_version"], result["metrics"])

    async def save(self, path: Path) -> None:
        await self._running().call("save", path=str(path))

    async def wait_lost(self) -> str:
        while True:
            await self._up.wait()
            assert self._child is not None
            reason = await asyncio.shield(self._child.over)
            if reason is not None:
                return reason

    async def stop(self, *, grace_s: float = 10.0) -> None:
        self._up.clear()
        if self._child is not None:
            await self._child.end(grace_s=grace_s)

    async def _find_model(self, name: str) -> Path:
        try:
            return await asyncio.to_thread(self._resolve, name)
        except models.ModelNotFound as error:
            raise StartFailed(f"unknown model: {error}") from error
        except models.ModelError as error:
            raise StartFailed(str(error)) from error

    def _running(self) -> _Child:
        if self._child is None:
            raise BackendLost("no engine process is running; start one")
        return self._child


class _Child:
    """One engine process from spawn to its end; never reused."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log_file: Path,
        log_start: int,
    ) -> None:
        self._process = process
        self._reader, self._writer = reader, writer
        self._log_file, self._log_start = log_file, log_start
        self._ids = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._stopping = False
        self._silent_s: float | None = None
        """How long it was silent when it was given up for that."""
        self.over: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """Done when the process is gone: why it was lost, or None when it was told to end."""
        self._watcher = asyncio.create_task(self._watch(), name="engine-process-watch")
        self._pinger = asyncio.create_task(self._ping(SILENT_S / _STRETCHES), name="engine-process-ping")

    @classmethod
    async def spawn(cls, work_dir: Path, threads: int | None) -> _Child:
        """Start the process; it has loaded nothing yet.

        Raises:
            StartFailed: the log cannot be written or the process not be made.
        """
        ours, theirs = socket.socketpair()
        log_file = work_dir / LOG_NAME
        try:
            with theirs, log_file.open("ab") as sink:
                log_start = sink.tell()
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "swarmtune.engines.host"),
                    *("--fd", str(theirs.fileno()), "--parent", str(os.getpid())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env=_environment(threads),
                )
        except OSError as error:
            ours.close()
            raise StartFailed(f"the engine process could not be started: {error}") from error
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer, log_file, log_start)

    @property
    def pid(self) -> int:
        return self._process.pid

    # Calls.

    async def call(self, op: str, **fields: Any) -> Any:
        """One request, one answer.

        Raises:
            BackendLost: the process ended before it answered.
            BackendError, OSError: what the process answered.
        """
        call_id = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = answer
        try:
            self.send({"id": call_id, "op": op} | fields)
            return await answer
        finally:
            self.close(call_id)

    def open_stream(self) -> tuple[int, asyncio.Queue[GenerateChunk | Exception]]:
        """(call id, where its chunks and at most one exception arrive)."""
        self._check()
        call_id = next(self._ids)
        chunks: asyncio.Queue[GenerateChunk | Exception] = asyncio.Queue()
        self._pending[call_id] = chunks
        return call_id, chunks

    def close(self, call_id: int) -> None:
        self._pending.pop(call_id, None)

    def send(self, frame: Frame) -> None:
        """Write a frame; a cancellation to a dead process is not worth an error."""
        if frame["op"] != "cancel":
            self._check()
        if not self._writer.is_closing():
            self._writer.write(frames.pack(frame))

    def _check(self) -> None:
        if self.over.done() or self._stopping:
            raise BackendLost(self._reason() if self.over.done() else "the engine process is being stopped")

    def _reason(self) -> str:
        return self.over.result() or "the engine process was stopped"

    # Watching.

    async def _watch(self) -> None:
        """Deliver frames until the connection or the process ends, then settle everything that waits."""
        exited = asyncio.create_task(self._process.wait())
        reading = asyncio.create_task(self._read())
        await asyncio.wait([exited, reading], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([exited, reading], timeout=_SETTLE_S)
        hung_up = not exited.done()
        self._kill(signal.SIGKILL)
        await exited
        reading.cancel()
        self._pinger.cancel()
        self._writer.close()
        self.over.set_result(None if self._stopping else self._why_lost(hung_up))
        if not self._stopping:
            log.warning("engine process lost", extra={"reason": self._reason(), "pid": self.pid})
        for pending in list(self._pending.values()):
            _settle(pending, BackendLost(self._reason()))

    async def _ping(self, stretch_s: float) -> None:
        """Ask for signs of life; kill a process that gives none, which ends what waits for it as lost."""
        while await self._answers(stretch_s):  # noqa: ASYNC110 - a question, not a wait for an event
            await asyncio.sleep(stretch_s)
        self._silent_s = _STRETCHES * stretch_s
        self._kill(signal.SIGKILL)

    async def _answers(self, stretch_s: float) -> bool:
        call_id = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # lost: others are told of that
        self._pending[call_id] = answer
        self._writer.write(frames.pack({"id": call_id, "op": "ping"}))
        try:
            for _ in range(_STRETCHES):
                await asyncio.wait([answer], timeout=stretch_s)
                if answer.done():
                    return True
            return False
        finally:
            self.close(call_id)

    async def _read(self) -> None:
        try:
            while (frame := await frames.read_frame(self._reader)) is not None:
                self._deliver(frame)
        except Exception:
            log.exception("the engine process sent what cannot be read")

    def _deliver(self, frame: Frame) -> None:
        for fields in frame.get("chunks", ()):
            call_id, chunk = frames.read_chunk(fields)
            pending = self._pending.get(call_id)
            if isinstance(pending, asyncio.Queue):
                pending.put_nowait(chunk)
        if (pending := self._pending.get(frame.get("id", 0))) is not None:
            if "error" in frame:
                _settle(pending, frames.read_error(frame["error"]))
            elif isinstance(pending, asyncio.Future) and not pending.done():
                pending.set_result(frame["ok"])

    def _why_lost(self, hung_up: bool) -> str:
        if self._silent_s is not None:
            return f"the engine process gave no sign of life for {self._silent_s:g} s (frozen?), and was killed"
        if hung_up:
            return "the engine process closed its connection while it was running, and was killed"
        code = self._process.returncode
        if code is None or code >= 0:
            return f"the engine process ended by itself with exit code {code}"
        name = signal.Signals(-code).name
        hint = "; the kernel does that when memory runs out" if -code == signal.SIGKILL else ""
        return f"the engine process was killed by signal {-code} ({name}){hint}"

    # Ending.

    async def end(self, *, grace_s: float) -> None:
        """Have the process gone within about `grace_s`. Idempotent."""
        if not self.over.done() and not self._stopping:
            with contextlib.suppress(BackendLost):
                self.send({"id": next(self._ids), "op": "stop"})
            self._stopping = True
            if not await self._gone_within(grace_s * _POLITE_SHARE):
                self._kill(signal.SIGTERM)
                if not await self._gone_within(grace_s * _TERM_SHARE):
                    self._kill(signal.SIGKILL)
        await asyncio.shield(self._watcher)

    async def _gone_within(self, seconds: float) -> bool:
        if seconds > 0:
            await asyncio.wait([self._watcher], timeout=seconds)
        return self._watcher.done()

    def _kill(self, number: signal.Signals) -> None:
        """Signal the whole group: the process and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def log_tail(self) -> str:
        """The last lines this process wrote."""
        with self._log_file.open("rb") as file:
            file.seek(self._log_start)
            return "\n".join(file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])


def _settle(pending: Pending, error: Exception) -> None:
    if isinstance(pending, asyncio.Queue):
        pending.put_nowait(error)
    elif not pending.done():
        pending.set_exception(error)


def _environment(threads: int | None) -> dict[str, str]:
    """The child finds this package where it is only on sys.path, and never asks the hub: the model is local."""
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    env = os.environ | {
        "PYTHONPATH": f"{package_root}{os.pathsep}{path}" if path else package_root,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    return env | {"OMP_NUM_THREADS": str(threads)} if threads else env
