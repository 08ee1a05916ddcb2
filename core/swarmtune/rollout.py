"""Running a user's rollout function against one claimed episode: what a task is called, threads, time limit, reward."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swarmtune.client import AsyncEpisode, Episode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


def task_id_of(task: Any) -> str:
    """A task's name: itself where it is a string, else its `task_id`.

    Raises:
        TypeError: it has none.
    """
    found = task if isinstance(task, str) else None
    if isinstance(task, Mapping):
        found = task.get("task_id")
    elif found is None:
        found = getattr(task, "task_id", None)
    if not isinstance(found, str) or not found:
        raise TypeError(f"a task is a string, or a mapping or object with a string task_id; got {task!r:.200}")
    return found


def episode_seed(seed: int, *parts: object) -> int:
    """A sampling seed that depends on nothing but the run's seed and the episode's place in the run."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) >> 1


async def play(
    rollout: Callable[..., Any], task: Any, episode: AsyncEpisode, *, timeout_s: float | None = None
) -> Outcome | None:
    """Call `rollout(task, episode)`; None when it ended the episode itself.

    Raises:
        TimeoutError: it took longer than `timeout_s`.
        TypeError: it returned something that is no reward.
        Exception: whatever it raised.
    """
    return _outcome(await call(rollout, task, episode, twin=Episode, timeout_s=timeout_s), episode)


Wait = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the client's event loop, from another thread, and waits for it."""


async def call(
    rollout: Callable[..., Any],
    task: Any,
    episode: T,
    *,
    twin: Callable[[T, Wait], Any],
    timeout_s: float | None = None,
) -> Any:
    """What `rollout(task, episode)` returns.

    A plain function runs in a daemon thread of its own with the episode's twin for plain code: one that never returns
    can be given up.

    Raises:
        TimeoutError: it took longer than `timeout_s`.
        Exception: whatever it raised.
    """
    if inspect.iscoroutinefunction(rollout) or inspect.iscoroutinefunction(getattr(type(rollout), "__call__", None)):  # noqa: B004
        running = rollout(task, episode)
    else:
        plain = twin(episode, _waiter(asyncio.get_running_loop()))
        running = _in_thread(lambda: rollout(task, plain))
    return await asyncio.wait_for(running, timeout_s)


def _outcome(returned: Any, episode: AsyncEpisode) -> Outcome | None:
    match returned:
        case None if episode.over:
            return None
        case (reward, Mapping() as metrics):
            return Outcome(reward, dict(metrics))
        case None:
            raise TypeError("the rollout returned None without ending its episode: return the reward")
        case _:
            return Outcome(returned)


def _waiter(loop: asyncio.AbstractEventLoop) -> Wait:
    return lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()


async def _in_thread(function: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        try:
            result, error = function(), None
        except StopIteration as stop:  # a future cannot carry it
            result, error = None, RuntimeError(f"the rollout raised {stop!r}")
        except BaseException as raised:  # noqa: BLE001 - carried over to whoever waits
            result, error = None, raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="swarm rollout", daemon=True).start()
    return await future
