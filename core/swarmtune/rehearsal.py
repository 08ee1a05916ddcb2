"""A swarm server in this process whose answers come from a function: for trying, testing and checking clients.

    with Rehearsal() as stage:
        played = stage.play(rollout, task, lambda messages: "7", seed=1)
        print(played.reward, played.turns)

What it promises: an episode is played as in a training (claimed, called over HTTP with its own key, ended or aborted)
and needs no model, no GPU and no network; each call is answered by the function given with its episode, which sees the
messages the model would read. Episodes are evaluation episodes: nothing is trained.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from swarmtune.backend import GenerateFailed
from swarmtune.client import AsyncSwarmClient
from swarmtune.engines.scripted import ScriptedBackend
from swarmtune.rollout import play, task_id_of
from swarmtune.testing import LocalServer, chatml_model
from swarmtune.types import GenerateChunk, GenerateRequest

T = TypeVar("T")
Messages = Sequence[dict[str, str]]
Answer = Callable[[Messages], str]
"""The messages of one call ({"role", "content"}) → what the model says."""

BYTES_PER_TOKEN = 4
"""The rehearsal's tokenizer has a token per byte; limits given in tokens of a real model are widened by this."""
CONTEXT_BYTES = 262_144
_CALLING: ContextVar[tuple[str, int]] = ContextVar("episode of the call, and its limit in bytes", default=("", 0))


class Outage(Exception):
    """Raised by an answer function: the call fails with status 500, as it does when an engine fails."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the model."""

    messages: list[dict[str, str]]
    answer: str
    """As far as the call's token limit let it come."""


@dataclass(frozen=True, slots=True)
class Played:
    """One episode that is over."""

    task_id: str
    seed: int
    reward: Any = None
    """What the rollout returned or ended its episode with, whatever it is; None where it raised."""
    metrics: dict[str, float] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    error: BaseException | None = None
    """What the rollout raised, or why its reward was refused; the episode was aborted then."""


class Rehearsal:
    """See the module."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rehearsal", daemon=True)
        self._stack = AsyncExitStack()
        self._stage: _Stage | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._wait(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._wait(self._stack.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)

    def play(
        self,
        rollout: Callable[..., Any],
        task: Any,
        answer: Answer,
        *,
        seed: int = 0,
        timeout_s: float | None = None,
    ) -> Played:
        """Play one episode; a rollout that raises or takes longer than `timeout_s` shows in `Played.error`.

        Raises:
            TypeError: the task has no task_id.
        """
        return self._wait(self._playing().play(rollout, task, answer, seed, timeout_s))

    def play_all(
        self,
        rollout: Callable[..., Any],
        parts: Sequence[tuple[Any, Answer, int]],
        *,
        parallel: int = 8,
        timeout_s: float | None = None,
    ) -> list[Played]:
        """Play many episodes, (task, answer, seed) each, `parallel` at once; results in their order."""
        stage = self._playing()

        async def all_of_them() -> list[Played]:
            gate = asyncio.Semaphore(parallel)

            async def one(task: Any, answer: Answer, seed: int) -> Played:
                async with gate:
                    return await stage.play(rollout, task, answer, seed, timeout_s)

            return await asyncio.gather(*(one(*part) for part in parts))

        return self._wait(all_of_them())

    def responds_within(self, seconds: float) -> bool:
        """Whether its event loop runs; an async rollout or an answer function that blocks stops it."""
        waiting = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        return bool(concurrent.futures.wait([waiting], seconds).done)

    def _playing(self) -> _Stage:
        if self._stage is None:
            raise RuntimeError("a Rehearsal plays inside its block: with Rehearsal() as stage: ...")
        return self._stage

    async def _open(self) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rehearsal-")))
        model = await asyncio.to_thread(chatml_model, folder / "model", context=CONTEXT_BYTES)
        self._stage = await self._stack.enter_async_context(_Stage(folder / "server", str(model)))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while not concurrent.futures.wait([future], 0.5).done:  # looks up now and then, so that Ctrl-C is heard
            pass
        return future.result()


class _Stage:
    """The server and its client, all in one event loop."""

    def __init__(self, data_dir: Path, model: str) -> None:
        self._answers: dict[str, Answer] = {}
        self._turns: dict[str, list[Turn]] = {}
        self._server = _Server(data_dir, model, script=self._say)
        self._client: AsyncSwarmClient | None = None

    async def __aenter__(self) -> Self:
        await self._server.open()
        await self._server.boot(
            **{
                "engine.context_length": CONTEXT_BYTES,
                "sampling.max_tokens": 4096,
                "checkpoint.every_steps": 0,
            }
        )
        self._client = AsyncSwarmClient(self._server.url)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.close()
        await self._server.close()

    async def play(
        self, rollout: Callable[..., Any], task: Any, answer: Answer, seed: int, timeout_s: float | None
    ) -> Played:
        assert self._client is not None
        task_id = task_id_of(task)
        episode = await self._client.claim(task_id, kind="evaluate", seed=seed)
        key = episode.episode_id
        self._answers[key], turns = answer, self._turns.setdefault(key, [])
        reward, metrics = None, {}
        try:
            outcome = await play(rollout, task, episode, timeout_s=timeout_s)
            if outcome is None:
                reward = (await episode.view()).reward
            else:
                reward, metrics = outcome.reward, outcome.metrics
                await episode.end(reward, metrics)
        except Exception as error:  # noqa: BLE001 - the outcome of an episode, whatever it is
            await episode.abort(f"{type(error).__name__}: {error}")
            return Played(task_id, seed, reward, metrics, turns, error)
        finally:
            del self._answers[key], self._turns[key]
        return Played(task_id, seed, reward, metrics, turns)

    def _say(self, messages: Messages, index: int) -> str:
        """The answer of the episode that is calling.

        Raises:
            GenerateFailed: its function raised.
        """
        key, limit = _CALLING.get()
        answer = self._answers.get(key)
        if answer is None:
            raise GenerateFailed("the episode is over")
        shown = [dict(message) for message in messages]
        try:
            said = answer(shown).encode()[:limit].decode(errors="ignore")
        except Exception as error:
            raise GenerateFailed(f"{type(error).__name__}: {error}") from error
        self._turns[key].append(Turn(shown, said))
        return said


class _Server(LocalServer):
    def _make_backend(self) -> ScriptedBackend:
        self.backends.append(_Backend(self._script))
        return self.backends[-1]


class _Backend(ScriptedBackend):
    """Lets the script know whose call it answers, and counts limits in bytes."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens * BYTES_PER_TOKEN)
        _CALLING.set((request.episode_id, sampling.max_tokens))
        async for chunk in super().generate(replace(request, sampling=sampling)):
            yield chunk
