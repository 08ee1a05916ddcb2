"""The training loop of a client: keeps one server fed with episodes until it has done so many steps.

For each step the feeder plans `batch_tasks` tasks (or its share) with `repeats` episodes each and runs them with
bounded parallelism; where steps overlap, the next one while the last one trains. What always holds: a failed episode is
run again, a task that keeps failing is replaced, so a batch is never left one episode short; what a step did not take
is finished for the next one; when the plan is done and the server still waits, the feeder asks the pool why, agrees
where the policy wants that, and plans more where tasks are missing; after the last step it claims nothing more. Order
of tasks and sampling seeds depend on nothing but the seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmtune.client import AsyncEpisode, AsyncSwarmClient
from swarmtune.config import BASELINE_METRIC
from swarmtune.errors import (
    AccessDenied,
    BadConfig,
    NotStarted,
    ServerUnreachable,
    StartFailed,
    StepMismatch,
    TrainingFailed,
    TrainingFinished,
)
from swarmtune.protocol import EndResult, EngineState, StepRecord
from swarmtune.rollout import episode_seed, play, task_id_of

log = logging.getLogger(__name__)

_IDLE_S = 1.0
"""How long the feeder waits for a step before it asks the pool again why there is none."""
_STEP_POLL_S = 15.0
_AGREEMENT = frozenset({"all_clients_agree", "any_client_agrees"})
_COUNTS_TASKS = frozenset({"task_count", "nonzero_variance_task_count"})
_FATAL = (AccessDenied, BadConfig, ServerUnreachable, StartFailed)


@dataclass(slots=True, eq=False)
class _Task:
    """One task of the plan, with the episodes it still needs."""

    task: Any
    task_id: str
    visit: int
    """How often the run came to this task before."""
    missing: int
    """Episodes not yet accepted by the server."""
    baseline: float | None = None
    """remax: the reward of the greedy answer; None until it was played."""
    playing_baseline: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class _Slot:
    """One episode to run."""

    task: _Task
    repeat: int
    attempt: int


class EpisodeRejected(Exception):
    """The server took the end of an episode but will not train it."""

    def __init__(self, result: EndResult) -> None:
        super().__init__(result.message or str(result.code))
        self.result = result


class Feeder:
    def __init__(
        self,
        client: AsyncSwarmClient,
        tasks: Sequence[Any],
        rollout: Callable[..., Any],
        *,
        steps: int,
        parallel: int,
        attempts: int,
        seed: int | None,
        episode_timeout_s: float | None,
        progress: bool | None,
        on_step: Callable[[StepRecord], None] | None,
    ) -> None:
        """See AsyncSwarmClient.train for the arguments."""
        if not tasks:
            raise ValueError("tasks: there are none")
        if parallel < 1 or attempts < 1:
            raise ValueError("parallel and attempts: at least 1")
        self._client = client
        self._ids = [task_id_of(task) for task in tasks]
        if len(set(self._ids)) != len(self._ids):
            raise ValueError("tasks: two have the same task_id, so their episodes would count as one task's")
        self._tasks = tasks
        self._rollout = rollout
        self._goal = steps
        self._parallel = parallel
        self._attempts = attempts
        self._seed = seed
        self._timeout_s = episode_timeout_s
        self._on_step = on_step
        self._show = progress
        self._pending: deque[_Slot] = deque()
        self._running: dict[asyncio.Task[None], _Slot] = {}
        self._unfinished: dict[_Task, None] = {}
        self._planned_step = 0
        self._overlap = False
        self._seen_collecting = 0
        """Of overlapping steps: the one that the server said it collects."""
        self._planned_ids: set[str] = set()
        self._deferred: list[tuple[int, int]] = []
        """Drawn too early: (index, visit)."""
        self._agreed_step = 0
        self._dropped = 0
        self._stepped = asyncio.Event()
        self._steps = StepWatch(client, steps, self._stepped)
        self._finished: TrainingFinished | None = None

    async def run(self) -> list[StepRecord]:
        """Feed until the goal is reached; cleans up whatever happens."""
        config = await self._client.config()
        self._wants_baselines = config.algorithm.advantage == "remax"
        if self._client.name is not None:
            await self._client.register()
        elif config.batching.policy in _AGREEMENT:
            raise BadConfig(f"batching.policy {config.batching.policy}: this client needs a name to agree: pass name=")
        self._tasks_per_step = self._client.share or config.batch_tasks
        self._repeats = config.repeats
        self._policy = config.batching.policy
        self._overlap = config.batching.overlap
        if self._policy in _COUNTS_TASKS and len(self._ids) < self._tasks_per_step:
            raise ValueError(
                f"tasks: {len(self._ids)} of them, but a step takes {self._tasks_per_step} different ones; "
                "give more tasks, or lower batch_tasks"
            )
        self._order = order_of(len(self._tasks), config.seed if self._seed is None else self._seed)
        self._seed = config.seed if self._seed is None else self._seed
        self._steps.step = (await self._client.status()).step
        self._pass_over(self._step)
        bar = _ProgressBar(self._goal, self._tasks_per_step * self._repeats, self._show)
        watcher = asyncio.create_task(self._steps.follow(bar.step, self._on_step), name="steps of the swarm server")
        try:
            with bar:
                while self._step < self._goal:
                    if self._finished is None:
                        self._plan_step()
                        self._launch(bar)
                    if self._running:
                        await self._wait(watcher)
                    elif self._finished is None:
                        await self._ask_why(watcher)
                    elif await self._may_step_yet():
                        await self._wait_step(watcher)
                    else:
                        raise self._finished
        finally:
            watcher.cancel()
            await self._abandon()
        return self._steps.records

    @property
    def _step(self) -> int:
        return self._steps.step

    @property
    def _collecting(self) -> int:
        """The step that episodes claimed now are for."""
        return max(self._step + 1, self._seen_collecting)

    async def _may_step_yet(self) -> bool:
        """Whether a server that grants no more episodes has a step that is not counted here, or will be soon."""
        status = await self._client.status()
        return self._step < status.step or status.training_step is not None

    # -- planning

    def _plan_step(self) -> None:
        """Once per step: what the last one left unfinished, filled up with new tasks."""
        if self._steps.went_back:
            self._steps.went_back = False
            self._planned_step, self._seen_collecting = self._step, 0
        collecting = self._collecting
        if self._planned_step < collecting <= self._goal:
            self._planned_step = collecting
            self._dropped = 0
            self._planned_ids = {task.task_id for task in self._unfinished}
            self._add_tasks(self._tasks_per_step - len(self._unfinished))

    def _pass_over(self, steps: int) -> None:
        """Draw what so many steps took when nothing failed: a training that goes on goes on in the order of tasks."""
        for _ in range(steps):
            self._planned_ids.clear()
            for _ in range(self._tasks_per_step):
                self._planned_ids.add(self._ids[self._next_task()[0]])
        self._planned_ids.clear()

    def _add_tasks(self, count: int) -> None:
        for _ in range(count):
            index, visit = self._next_task()
            task = _Task(self._tasks[index], self._ids[index], visit, self._repeats)
            self._planned_ids.add(task.task_id)
            self._unfinished[task] = None
            self._pending.extend(_Slot(task, repeat, 0) for repeat in range(self._repeats))

    def _next_task(self) -> tuple[int, int]:
        """The next task of the order that the step does not have yet; one it has waits for the next step.

        Two visits of a task may be close where one round through the tasks ends and the next begins. In one step they
        would count as one task. Once a step has every task, tasks come again.
        """
        if len(self._planned_ids) >= len(self._ids):
            self._planned_ids.clear()
        for at, (index, _) in enumerate(self._deferred):
            if self._ids[index] not in self._planned_ids:
                return self._deferred.pop(at)
        while self._ids[(drawn := next(self._order))[0]] in self._planned_ids:
            self._deferred.append(drawn)
        return drawn

    def _launch(self, bar: _ProgressBar) -> None:
        while self._pending and len(self._running) < self._parallel:
            slot = self._pending.popleft()
            self._running[asyncio.create_task(self._run_episode(slot, bar), name=slot.task.task_id)] = slot

    # -- episodes

    async def _run_episode(self, slot: _Slot, bar: _ProgressBar) -> None:
        """One attempt at one episode.

        Raises:
            Exception: whatever made it fail; `_settle` decides what follows.
        """
        assert self._seed is not None
        task = slot.task
        seed = episode_seed(self._seed, task.task_id, task.visit, slot.repeat, slot.attempt)
        baseline = await self._baseline(task) if self._wants_baselines else None
        episode = await self._claim(task.task_id, seed)
        if baseline is not None:
            episode.metrics[BASELINE_METRIC] = baseline
        try:
            outcome = await play(self._rollout, task.task, episode, timeout_s=self._timeout_s)
            if outcome is not None:
                await episode.end(outcome.reward, outcome.metrics)
        except BaseException as error:
            await episode.abort(f"{type(error).__name__}: {error}")
            raise
        if episode.result is None or episode.result.outcome == "rejected":
            raise EpisodeRejected(episode.result) if episode.result else RuntimeError("the rollout aborted its episode")
        bar.episode(outcome.reward if outcome else None)

    async def _baseline(self, task: _Task) -> float:
        """The reward of the task's greedy answer, played once per visit as an evaluation episode.

        Raises:
            Exception: whatever made it fail; it is played again for the next attempt.
        """
        async with task.playing_baseline:
            if task.baseline is None:
                task.baseline = await self._play_greedily(task)
            return task.baseline

    async def _play_greedily(self, task: _Task) -> float:
        async with self._client.episode(task.task_id, kind="evaluate", sampling={"temperature": 0.0}) as episode:
            outcome = await play(self._rollout, task.task, episode, timeout_s=self._timeout_s)
            if outcome is not None:
                await episode.end(outcome.reward, outcome.metrics)
        if episode.reward is None:
            raise RuntimeError("the rollout aborted the greedy episode whose reward is the task's baseline")
        return float(episode.reward)

    async def _claim(self, task_id: str, seed: int) -> AsyncEpisode:
        while True:
            try:
                return await self._client.claim(task_id, seed=seed)
            except NotStarted:
                await self._client.restart_if_lost()
                await asyncio.sleep(_IDLE_S)

    def _settle(self, done: asyncio.Task[None]) -> None:
        """Book an attempt that is over: accepted, to be tried again, or its task dropped."""
        slot = self._running.pop(done)
        error = done.exception()
        if error is None:
            slot.task.missing -= 1
            if slot.task.missing == 0:
                self._unfinished.pop(slot.task, None)
            return
        if isinstance(error, TrainingFinished):
            self._finished = error
            self._pending.clear()
            return
        if isinstance(error, _FATAL) or not isinstance(error, Exception):
            raise error
        attempt = slot.attempt + 1
        log.warning(
            "episode of task %s failed, attempt %d of %d: %r", slot.task.task_id, attempt, self._attempts, error
        )
        if slot.task not in self._unfinished:
            return
        if attempt < self._attempts:
            self._pending.appendleft(_Slot(slot.task, slot.repeat, attempt))
        else:
            self._drop(slot.task, error)

    def _drop(self, task: _Task, error: Exception) -> None:
        """Give a task up and take another one for it.

        Raises:
            TrainingFailed: this step has dropped a whole batch of tasks.
        """
        self._dropped += 1
        if self._dropped >= max(3, self._tasks_per_step):
            raise TrainingFailed(
                f"{self._dropped} tasks of one step had an episode that failed {self._attempts} times, "
                f"the last with {error!r}"
            ) from error
        log.warning("task %s is dropped for another one", task.task_id)
        del self._unfinished[task]
        self._pending = deque(slot for slot in self._pending if slot.task is not task)
        self._add_tasks(1)

    async def _abandon(self) -> None:
        """Abort what still runs: nothing would train it."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()

    # -- waiting

    async def _wait(self, watcher: asyncio.Task[None]) -> None:
        """Until an episode is over or a step is done."""
        stepped = asyncio.create_task(self._stepped.wait())
        try:
            done, _ = await asyncio.wait({*self._running, stepped, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stepped.cancel()
        self._stepped.clear()
        if watcher in done:
            watcher.result()
        for task in [task for task in self._running if task in done]:
            self._settle(task)

    async def _ask_why(self, watcher: asyncio.Task[None]) -> None:
        """The plan is done: agree where that is asked for, plan more where tasks are missing, and wait a little."""
        collecting = self._collecting
        if self._policy in _AGREEMENT:
            await self._agree(collecting)
        if self._overlap and await self._is_taken(collecting):
            return
        if self._policy not in _AGREEMENT:
            missing = await self._missing_tasks(collecting)
            if missing:
                self._add_tasks(missing)
                return
        await self._wait_step(watcher)

    async def _is_taken(self, step: int) -> bool:
        """Whether the batch of `step` was taken, so that the next one is collected while it trains; waits a little."""
        if step > self._goal:
            return False
        pool = await self._client.pool(after=step, wait_s=_IDLE_S if self._planned_step == step else 0.0)
        self._seen_collecting = max(self._seen_collecting, pool.step)
        return pool.step > step

    async def _wait_step(self, watcher: asyncio.Task[None]) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stepped.wait(), _IDLE_S)
        self._stepped.clear()
        if watcher.done():
            watcher.result()

    async def _missing_tasks(self, step: int) -> int:
        """How many tasks nobody is running that the batch of `step` needs; 0 while anything moves."""
        pool = await self._client.pool()
        if pool.step != step or pool.ready or pool.open_episodes:
            return 0
        status = await self._client.status()
        training = self._overlap and status.training_step is not None
        if status.state is not EngineState.ROLLING or status.step + 1 + training != step or step > self._goal:
            return 0
        log.info("the batch is short: %s", pool.explanation)
        have = pool.tasks_with_variance if self._policy == "nonzero_variance_task_count" else pool.tasks_complete
        return max(1, self._tasks_per_step - have)

    async def _agree(self, step: int) -> None:
        if self._agreed_step == step:
            return
        try:
            await self._client.agree(step)
            self._agreed_step = step
        except StepMismatch:
            log.debug("step %d is no longer being collected", step)


class StepWatch:
    """A server's step up to a goal, as its client knows it."""

    def __init__(self, client: AsyncSwarmClient, goal: int, stepped: asyncio.Event) -> None:
        """`stepped` is set at every change."""
        self._client = client
        self._goal = goal
        self._stepped = stepped
        self.step = 0
        self.records: list[StepRecord] = []
        """Of the steps done since it follows."""
        self.went_back = False
        """The step is an earlier one than it was; whoever plans by it unsets this."""

    async def follow(
        self, tell: Callable[[StepRecord], None], on_step: Callable[[StepRecord], None] | None = None
    ) -> None:
        """Until the goal is reached; also back to an earlier step after an engine was recovered from a checkpoint.

        `tell` is called on the loop, `on_step` in a thread, before the step counts.
        """
        while self.step < self._goal:
            try:
                records = await self._client.wait_step(self.step, timeout_s=_STEP_POLL_S)
            except NotStarted:
                await self._client.restart_if_lost()
                continue
            except TimeoutError:
                status = await self._client.status()
                # While it boots, a recovered server trains again what it had trained after its checkpoint.
                if status.state is EngineState.ROLLING and status.step < self.step:
                    log.warning("the server went back from step %d to step %d", self.step, status.step)
                    self.step, self.went_back = status.step, True
                    self._stepped.set()
                continue
            for record in records[: self._goal - self.step]:
                self.records.append(record)
                tell(record)
                if on_step is not None:
                    # In a thread, so that it may use a SwarmClient, whose calls wait for this very loop.
                    await asyncio.to_thread(on_step, record)
                # Last: whoever waits for the goal ends this watch once the step counts.
                self.step = record.step
            self._stepped.set()


def order_of(count: int, seed: int) -> Iterator[tuple[int, int]]:
    """Endless (index, visit): all tasks once in random order, then again in another one."""
    visit = 0
    while True:
        indices = list(range(count))
        random.Random(f"{seed}/{visit}").shuffle(indices)
        yield from ((index, visit) for index in indices)
        visit += 1


class _ProgressBar:
    """Episodes of the step, and the reward of the steps done, on standard error. Off a terminal: a line a step."""

    def __init__(self, steps: int, episodes: int, show: bool | None) -> None:
        self._steps = steps
        self._episodes = episodes
        self._show = show
        self._rewards: list[float] = []
        self._began = time.monotonic()
        self._display: Any = None

    def __enter__(self) -> _ProgressBar:
        show = sys.stderr.isatty() if self._show is None else self._show
        if not show:
            return self
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._display = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("episodes"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._display.start()
        self._bar = self._display.add_task("step 1", total=self._episodes)
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.stop()

    def episode(self, reward: float | None) -> None:
        if reward is not None:
            self._rewards.append(float(reward))
        if self._display is not None:
            mean = sum(self._rewards) / len(self._rewards) if self._rewards else 0.0
            self._display.update(self._bar, advance=1, description=f"reward so far {mean:.3f}")

    def step(self, record: StepRecord) -> None:
        reward = record.metrics.get("reward/mean")
        shown = f"reward/mean {reward:.3f}" if reward is not None else "trained"
        line = f"step {record.step:>3}/{self._steps}  {shown}  {time.monotonic() - self._began:.1f} s"
        self._began = time.monotonic()
        self._rewards.clear()
        if self._display is not None:
            self._display.console.print(line)
            self._display.reset(self._bar, description=f"step {record.step + 1}")
        else:
            log.info("%s", line)
