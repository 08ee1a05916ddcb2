"""Several vLLM servers as one: who is up, who gets a request, who has the current weights, who is started again.

What always holds: a request goes only to a server that has the current weights, and waits while none has; a server that
dies is brought up again and given the current weights before anything else; calls of one episode go to one server as
long as it is there, which has their prefix cached, and an episode's first call to the least loaded one.
Knows nothing of tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from swarmtune.backend import BackendError, RequestRefused
from swarmtune.engines.vllm_client import Unreachable, VllmClient
from swarmtune.engines.vllm_server import Server
from swarmtune.engines.vllm_sync import WeightSync

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Starts of one server that fail in a row until it is given up."""
KEPT_EPISODES = 8192
"""Whose server is remembered; the least recently seen are forgotten."""


class Replica:
    """One server from the engine's point of view."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.client: VllmClient | None = None
        """None while the server is down."""
        self.version: int | None = None
        """Weights it has; None: not ours yet."""
        self.model = ""
        """Model name that means these weights."""
        self.running = 0
        self.given_up = False
        self.lock = asyncio.Lock()
        """One weight hand-over at a time."""
        self.suspect = asyncio.Event()
        """Set when it answers wrongly: it is taken down and brought up again."""

    def has(self, version: int | None) -> bool:
        return self.client is not None and version is not None and self.version == version


class Replicas:
    def __init__(self, servers: Sequence[Server], sync: WeightSync, *, on_all_given_up: Callable[[str], None]) -> None:
        self._replicas = [Replica(server) for server in servers]
        self._sync = sync
        self._on_all_given_up = on_all_given_up
        self._version: int | None = None
        self._held = False
        self._changed = asyncio.Event()
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def clients(self) -> list[VllmClient]:
        """Of the servers that are up."""
        return [r.client for r in self._replicas if r.client is not None]

    def model_of(self, client: VllmClient) -> str:
        """Model name to ask one of them for."""
        return next(r.model for r in self._replicas if r.client is client)

    def last_words(self) -> str:
        """What the servers' logs say of the last error."""
        return "; ".join(words for r in self._replicas if (words := r.server.last_words()))

    @property
    def running(self) -> int:
        return sum(r.running for r in self._replicas)

    # Up and down.

    async def come_up(self) -> None:
        """Start all servers together and watch them from then on.

        Raises:
            StartFailed: one does not come up; the others are ended.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for replica in self._replicas:
                    group.create_task(self._bring_up(replica))
        except* BackendError as errors:
            await self.close()
            raise next(e for e in errors.exceptions if isinstance(e, BackendError)) from None
        self._keepers = [asyncio.create_task(self._keep(r), name=f"keep {r.server!r}") for r in self._replicas]

    async def close(self) -> None:
        """End what runs and what was started. Idempotent."""
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*[self._take_down(r) for r in self._replicas])

    async def _keep(self, replica: Replica) -> None:
        """Bring a server up again whenever it goes down."""
        while True:
            reason = await self._wait_down(replica)
            log.warning("a vLLM server is gone; starting it again", extra={"reason": reason})
            await self._take_down(replica)
            if not await self._restart(replica):
                return

    async def _wait_down(self, replica: Replica) -> str:
        """Why the server has to be brought up again."""
        assert replica.client is not None
        down = asyncio.create_task(replica.server.wait_down(replica.client))
        suspect = asyncio.create_task(replica.suspect.wait())
        try:
            await asyncio.wait([down, suspect], return_when=asyncio.FIRST_COMPLETED)
            return down.result() if down.done() else "it answers wrongly"
        finally:
            down.cancel()
            suspect.cancel()

    async def _restart(self, replica: Replica) -> bool:
        """Whether it is up again with the current weights."""
        reason = ""
        for _ in range(MAX_FAILURES):
            try:
                await self._bring_up(replica)
                await self._bring_current(replica)
            except (BackendError, Unreachable) as error:
                reason = str(error)
                log.warning("a vLLM server does not come up", extra={"reason": reason})
                await self._take_down(replica)
            else:
                log.info("a vLLM server is up again", extra={"version": replica.version})
                return True
        log.error("a vLLM server is given up", extra={"reason": reason})
        replica.given_up = True
        if all(r.given_up for r in self._replicas):
            self._on_all_given_up(reason)
        return False

    async def _bring_up(self, replica: Replica) -> None:
        replica.client = await replica.server.come_up()

    async def _take_down(self, replica: Replica) -> None:
        client, replica.client, replica.version = replica.client, None, None
        replica.suspect.clear()
        self._notify()
        if client is not None:
            await client.close()
        await replica.server.close()

    # Weights.

    async def hand_over(self, version: int) -> None:
        """The staged weights are `version`: give them to every server that is up; one at least has them afterwards.

        A server that dies meanwhile gets them when it is up again.

        Raises:
            RequestRefused: a server will not take them.
        """
        self._version = version
        async with asyncio.TaskGroup() as group:
            for replica in self._replicas:
                group.create_task(self._give(replica))
        while not any(r.has(version) for r in self._replicas):
            await self._changed.wait()
        self._sync.forget(keep=version)

    async def _give(self, replica: Replica) -> None:
        try:
            await self._bring_current(replica)
        except Unreachable as error:
            log.warning("a vLLM server failed in a weight hand-over", extra={"reason": str(error)})
            self.suspect(replica)

    async def _bring_current(self, replica: Replica) -> None:
        """Raises:
        Unreachable, RequestRefused
        """
        async with replica.lock:
            while (version := self._version) is not None and replica.client is not None and replica.version != version:
                replica.version = None
                try:
                    replica.model = await self._sync.give(replica.client, version)
                except (RequestRefused, Unreachable):
                    if self._version != version:  # what it was reading has been replaced
                        continue
                    raise
                replica.version = version
        self._notify()

    # Requests.

    def hold(self) -> None:
        """No request begins until `release`."""
        self._held = True

    def release(self) -> None:
        self._held = False
        self._notify()

    def suspect(self, replica: Replica) -> None:
        """It answers wrongly: no more requests for it until it has been brought up again."""
        replica.version = None
        replica.suspect.set()

    def interrupt(self) -> None:
        """End every request that runs."""
        for client in self.clients:
            client.interrupt()

    async def wait_idle(self) -> None:
        while self.running:
            await self._changed.wait()

    @asynccontextmanager
    async def place(self, episode_id: str) -> AsyncIterator[tuple[Replica, VllmClient]]:
        """A server with the current weights for one request; waits for one."""
        while self._held or (replica := self._choose(episode_id)) is None or replica.client is None:
            await self._changed.wait()
        replica.running += 1
        try:
            yield replica, replica.client
        finally:
            replica.running -= 1
            self._notify()

    def _choose(self, episode_id: str) -> Replica | None:
        ready = [r for r in self._replicas if r.has(self._version)]
        home = self._homes.get(episode_id)
        if home not in ready:
            home = min(ready, key=lambda r: r.running, default=None)
        if episode_id and home is not None:
            self._homes[episode_id] = home
            self._homes.move_to_end(episode_id)
            if len(self._homes) > KEPT_EPISODES:
                self._homes.popitem(last=False)
        return home

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
