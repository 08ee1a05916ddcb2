"""The loops over several servers: feed all of them with common episodes until each has done its steps; evaluate.

Episodes are planned in rounds, each enough for a batch of every server. A task is played as often as the server with
the most repeats wants it; one that wants fewer takes several groups of it, `t`, `t#2`, …, and plays the rest without
being trained. What always holds: a round is claimed only after every episode of the one before was taken or dropped,
and in order of its tasks, so which tasks meet which step follows from the seed; a server that is about to step, or
done, never keeps another one waiting for good; an episode that one server did not take is run again, and those that
have it play without being trained; nothing is claimed after the last step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

from swarmtune.client import AsyncSwarmClient
from swarmtune.config import TrainConfig
from swarmtune.errors import (
    AccessDenied,
    BadConfig,
    EndedInPart,
    NotStarted,
    ServerUnreachable,
    StartFailed,
    StepMismatch,
    TrainingFailed,
    TrainingFinished,
)
from swarmtune.evaluation import Evaluation, summarize
from swarmtune.feeder import StepWatch, order_of
from swarmtune.protocol import EndResult, EngineState, EpisodeKind, StepRecord
from swarmtune.rollout import call, episode_seed, task_id_of
from swarmtune.swarm import AsyncSwarm, AsyncSwarmEpisode, SwarmEpisode

if TYPE_CHECKING:
    from swarmtune.swarm import Reward

log = logging.getLogger(__name__)

_IDLE_S = 1.0
"""How long the feeder waits for a step before it asks the pools again why there is none."""
_AGREEMENT = frozenset({"all_clients_agree", "any_client_agrees"})
_COUNTS_TASKS = frozenset({"task_count", "nonzero_variance_task_count"})
_FATAL = (AccessDenied, BadConfig, ServerUnreachable, StartFailed)


@dataclass(slots=True)
class _Role:
    """What one server needs, and how far it is."""

    name: str
    client: AsyncSwarmClient
    config: TrainConfig
    watch: StepWatch
    goal: int
    agreed_step: int = 0

    @property
    def done(self) -> bool:
        return self.watch.step >= self.goal

    @property
    def tasks(self) -> int:
        """Tasks of each of its batches that are this client's."""
        return self.client.share or self.config.batch_tasks

    @property
    def agrees(self) -> bool:
        return self.config.batching.policy in _AGREEMENT


@dataclass(slots=True, eq=False)
class _Task:
    task: Any
    task_id: str
    visit: int
    """How often the run came to this task before."""
    before: _Task | None
    """Claimed first: its episodes must find their places before this task's do."""
    unclaimed: set[int]
    """Repeats that have not been claimed for the first time."""
    claimed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once all have been."""

    def note_claimed(self, repeat: int) -> None:
        self.unclaimed.discard(repeat)
        if not self.unclaimed:
            self.claimed.set()
            self.before = None  # or every task ever played would hang on the last one


@dataclass(slots=True, eq=False)
class _Slot:
    """One episode to run."""

    task: _Task
    repeat: int
    missing: set[str]
    """Roles whose server has not taken it yet."""
    attempt: int = 0


@dataclass(slots=True)
class _Round:
    """The plan in progress."""

    pending: deque[_Slot] = field(default_factory=deque)
    running: dict[asyncio.Task[None], _Slot] = field(default_factory=dict)
    claiming: set[_Slot] = field(default_factory=set)
    """Of those running: the ones that have no episode yet."""
    tasks: int = 0
    repeats: int = 0
    dropped: set[_Task] = field(default_factory=set)

    @property
    def over(self) -> bool:
        return not self.pending and not self.running


class RoleFailed(Exception):
    """The episode went well, but not every server has something to train from it."""

    def __init__(self, results: Mapping[str, EndResult | None]) -> None:
        super().__init__("; ".join(f"{role}: {_why_not(result)}" for role, result in results.items()))


class _NothingToTrain(Exception):
    """No server is left that would train the episode."""


class SwarmFeeder:
    def __init__(
        self,
        swarm: AsyncSwarm,
        tasks: Sequence[Any],
        rollout: Callable[..., Any],
        *,
        steps: int | Mapping[str, int],
        parallel: int,
        attempts: int,
        seed: int,
        episode_timeout_s: float | None,
        on_step: Callable[[str, StepRecord], None] | None,
    ) -> None:
        """See AsyncSwarm.train for the arguments."""
        if parallel < 1 or attempts < 1:
            raise ValueError("parallel and attempts: at least 1")
        self._swarm = swarm
        self._tasks = tasks
        self._ids = _ids_of(tasks)
        self._rollout = rollout
        self._goals = _goals(swarm, steps)
        self._parallel = parallel
        self._attempts = attempts
        self._seed = seed
        self._timeout_s = episode_timeout_s
        self._on_step = on_step
        self._order = order_of(len(tasks), seed)
        self._stepped = asyncio.Event()
        self._roles: dict[str, _Role] = {}
        self._round = _Round()
        self._round_ids: set[str] = set()
        self._excluded: set[str] = set()
        """Tasks of the last round, which this one does without."""
        self._last_task: _Task | None = None

    async def run(self) -> dict[str, list[StepRecord]]:
        """Feed until every goal is reached; cleans up whatever happens."""
        self._roles = await self._look()
        watchers = [asyncio.create_task(self._follow(role), name=f"steps of {role.name}") for role in self._active()]
        try:
            if self._active():
                self._plan_round()
            while self._active():
                self._launch()
                if self._round.over:
                    await self._between_rounds(watchers)
                else:
                    await self._wait(watchers)
        finally:
            for watcher in watchers:
                watcher.cancel()
            await self._abandon()
        return {name: role.watch.records for name, role in self._roles.items()}

    async def _look(self) -> dict[str, _Role]:
        """What each server runs and where it stands.

        Raises:
            ValueError: it will not do so many steps, or needs more tasks than there are.
            BadConfig: it waits for agreement, and the client has no name.
        """
        configs, statuses = await self._swarm.config(), await self._swarm.status()
        roles = {}
        for name, client in self._swarm.clients.items():
            goal = self._goals[name]
            role = roles[name] = _Role(name, client, configs[name], StepWatch(client, goal, self._stepped), goal)
            role.watch.step = statuses[name].step
            if client.name is not None:
                await client.register()
            _check(role, len(self._ids))
        return roles

    def _active(self) -> list[_Role]:
        return [role for role in self._roles.values() if not role.done]

    async def _follow(self, role: _Role) -> None:
        on_step = self._on_step

        def tell(record: StepRecord) -> None:
            reward = record.metrics.get("reward/mean")
            shown = "trained" if reward is None else f"reward/mean {reward:.3f}"
            log.info("%s: step %d/%d  %s", role.name, record.step, role.goal, shown)

        await role.watch.follow(tell, None if on_step is None else lambda record: on_step(role.name, record))

    # -- planning

    def _plan_round(self) -> None:
        """Tasks enough for a batch of every server that has steps to do."""
        active = self._active()
        repeats = max(role.config.repeats for role in active)
        tasks = max(-(-role.tasks // (repeats // role.config.repeats)) for role in active)
        self._round = _Round(tasks=tasks, repeats=repeats)
        # What a step left of the last round is still in the pool, and takes no more episodes before the next step.
        self._excluded = self._round_ids if len(self._round_ids) + tasks <= len(self._ids) else set()
        self._round_ids = set()
        self._last_task = None
        for _ in range(tasks):
            self._add_next_task()

    def _add_next_task(self) -> None:
        task = self._last_task = self._next_task()
        self._round.pending.extend(_Slot(task, r, self._trained_by(r)) for r in range(self._round.repeats))

    def _trained_by(self, repeat: int) -> set[str]:
        """The roles that train this repeat: each takes whole groups, and the rest goes untrained."""
        repeats = self._round.repeats
        return {r.name for r in self._active() if repeat < repeats // r.config.repeats * r.config.repeats}

    def _name_for(self, role: _Role, slot: _Slot) -> str:
        """What a role's server calls the task: a further group has a further name."""
        group = slot.repeat // role.config.repeats
        return f"{slot.task.task_id}#{group + 1}" if group else slot.task.task_id

    def _next_task(self) -> _Task:
        """The next one that the round does not have yet; once it has all, tasks come again."""
        if len(self._round_ids | self._excluded) >= len(self._ids):
            self._round_ids, self._excluded = set(), set()
        passed: list[tuple[int, int]] = []
        while self._ids[(drawn := next(self._order))[0]] in self._round_ids | self._excluded:
            passed.append(drawn)
        self._order = itertools.chain(passed, self._order)
        index, visit = drawn
        self._round_ids.add(self._ids[index])
        return _Task(
            self._tasks[index], self._ids[index], visit, self._last_task, unclaimed=set(range(self._round.repeats))
        )

    def _launch(self) -> None:
        """Start what is pending, as much as may run at once; what no server is left to train is dropped."""
        plan = self._round
        while plan.pending:
            # An episode that failed may be what the others' claims wait for: those do not count against it.
            occupied = len(plan.running) - (len(plan.claiming) if plan.pending[0].attempt else 0)
            if occupied >= self._parallel:
                return
            slot = plan.pending.popleft()
            if self._wants(slot):
                plan.claiming.add(slot)
                plan.running[asyncio.create_task(self._run_episode(slot), name=slot.task.task_id)] = slot
            else:
                slot.task.note_claimed(slot.repeat)

    def _wants(self, slot: _Slot) -> set[str]:
        """Roles that are still to train this episode."""
        return {name for name in slot.missing if not self._roles[name].done}

    # -- episodes

    async def _run_episode(self, slot: _Slot) -> None:
        """One attempt at one episode.

        Raises:
            Exception: whatever made it fail; `_settle` decides what follows.
        """
        episode, trained = await self._claim(slot)
        try:
            outcome = await call(self._rollout, slot.task.task, episode, twin=SwarmEpisode, timeout_s=self._timeout_s)
            await _end(episode, outcome)
        except BaseException as error:
            await episode.abort(f"{type(error).__name__}: {error}")
            raise
        finally:
            slot.missing -= {role for role in trained if _was_taken(episode.results.get(role))}
        if lacking := self._wants(slot) & trained:
            raise RoleFailed({role: episode.results.get(role) for role in sorted(lacking)})

    async def _claim(self, slot: _Slot) -> tuple[AsyncSwarmEpisode, set[str]]:
        """The episode, and the roles that train it.

        Raises:
            _NothingToTrain: every role that lacked it has done its last step meanwhile.
        """
        task = slot.task
        seed = episode_seed(self._seed, task.task_id, task.visit, slot.repeat, slot.attempt)
        names = {name: self._name_for(role, slot) for name, role in self._roles.items()}
        try:
            if task.before is not None and slot.attempt == 0:
                await task.before.claimed.wait()
            while trained := self._wants(slot):
                kinds: dict[str, EpisodeKind] = {n: "train" if n in trained else "evaluate" for n in self._roles}
                try:
                    return await self._swarm.claim(task.task_id, names=names, kind=kinds, seed=seed), trained
                except NotStarted:
                    await self._swarm.restart_if_lost()
                except TrainingFinished:
                    log.debug("a server has done its last step; its role plays on without being trained")
                await asyncio.sleep(_IDLE_S)
            raise _NothingToTrain
        finally:
            self._round.claiming.discard(slot)
            task.note_claimed(slot.repeat)

    def _settle(self, done: asyncio.Task[None]) -> None:
        """Book an attempt that is over: taken by all, to be tried again, or its task dropped."""
        slot = self._round.running.pop(done)
        error = done.exception()
        if error is None:
            return
        if isinstance(error, _NothingToTrain):
            return
        fatal = next((e for e in error.failed.values() if isinstance(e, _FATAL)), None) if _in_part(error) else None
        if isinstance(error, _FATAL) or fatal is not None or not isinstance(error, Exception):
            raise error
        slot.attempt += 1
        attempt, of = slot.attempt, self._attempts
        log.warning("episode of task %s failed, attempt %d of %d: %r", slot.task.task_id, attempt, of, error)
        if slot.task in self._round.dropped:
            return
        if attempt < of:
            self._round.pending.appendleft(slot)
        else:
            self._drop(slot.task, error)

    def _drop(self, task: _Task, error: Exception) -> None:
        """Give a task up and take another one for it.

        Raises:
            TrainingFailed: this round has dropped as many tasks as it has.
        """
        self._round.dropped.add(task)
        if len(self._round.dropped) >= max(3, self._round.tasks):
            raise TrainingFailed(
                f"{len(self._round.dropped)} tasks of one round had an episode that failed {self._attempts} times, "
                f"the last with {error!r}"
            ) from error
        log.warning("task %s is dropped for another one", task.task_id)
        self._round.pending = deque(slot for slot in self._round.pending if slot.task is not task)
        for repeat in list(task.unclaimed):
            task.note_claimed(repeat)
        self._add_next_task()

    async def _abandon(self) -> None:
        """Abort what still runs: nothing would train it."""
        for task in self._round.running:
            task.cancel()
        await asyncio.gather(*self._round.running, return_exceptions=True)
        self._round.running.clear()

    # -- waiting

    async def _wait(self, watchers: Sequence[asyncio.Task[None]]) -> None:
        """Until an episode is over or a step is done."""
        stepped = asyncio.create_task(self._stepped.wait())
        live = [watcher for watcher in watchers if not watcher.done()]
        try:
            done, _ = await asyncio.wait({*self._round.running, stepped, *live}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stepped.cancel()
        self._stepped.clear()
        _raise_from(watchers)
        for task in [task for task in self._round.running if task in done]:
            self._settle(task)

    async def _between_rounds(self, watchers: Sequence[asyncio.Task[None]]) -> None:
        """The round is over: plan the next one once a server is short of episodes and none is about to step."""
        looked = [(role, await self._look_at(role)) for role in self._active()]
        needs = {need for role, need in looked if not role.done}
        if "moving" not in needs and "short" in needs:
            self._plan_round()
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stepped.wait(), _IDLE_S)
        self._stepped.clear()
        _raise_from(watchers)

    async def _look_at(self, role: _Role) -> str:
        """`moving`: it will step, or has and we do not know yet; `short`: it needs more; `waits`: for other clients."""
        try:
            pool, status = await role.client.pool(), await role.client.status()
        except NotStarted:
            await role.client.restart_if_lost()
            return "moving"
        if pool.ready or status.state is not EngineState.ROLLING or status.step != role.watch.step:
            return "moving"
        if pool.step > role.goal:  # with batching.overlap its last step trains while it rolls
            return "moving"
        if role.agrees:
            await self._agree(role, pool.step)
            return "waits"
        return "waits" if pool.open_episodes else "short"

    async def _agree(self, role: _Role, step: int) -> None:
        if role.agreed_step == step:
            return
        try:
            await role.client.agree(step)
            role.agreed_step = step
        except StepMismatch:
            log.debug("%s: step %d is no longer being collected", role.name, step)


async def evaluate(
    swarm: AsyncSwarm,
    tasks: Sequence[Any],
    rollout: Callable[..., Any],
    *,
    k: int,
    sampling: Mapping[str, Any] | None,
    parallel: int,
    seed: int,
    success: float,
    episode_timeout_s: float | None,
) -> dict[str, Evaluation]:
    """See AsyncSwarm.evaluate."""
    if k < 1 or parallel < 1:
        raise ValueError("evaluate: at least one episode per task, and one at a time")
    ids = _ids_of(tasks)
    gate = asyncio.Semaphore(parallel)

    async def one(task: Any, task_id: str, repeat: int) -> dict[str, float]:
        async with gate:
            options: dict[str, Any] = {"kind": "evaluate", "sampling": sampling}
            seed_of_one = episode_seed(seed, "evaluate", task_id, repeat)
            async with swarm.episode(task_id, seed=seed_of_one, **options) as episode:
                outcome = await call(rollout, task, episode, twin=SwarmEpisode, timeout_s=episode_timeout_s)
                if outcome is None:
                    raise RuntimeError("an evaluated rollout returns its rewards instead of ending its episode")
                await _end(episode, outcome)
                rewards, _ = _split(outcome)
                return {role: reward for role, reward in rewards.items() if reward is not None}

    running = [[asyncio.create_task(one(t, i, r)) for r in range(k)] for t, i in zip(tasks, ids, strict=True)]
    everything = [episode for group in running for episode in group]
    try:
        results = await asyncio.gather(*everything, return_exceptions=True)
    finally:
        for episode in everything:
            episode.cancel()
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        if isinstance(error, _FATAL) or not isinstance(error, Exception):
            raise error
        log.warning("evaluation episode failed: %r", error)
    if len(errors) == len(results):
        last = errors[-1]
        raise RuntimeError(f"all {len(errors)} evaluation episodes failed, the last with {last!r}") from last
    done = {i: [e.result() for e in group if not e.exception()] for i, group in zip(ids, running, strict=True)}
    return {
        role: summarize(
            {task_id: [r[role] for r in rewards if role in r] for task_id, rewards in done.items()},
            k=k,
            success=success,
            failed=len(errors),
        )
        for role in swarm.roles
    }


async def _end(episode: AsyncSwarmEpisode, outcome: Mapping[str, Reward] | None) -> None:
    """End an episode with what its rollout returned.

    Raises:
        TypeError: that is neither rewards by role, nor None after the episode was ended.
    """
    if outcome is None and episode.over:
        return
    if not isinstance(outcome, Mapping):
        raise TypeError(
            f"the rollout returned {outcome!r:.200}: return a mapping of each role to its reward"
            + (", or end the episode" if outcome is None else "")
        )
    rewards, metrics = _split(outcome)
    await episode.end(rewards, metrics)


def _split(outcome: Mapping[str, Reward]) -> tuple[dict[str, float | None], dict[str, Mapping[str, float]]]:
    """(role → reward, role → metrics) of what a rollout returned."""
    rewards: dict[str, float | None] = {}
    metrics: dict[str, Mapping[str, float]] = {}
    for role, returned in outcome.items():
        if isinstance(returned, tuple):
            rewards[role], metrics[role] = returned
        else:
            rewards[role] = returned
    return rewards, metrics


def _was_taken(result: EndResult | None) -> bool:
    return result is not None and result.outcome == "admitted"


def _why_not(result: EndResult | None) -> str:
    return "was given up" if result is None else (result.message or str(result.code))


def _in_part(error: BaseException) -> TypeGuard[EndedInPart]:
    return isinstance(error, EndedInPart)


def _raise_from(watchers: Sequence[asyncio.Task[None]]) -> None:
    for watcher in watchers:
        if watcher.done():
            watcher.result()


def _ids_of(tasks: Sequence[Any]) -> list[str]:
    """Raises:
    ValueError: there are none, or two with one task_id.
    """
    ids = [task_id_of(task) for task in tasks]
    if not ids:
        raise ValueError("tasks: there are none")
    if len(set(ids)) != len(ids):
        raise ValueError("tasks: two have the same task_id, so their episodes would count as one task's")
    return ids


def _goals(swarm: AsyncSwarm, steps: int | Mapping[str, int]) -> dict[str, int]:
    """Role → the step it is to reach.

    Raises:
        ValueError: a role without a number of steps.
    """
    goals = dict.fromkeys(swarm.roles, steps) if isinstance(steps, int) else dict(steps)
    if set(goals) != set(swarm.roles):
        raise ValueError(f"steps: give one number, or one for each of {', '.join(swarm.roles)}")
    return goals


def _check(role: _Role, tasks: int) -> None:
    policy, limit = role.config.batching.policy, role.config.max_steps
    if role.agrees and role.client.name is None:
        raise BadConfig(f"{role.name}: batching.policy {policy}: this client needs a name to agree: pass name=")
    if policy in _COUNTS_TASKS and tasks < role.tasks:
        raise ValueError(
            f"tasks: {tasks} of them, but a step of {role.name} takes {role.tasks} different ones; "
            "give more tasks, or lower batch_tasks"
        )
    if limit is not None and limit < role.goal:
        raise ValueError(f"steps: {role.name} is to do {role.goal}, but its server stops after max_steps {limit}")
