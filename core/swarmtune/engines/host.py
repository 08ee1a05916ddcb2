"""The engine process: `python -m swarmtune.engines.host --fd N --parent PID`, started by process.ProcessBackend.

Holds weights, optimizer and engine. The event loop in the main thread answers frames; everything that computes runs on
one torch thread in the order it was asked for, so an update never overlaps a decode step; with batching.overlap the
trainer has a thread of its own, and only the weights' hand-over pauses generation. A bad request is answered by
an error frame; only an update or weight copy that failed half-way ends the process, because half-updated weights must
not answer. It ignores SIGINT (the server decides), ends at once on SIGTERM, and dies with its server however that ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swarmtune.backend import RequestRefused, StartFailed, UpdateFailed
from swarmtune.config import TrainConfig
from swarmtune.engines import frames
from swarmtune.engines.frames import Frame

if TYPE_CHECKING:
    from swarmtune.engines.engine import Engine
    from swarmtune.trainer.trainer import Trainer

log = logging.getLogger("swarmtune.engines.host")

T = TypeVar("T")

DRAIN_S = 10.0
"""How long an update waits for running generations; the rest goes on under the new weights."""

_PR_SET_PDEATHSIG = 1


def _hf_engine() -> type[Engine]:
    from swarmtune.engines.hf import HFEngine

    return HFEngine


def _vllm_engine() -> type[Engine]:
    from swarmtune.engines.vllm import VllmEngine

    return VllmEngine


def _verl_engine() -> type[Engine]:
    from swarmtune.engines.verl import VerlEngine

    return VerlEngine


ENGINES: dict[str, Callable[[], type[Engine]]] = {"hf": _hf_engine, "vllm": _vllm_engine, "verl": _verl_engine}


class EngineHost:
    """Answers the frames of one connection until it closes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._torch_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
        self._trainer_thread = self._torch_thread
        """With batching.overlap a thread of its own, so that decode steps go on during an update."""
        self._engine: Engine | None = None
        self._trainer: Trainer | None = None
        self._updating = asyncio.Lock()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._chunks: list[list[Any]] = []
        self._operations: dict[str, Callable[[Frame], Awaitable[Any]]] = {
            "ping": self._ping,
            "start": self._start,
            "train": self._train,
            "save": self._save,
            "stop": self._stop,
        }

    async def run(self) -> None:
        while (frame := await frames.read_frame(self._reader)) is not None:
            call_id, op = frame.get("id"), frame.get("op")
            if not isinstance(call_id, int):
                log.warning("a frame without an id was ignored")
            elif op == "cancel":
                if task := self._tasks.get(call_id):
                    task.cancel()
            else:
                work = self._generate if op == "generate" else self._answer
                task = self._tasks[call_id] = asyncio.create_task(work(frame))
                task.add_done_callback(lambda _, call_id=call_id: self._tasks.pop(call_id, None))

    # Answers.

    async def _answer(self, frame: Frame) -> None:
        """Run one call and send its result or its error."""
        try:
            operation = self._operations.get(frame.get("op", ""))
            if operation is None:
                raise RequestRefused(f"no such operation: {frame.get('op')!r}; known: {', '.join(self._operations)}")
            answer: Frame = {"ok": await operation(frame)}
        except Exception as error:
            if not isinstance(error, RequestRefused | UpdateFailed | StartFailed):
                log.exception("call failed")
            answer = {"error": frames.error_fields(error)}
        self._send({"id": frame["id"]} | answer)

    async def _generate(self, frame: Frame) -> None:
        """Send one generation's chunks. Cancelled when the server hangs up."""
        call_id = frame["id"]
        try:
            if self._engine is None:
                raise RequestRefused("no model is loaded; start first")
            async with contextlib.aclosing(self._engine.generate(frames.read_request(frame))) as chunks:
                async for chunk in chunks:
                    self._queue_chunk(frames.chunk_fields(call_id, chunk))
        except Exception as error:  # noqa: BLE001 - one bad request must not end the process
            self._send({"id": call_id, "error": frames.error_fields(error)})

    def _queue_chunk(self, chunk: list[Any]) -> None:
        """Chunks of one decode step arrive within one round of the loop; they leave in one frame."""
        if not self._chunks:
            asyncio.get_running_loop().call_soon(self._flush)
        self._chunks.append(chunk)

    def _flush(self) -> None:
        if self._chunks:
            self._writer.write(frames.pack({"chunks": self._chunks}))
            self._chunks = []

    def _send(self, frame: Frame) -> None:
        self._flush()
        self._writer.write(frames.pack(frame))

    # Operations.

    async def _ping(self, frame: Frame) -> None:
        """A sign of life: the event loop runs, whatever the torch thread computes."""

    async def _start(self, frame: Frame) -> Frame:
        if self._engine is not None:
            raise StartFailed("this engine process has a model already; start another one")
        config = TrainConfig.model_validate(frame["config"])
        if config.batching.overlap:
            self._trainer_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        resume = Path(frame["resume"]) if frame["resume"] else None
        try:
            self._engine, self._trainer, step = await self._on_torch_thread(
                lambda: self._load(config, Path(frame["model_path"]), Path(frame["work_dir"]), resume)
            )
            await self._hand_over(self._engine, self._trainer, step)
        except StartFailed:
            raise
        except Exception as error:
            log.exception("start failed")
            raise StartFailed(describe(error)) from error
        log.info("model loaded", extra={"model": config.model, "step": step})
        return {
            "context_length": self._engine.context_length,
            "weight_version": step,
            "parameters": self._trainer.parameters,
            "constrains": self._engine.constrains,
        }

    def _load(
        self, config: TrainConfig, model_path: Path, work_dir: Path, resume: Path | None
    ) -> tuple[Engine, Trainer, int]:
        """Blocks; imports torch."""
        import torch

        from swarmtune.trainer.trainer import Trainer

        if config.engine.threads is not None:
            torch.set_num_threads(config.engine.threads)
        trainer = Trainer(config, model_path, work_dir=work_dir)
        engine = ENGINES[config.engine.kind]().load(config, model_path, self._torch_thread, work_dir=work_dir)
        return engine, trainer, trainer.start(resume)

    async def _train(self, frame: Frame) -> Frame:
        engine, trainer = self._loaded()
        batch = frames.read_batch(frame["batch"])
        async with self._updating:
            times = Stopwatch()
            try:
                if not self._overlaps:
                    await engine.pause(drain_s=DRAIN_S)
                    times.lap("s/drain")
                metrics = await self._update(trainer, batch)
                times.skip()
                if self._overlaps:
                    await engine.pause(drain_s=0.0)
                await self._hand_over_weights(engine, trainer, batch.step)
                times.lap("s/weight_sync")
            finally:
                await engine.resume()
        metrics |= times.laps
        await self._track(trainer, metrics, batch.step)
        return {"step": batch.step, "weight_version": engine.weight_version, "metrics": metrics}

    async def _update(self, trainer: Trainer, batch: Any) -> dict[str, float]:
        """Train. Weights that are no step's weights are worse than none: then the process ends."""
        from swarmtune.trainer.trainer import HalfUpdated

        try:
            return dict(await self._on_trainer_thread(lambda: trainer.update(batch)))
        except HalfUpdated:
            log.exception("update failed half-way; ending, so that the last checkpoint is loaded")
            leave(1)
            raise
        except Exception as error:
            log.exception("update failed")
            raise UpdateFailed(describe(error)) from error

    async def _hand_over_weights(self, engine: Engine, trainer: Trainer, version: int) -> None:
        """Give the engine the trainer's weights, all of them, or end the process."""
        try:
            await self._hand_over(engine, trainer, version)
        except Exception:
            log.exception("the engine could not take the new weights; ending, so that the last checkpoint is loaded")
            leave(1)
            raise

    async def _hand_over(self, engine: Engine, trainer: Trainer, version: int) -> None:
        """Raises:
        ValueError: they do not fit.
        """
        if engine.takes_adapter:
            await engine.load_adapter(trainer.save_adapter, version=version)
        else:
            await engine.load_weights(trainer.weights, version=version)

    async def _track(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        try:
            await self._on_trainer_thread(lambda: trainer.track(metrics, step))
        except Exception:  # the step is done: a tracking service must not undo it
            log.exception("metrics could not be tracked")

    async def _save(self, frame: Frame) -> None:
        from swarmtune.trainer.worker import WorkersLost

        _, trainer = self._loaded()
        async with self._updating:
            try:
                await self._on_trainer_thread(lambda: trainer.save(Path(frame["path"])))
            except WorkersLost:
                log.exception("no checkpoint; ending, so that the last one is loaded")
                leave(1)
                raise

    async def _stop(self, frame: Frame) -> None:
        """End the process politely: an update or a checkpoint under way is finished first."""
        async with self._updating:
            if self._engine is not None:
                await self._engine.close()
            if self._trainer is not None:
                await self._on_trainer_thread(self._trainer.close)
        self._send({"id": frame["id"], "ok": None})
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()
        leave(0)

    def _loaded(self) -> tuple[Engine, Trainer]:
        if self._engine is None or self._trainer is None:
            raise RequestRefused("no model is loaded; start first")
        return self._engine, self._trainer

    @property
    def _overlaps(self) -> bool:
        return self._trainer_thread is not self._torch_thread

    async def _on_trainer_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._trainer_thread, work)

    async def _on_torch_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch_thread, work)


class Stopwatch:
    """Seconds of stretches that follow each other."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.skip()

    def skip(self) -> None:
        """Begin a stretch; the one before is not counted."""
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """End a stretch and begin the next."""
        self.laps[name] = time.monotonic() - self._last
        self.skip()


def describe(error: BaseException) -> str:
    """One line for a person: out of memory where it is that, else the exception's last line."""
    last = traceback.format_exception_only(error)[-1].strip().splitlines()[-1]
    signs = ("can't allocate memory", "out of memory", "bad_alloc")
    if isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in signs):
        return f"out of memory: {last}"
    return last


def die_with_parent(parent: int) -> None:
    """Be killed by the kernel when the thread that started this process ends; leave if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        leave(0)


def offer_to_the_oom_killer() -> None:
    """When memory is short the kernel should take this process, which is restarted, and not the server."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")


def leave(code: int) -> None:
    """End now. A torch thread cannot be interrupted, and interpreter shutdown would wait for it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def serve(fd: int) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave, 0)
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    await EngineHost(reader, writer).run()


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine process; the server starts it.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the server")
    parser.add_argument("--parent", type=int, required=True, help="pid of the server")
    options = parser.parse_args()
    die_with_parent(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    offer_to_the_oom_killer()
    faulthandler.enable()
    os.set_inheritable(options.fd, False)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(options.fd))
    except Exception:
        log.exception("the engine process failed")
        leave(1)
    leave(0)


if __name__ == "__main__":
    main()
