"""Several swarm servers from one client: one episode on all of them, each with its own model and its own reward.

    swarm = Swarm({"white": SwarmClient(url_1), "black": SwarmClient(url_2)})
    swarm.start({"white": config_1, "black": config_2})
    with swarm.episode(task_id="opening-7") as ep:
        llm = openai.OpenAI(base_url=ep["white"].base_url, api_key=ep["white"].api_key)
        ...
        ep.end({"white": 1.0, "black": 0.0})

AsyncSwarm does the work; Swarm runs one on a background event loop. What always holds: an episode is open on all
servers or on none; no claim holds one server's place for longer than a bound while it waits for another's, so clients
that claim in different orders never block each other for good; each role's reward is given once or not at all,
through lost answers and restarts, and an end that did not reach every server says which. Light: httpx and pydantic.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from swarmtune.client import (
    AsyncEpisode,
    AsyncSwarmClient,
    Episode,
    SwarmClient,
    _BackgroundLoop,
    _warn_not_ended,
)
from swarmtune.config import TrainConfig
from swarmtune.errors import BadReward, EndedInPart, NotRolling, SwarmError
from swarmtune.protocol import Code, EndResult, EpisodeKind, PoolView, ServerStatus, StepRecord

if TYPE_CHECKING:
    from swarmtune.evaluation import Evaluation

T = TypeVar("T")
log = logging.getLogger(__name__)

HOLD_S = 5.0
"""How long a claim keeps the places it has while another server has none; then it gives them back and begins anew."""
_ANSWER_S = 3.0
"""How much longer an answer to a claim may take than the time the server was asked to wait."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_GOODBYE_S = 5.0

Reward = float | tuple[float, Mapping[str, float]] | None
"""A role's reward, with metrics or without; None gives the role's episode up, so that it trains nothing."""


class AsyncSwarmEpisode:
    """One agent run on several servers. `episode["role"]` is that role's AsyncEpisode: base_url, api_key, …"""

    def __init__(self, task_id: str, episodes: Mapping[str, AsyncEpisode]) -> None:
        self.task_id = task_id
        self._episodes = dict(episodes)
        self.results: dict[str, EndResult | None] = {}
        """Role → what its server made of the end; None where it was aborted; without the roles still open."""

    def __getitem__(self, role: str) -> AsyncEpisode:
        try:
            return self._episodes[role]
        except KeyError:
            raise KeyError(f"no role {role!r}; this swarm has {', '.join(self._episodes)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._episodes)

    def __len__(self) -> int:
        return len(self._episodes)

    @property
    def roles(self) -> list[str]:
        return list(self._episodes)

    @property
    def over(self) -> bool:
        """Whether every role was ended or aborted from here."""
        return all(episode.over for episode in self._episodes.values())

    async def end(
        self, rewards: Mapping[str, float | None], metrics: Mapping[str, Mapping[str, float]] | None = None
    ) -> dict[str, EndResult | None]:
        """Report each role's reward to its server; None aborts the role's episode. Repeating it is safe.

        All servers are told at once, and each one that is away is tried until the client's patience ends.

        Raises:
            ValueError: a role without an entry, or an entry or metrics without a role; nothing was sent.
            BadReward: a reward is no finite number; nothing was sent.
            EndedInPart: some server did not take its reward; `outcomes` has what became of each role.
        """
        self._check(rewards, metrics or {})
        ends = {
            role: self._end_one(role, rewards[role], (metrics or {}).get(role))
            for role in self._episodes
            if role not in self.results
        }
        failed = {role: error for role, error in zip(ends, await _all(ends.values()), strict=True) if error}
        if failed:
            known = self.results | failed
            raise EndedInPart(self.task_id, {role: known[role] for role in self._episodes})
        return {role: self.results[role] for role in self._episodes}

    async def abort(self, reason: str = "") -> None:
        """Give up every role that is still open; nothing of it is trained. Idempotent."""
        await _all(episode.abort(reason) for episode in self._episodes.values())

    def _check(self, rewards: Mapping[str, float | None], metrics: Mapping[str, Mapping[str, float]]) -> None:
        wrong = sorted(set(rewards) ^ set(self._episodes)) or sorted(set(metrics) - set(self._episodes))
        if wrong:
            raise ValueError(
                f"end: {', '.join(map(repr, wrong))} has no reward or is no role; give each of "
                f"{', '.join(self._episodes)} its own, or None to give the role up"
            )
        for role, reward in rewards.items():
            bad = isinstance(reward, bool) or not isinstance(reward, int | float | None)
            if bad or (reward is not None and not math.isfinite(reward)):
                raise BadReward(f"the reward of {role!r} is {reward!r}; give a finite number", code=Code.BAD_REWARD)

    async def _end_one(self, role: str, reward: float | None, metrics: Mapping[str, float] | None) -> SwarmError | None:
        """Why the role's server did not take its reward; None once `results` has the answer."""
        episode = self._episodes[role]
        if reward is None:
            await episode.abort("the role was given up")
            self.results[role] = None
            return None
        try:
            self.results[role] = episode.result or await episode.end(reward, metrics)
        except SwarmError as error:
            return error
        return None


class AsyncSwarm:
    """Several servers, one per role. Belongs to the event loop it is first used in; owns its clients."""

    def __init__(self, clients: Mapping[str, AsyncSwarmClient] | Sequence[AsyncSwarmClient]) -> None:
        """Nothing is sent yet. Clients in a sequence get the roles "0", "1", …

        Raises:
            ValueError: no client, or two for one server.
        """
        self.clients = _by_role(clients)
        self._order = sorted(self.clients, key=lambda role: self.clients[role].url)
        """In which servers are claimed from: the same for every client that knows them by the same addresses."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every client. The servers go on."""
        await _all(client.close() for client in self.clients.values())

    @property
    def roles(self) -> list[str]:
        return list(self.clients)

    def __getitem__(self, role: str) -> AsyncSwarmClient:
        """The client of a role."""
        return self.clients[role]

    # -- the servers

    async def start(self, config: TrainConfig | Mapping[str, Any]) -> dict[str, ServerStatus]:
        """Start every server with one configuration, or each with its own (role → configuration), and wait for all.

        Raises:
            BadConfig, ConfigConflict, StartFailed: of the first role that could not be started; the others may run.
        """
        configs = self._for_roles(config)
        return await self._each(lambda role, client: client.start(configs[role]))

    async def restart_if_lost(self) -> None:
        """Start again what was started here, wherever a server process is a new one without a model."""
        await self._each(lambda _, client: client.restart_if_lost())

    async def status(self) -> dict[str, ServerStatus]:
        return await self._each(lambda _, client: client.status())

    async def config(self) -> dict[str, TrainConfig]:
        """What runs on each server, as resolved."""
        return await self._each(lambda _, client: client.config())

    async def pool(self) -> dict[str, PoolView]:
        """What the next step of each server waits for."""
        return await self._each(lambda _, client: client.pool())

    async def steps(self, after: int = 0) -> dict[str, list[StepRecord]]:
        return await self._each(lambda _, client: client.steps(after))

    async def stop(self) -> dict[str, ServerStatus]:
        """Stop every training; each server saves a checkpoint."""
        return await self._each(lambda _, client: client.stop())

    def _for_roles(self, config: TrainConfig | Mapping[str, Any]) -> Mapping[str, TrainConfig | Mapping[str, Any]]:
        if isinstance(config, Mapping) and set(config) == set(self.clients):
            return config
        if isinstance(config, Mapping) and any(isinstance(v, TrainConfig) for v in config.values()):
            raise ValueError(f"start: give one configuration, or one for each of {', '.join(self.clients)}")
        return dict.fromkeys(self.clients, config)

    async def _each(self, ask: Callable[[str, AsyncSwarmClient], Coroutine[Any, Any, T]]) -> dict[str, T]:
        """Ask every server at once; raises the first error once all have answered, its role in `details["role"]`."""

        async def one(role: str, client: AsyncSwarmClient) -> T:
            try:
                return await ask(role, client)
            except SwarmError as error:
                error.details["role"] = role
                error.add_note(f"from the server of {role!r}, {client.url}")
                raise

        answers = await _all(one(role, client) for role, client in self.clients.items())
        return dict(zip(self.clients, answers, strict=True))

    # -- episodes

    async def claim(
        self,
        task_id: str,
        *,
        names: Mapping[str, str] | None = None,
        kind: EpisodeKind | Mapping[str, EpisodeKind] = "train",
        sampling: Mapping[str, Any] | None = None,
        seed: int | None = None,
        lease_s: float | None = None,
        wait_s: float | None = None,
    ) -> AsyncSwarmEpisode:
        """Claim an episode on every server, or on none, waiting while one of them has no place.

        Args:
            names: role → what its server calls the task; `task_id` where nothing else is given.
            kind: of every role, or role → kind: a role that plays "evaluate" takes part without being trained.
            sampling: overrides of each configuration's `sampling`, for every role or role → overrides.
            seed: makes the sampling repeatable; each role gets its own seed from it.
            wait_s: how long to wait at most; None waits as long as the servers ask to.

        Raises:
            NotRolling: not within `wait_s`; `code` and the message say why.
            NotStarted, TrainingFinished, StartFailed, ServerUnreachable: of the role in `details["role"]`.
        """
        kinds = {role: kind if isinstance(kind, str) else kind[role] for role in self.clients}
        options = {
            role: {"kind": kinds[role], "sampling": self._sampling(sampling, role), "seed": role_seed(seed, role)}
            for role in self.clients
        }
        deadline = None if wait_s is None else time.monotonic() + wait_s
        order = self._order
        for pause_s in _pauses():
            held: dict[str, AsyncEpisode] = {}
            role = order[0]
            try:
                for role in order:
                    bound_s = _bound(HOLD_S if held else None, deadline)
                    name = (names or {}).get(role, task_id)
                    held[role] = await self._claim_one(role, name, bound_s, lease_s=lease_s, **options[role])
            except BaseException as error:
                await _all(episode.abort("another server had no place") for episode in held.values())
                error.add_note(f"while claiming task {task_id!r} as {role!r}")
                if isinstance(error, SwarmError):
                    error.details["role"] = role
                # Only holding a place makes waiting dangerous: with none, the server's refusal is the answer.
                if not isinstance(error, NotRolling) or not held or _is_past(deadline):
                    raise
                log.debug("task %s: %s has no place: %s", task_id, role, error)
                order = [role, *(other for other in self._order if other != role)]
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                continue
            return AsyncSwarmEpisode(task_id, {role: held[role] for role in self.clients})
        raise AssertionError("unreachable")

    async def _claim_one(self, role: str, task_id: str, bound_s: float | None, **options: Any) -> AsyncEpisode:
        """One role's claim, within `bound_s` also where the server does not answer at all.

        Raises:
            NotRolling: no place within the bound, or no answer.
        """
        client = self.clients[role]
        if bound_s is None:
            return await client.claim(task_id, **options)
        try:
            async with asyncio.timeout(bound_s + _ANSWER_S):
                return await client.claim(task_id, wait_s=bound_s, **options)
        except TimeoutError:
            raise NotRolling(
                f"{client.url} did not answer a claim within {bound_s + _ANSWER_S:.0f} s", code=Code.NOT_ROLLING
            ) from None

    def _sampling(self, sampling: Mapping[str, Any] | None, role: str) -> Mapping[str, Any] | None:
        if sampling and set(sampling) <= set(self.clients):
            return sampling.get(role)
        return sampling

    @contextlib.asynccontextmanager
    async def episode(self, task_id: str, **options: Any) -> AsyncIterator[AsyncSwarmEpisode]:
        """Claim an episode for a block; takes the options of `claim`. Leaving it without `end` aborts every role."""
        episode = await self.claim(task_id, **options)
        try:
            yield episode
        except BaseException as error:
            await episode.abort(f"{type(error).__name__}: {error}")
            raise
        if not episode.over:
            open_roles = [role for role in episode if not episode[role].over]
            await episode.abort("left without end")
            for role in open_roles:
                _warn_not_ended(episode[role])

    # -- loops

    async def train(
        self,
        tasks: Sequence[Any],
        rollout: Callable[..., Any],
        *,
        steps: int | Mapping[str, int],
        parallel: int = 32,
        attempts: int = 4,
        seed: int = 0,
        episode_timeout_s: float | None = None,
        on_step: Callable[[str, StepRecord], None] | None = None,
    ) -> dict[str, list[StepRecord]]:
        """Run episodes until every server has done its `steps` in all; returns the records of those done meanwhile.

        Servers may differ in batch size, repeats and number of steps. One that has done its steps goes on playing, in
        episodes of kind "evaluate", until the others have done theirs. Order of tasks and seeds follow from `seed`.

        Args:
            tasks: a task is a string, or a mapping or object with `task_id`.
            rollout: `rollout(task, episode)` runs the agents and returns role → reward, or role → (reward, metrics), or
                None when it ended the episode itself. A plain function runs in a thread of its own, `async def` on
                this loop. A role whose reward is None is given up in this episode, which then counts as failed for it.
            steps: of every server, or role → steps.
            parallel: episodes run at once at most.
            attempts: how often one episode is tried before its task is dropped for another one.
            episode_timeout_s: an episode that takes longer is aborted and counts as failed.
            on_step: called in a thread with role and record of each step done.

        Raises:
            TrainingFailed: in one round as many tasks as it has, and at least 3, had to be dropped.
            EndedInPart: a server stayed away for longer than the client's patience while it was owed a reward.
            ValueError: fewer tasks than a step takes, two with one task_id, or more steps than a server will do.
            StartFailed, ServerUnreachable, TrainingFinished, AccessDenied
        """
        from swarmtune.swarm_feeder import SwarmFeeder

        feeder = SwarmFeeder(
            self,
            tasks,
            rollout,
            steps=steps,
            parallel=parallel,
            attempts=attempts,
            seed=seed,
            episode_timeout_s=episode_timeout_s,
            on_step=on_step,
        )
        return await feeder.run()

    async def evaluate(
        self,
        tasks: Sequence[Any],
        rollout: Callable[..., Any],
        *,
        k: int = 1,
        sampling: Mapping[str, Any] | None = None,
        parallel: int = 32,
        seed: int = 0,
        success: float = 1.0,
        episode_timeout_s: float | None = None,
    ) -> dict[str, Evaluation]:
        """Run `k` evaluation episodes per task on all servers; they never enter a pool. `rollout` as in `train`.

        Args:
            sampling: overrides for these episodes, for every role or role → overrides.
            success: the reward from which an episode counts as solved, for pass@k.

        Raises:
            RuntimeError: every episode failed; the last error is chained.
        """
        from swarmtune.swarm_feeder import evaluate

        return await evaluate(
            self,
            tasks,
            rollout,
            k=k,
            sampling=sampling,
            parallel=parallel,
            seed=seed,
            success=success,
            episode_timeout_s=episode_timeout_s,
        )


class SwarmEpisode:
    """The twin of AsyncSwarmEpisode for plain code."""

    def __init__(self, episode: AsyncSwarmEpisode, wait: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._episode = episode
        self._wait = wait
        self._twins = {role: Episode(episode[role], wait) for role in episode}

    @property
    def task_id(self) -> str:
        return self._episode.task_id

    def __getitem__(self, role: str) -> Episode:
        self._episode[role]  # a role that is not there is named with those that are
        return self._twins[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._twins)

    def __len__(self) -> int:
        return len(self._twins)

    @property
    def roles(self) -> list[str]:
        return list(self._twins)

    @property
    def over(self) -> bool:
        """Whether every role was ended or aborted from here."""
        return self._episode.over

    @property
    def results(self) -> dict[str, EndResult | None]:
        """See AsyncSwarmEpisode.results."""
        return self._episode.results

    def end(
        self, rewards: Mapping[str, float | None], metrics: Mapping[str, Mapping[str, float]] | None = None
    ) -> dict[str, EndResult | None]:
        """See AsyncSwarmEpisode.end."""
        return self._wait(self._episode.end(rewards, metrics))

    def abort(self, reason: str = "") -> None:
        """See AsyncSwarmEpisode.abort."""
        self._wait(self._episode.abort(reason))


class Swarm:
    """Several servers for plain code. May be used from several threads.

    Takes the arguments of AsyncSwarm, with SwarmClients, and has its methods, without `await`.
    """

    def __init__(self, clients: Mapping[str, SwarmClient] | Sequence[SwarmClient]) -> None:
        self.clients = _by_role(clients)
        # Twins, since all of them must live on one event loop and each SwarmClient has its own.
        self._swarm = AsyncSwarm({role: client.async_twin() for role, client in self.clients.items()})
        self._loop = _BackgroundLoop()

    @property
    def roles(self) -> list[str]:
        return self._swarm.roles

    def __getitem__(self, role: str) -> SwarmClient:
        """The client of a role."""
        return self.clients[role]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every client. The servers go on."""
        self._loop.wait(self._swarm.close())
        self._loop.stop()
        for client in self.clients.values():
            client.close()

    def start(self, config: TrainConfig | Mapping[str, Any]) -> dict[str, ServerStatus]:
        """See AsyncSwarm.start."""
        return self._loop.wait(self._swarm.start(config))

    def status(self) -> dict[str, ServerStatus]:
        return self._loop.wait(self._swarm.status())

    def config(self) -> dict[str, TrainConfig]:
        """What runs on each server, as resolved."""
        return self._loop.wait(self._swarm.config())

    def pool(self) -> dict[str, PoolView]:
        """What the next step of each server waits for."""
        return self._loop.wait(self._swarm.pool())

    def steps(self, after: int = 0) -> dict[str, list[StepRecord]]:
        return self._loop.wait(self._swarm.steps(after))

    def stop(self) -> dict[str, ServerStatus]:
        """Stop every training; each server saves a checkpoint."""
        return self._loop.wait(self._swarm.stop())

    def claim(self, task_id: str, **options: Any) -> SwarmEpisode:
        """See AsyncSwarm.claim, whose options it takes."""
        return SwarmEpisode(self._loop.wait(self._swarm.claim(task_id, **options)), self._loop.wait)

    @contextlib.contextmanager
    def episode(self, task_id: str, **options: Any) -> Iterator[SwarmEpisode]:
        """Claim an episode for a block; takes the options of `claim`. Leaving it without `end` aborts every role."""
        episode = self.claim(task_id, **options)
        try:
            yield episode
        except BaseException as error:
            episode.abort(f"{type(error).__name__}: {error}")
            raise
        if not episode.over:
            open_roles = [role for role in episode if not episode[role].over]
            episode.abort("left without end")
            for role in open_roles:
                _warn_not_ended(episode[role])

    def train(
        self, tasks: Sequence[Any], rollout: Callable[..., Any], *, steps: int | Mapping[str, int], **options: Any
    ) -> dict[str, list[StepRecord]]:
        """See AsyncSwarm.train, whose options it takes."""
        return self._loop.wait(self._swarm.train(tasks, rollout, steps=steps, **options))

    def evaluate(self, tasks: Sequence[Any], rollout: Callable[..., Any], **options: Any) -> dict[str, Evaluation]:
        """See AsyncSwarm.evaluate, whose options it takes."""
        return self._loop.wait(self._swarm.evaluate(tasks, rollout, **options))


Client = TypeVar("Client", AsyncSwarmClient, SwarmClient)


def _by_role(clients: Mapping[str, Client] | Sequence[Client]) -> dict[str, Client]:
    """Role → client.

    Raises:
        ValueError: no client, or two for one server.
    """
    found = dict(clients) if isinstance(clients, Mapping) else {str(i): c for i, c in enumerate(clients)}
    if not found:
        raise ValueError("a swarm has at least one client")
    urls = [client.url for client in found.values()]
    if twice := {url for url in urls if urls.count(url) > 1}:
        raise ValueError(
            f"two roles have the server {twice.pop()}, which trains one model: give each role a server of its own, or "
            "claim two episodes with one SwarmClient"
        )
    return found


def role_seed(seed: int | None, role: str) -> int | None:
    """A role's own seed from the episode's: two models with one seed must not draw the same numbers."""
    from swarmtune.rollout import episode_seed

    return None if seed is None else episode_seed(seed, role)


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, once all are over; then the first error, if there was one.

    Cancelled, everything gets a moment to finish what it had begun: an end that was sent may be half-way there.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        done, late = await asyncio.wait(tasks, timeout=_GOODBYE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*done, *late, return_exceptions=True)
        raise
    errors = [error for task in tasks if (error := task.exception()) is not None]
    if errors:
        raise errors[0]
    return [task.result() for task in tasks]


def _pauses() -> Iterator[float]:
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.7, _LONGEST_PAUSE_S)


def _bound(hold_s: float | None, deadline: float | None) -> float | None:
    """Seconds a claim may wait: what holding allows, jittered so that two clients do not give up together for ever."""
    left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
    if hold_s is None:
        return left_s
    hold_s *= random.uniform(0.5, 1.0)
    return hold_s if left_s is None else min(hold_s, left_s)


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline
