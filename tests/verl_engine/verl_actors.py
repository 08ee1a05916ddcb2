"""Stand-ins for veRL's Ray actors that write down what they are told; what calls them is veRL's own code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from verl.checkpoint_engine import CheckpointEngineManager
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.replica import TokenOutput

from swarmtune.config import TrainConfig
from swarmtune.engines.verl_cluster import Replicas, VerlCluster

Calls = list[tuple[Any, ...]]


class Remote:
    """`actor.method.remote(…)` of an async function."""

    def __init__(self, work: Callable[..., Awaitable[Any]]) -> None:
        self._work = work

    def remote(self, *arguments: Any, **keywords: Any) -> Any:
        return asyncio.ensure_future(self._work(*arguments, **keywords))


class Server:
    """A vLLMHttpServer: answers by a script, holds what it is asked until then, aborts."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.answers: list[TokenOutput | Exception] = []
        """In order; without one a request waits for its abort."""
        self.step: int | None = None
        self.generate = Remote(self._generate)
        self.abort_request = Remote(self._abort)
        self._aborted: dict[str, asyncio.Event] = {}

    async def _generate(self, *, request_id: str, prompt_ids: list[int], sampling_params: dict, **_: Any) -> Any:
        self.calls.append(("generate", request_id, list(prompt_ids), dict(sampling_params)))
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        aborted = self._aborted[request_id] = asyncio.Event()
        await aborted.wait()
        return TokenOutput(token_ids=[], log_probs=[], stop_reason="aborted", extra_fields={"global_steps": self.step})

    async def _abort(self, request_id: str, reset_prefix_cache: bool = True) -> dict:
        self.calls.append(("abort_request", request_id, reset_prefix_cache))
        self._aborted[request_id].set()
        return {"aborted": True}

    def abort_all(self) -> None:
        for aborted in self._aborted.values():
            aborted.set()


class LoadBalancer:
    """The router: one server, sessions by request id."""

    def __init__(self, calls: Calls, server: Server) -> None:
        self.calls, self._server = calls, server
        self.require_acquire_fields = Remote(self._no_fields)
        self.require_release_fields = Remote(self._no_fields)
        self.acquire_server = Remote(self._acquire)
        self.release_server = Remote(self._release)

    async def _no_fields(self) -> list[str]:
        return []

    async def _acquire(self, request_id: str) -> tuple[str, Server]:
        self.calls.append(("acquire", request_id))
        return "server-0", self._server

    async def _release(self, server_id: str) -> None:
        self.calls.append(("release", server_id))


class Replica:
    """A RolloutReplica."""

    workers: tuple[Any, ...] = ()

    def __init__(self, calls: Calls, server: Server, loop: asyncio.AbstractEventLoop | None) -> None:
        self.calls, self._server, self._loop = calls, server, loop

    async def sleep(self) -> None:
        self.calls.append(("sleep",))

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self.calls.append(("abort_all",))
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._server.abort_all)

    async def resume_generation(self) -> None:
        self.calls.append(("resume_generation",))


class Manager:
    """What is used of an LLMServerManager that has started its replicas."""

    def __init__(self, settings: Any, balancer: LoadBalancer) -> None:
        self._settings, self._balancer = settings, balancer

    def get_client(self, client_cls: Any = None, **_: Any) -> Any:
        return client_cls(config=self._settings, load_balancer_handle=self._balancer)


class Group:
    """A RayWorkerGroup of VerlRank: calls go to a rank in this process, or are written down alone."""

    def __init__(self, calls: Calls, rank: Any = None, world_size: int = 1) -> None:
        self.calls, self._rank, self.world_size = calls, rank, world_size
        self.workers: list[Any] = []
        self.fails: Exception | None = None

    def execute_all_async(self, method: str, *per_rank: list[Any]) -> list[Any]:
        self.calls.append(("rank", method, *(values[0] for values in per_rank)))
        if self.fails is not None:
            raise self.fails
        if self._rank is None:
            return [(None, None)] * self.world_size
        return [getattr(self._rank, method)(*(values[0] for values in per_rank))]

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        self.calls.append(("update_weights", global_steps, mode))
        if self.fails is not None:
            raise self.fails
        return [{}]


class Recorded:
    """A cluster whose actors are the ones above."""

    def __init__(
        self, config: TrainConfig, settings: Any, *, loop: asyncio.AbstractEventLoop | None = None, rank: Any = None
    ) -> None:
        """`loop`: the one that requests run on; `rank`: a VerlRank of this process that computes."""
        self.calls: Calls = []
        self.server = Server(self.calls)
        self.group = Group(self.calls, rank)
        self.closed = 0
        self._settings, self._loop = settings, loop
        self.cluster = VerlCluster(config, self.group, self._replicas, close=self._close)

    def _replicas(self) -> Replicas:
        transfer = CheckpointEngineConfig(backend="naive")
        replica: Any = Replica(self.calls, self.server, self._loop)
        group: Any = self.group
        manager = Manager(self._settings, LoadBalancer(self.calls, self.server))
        return Replicas(manager, CheckpointEngineManager(transfer, group, [replica]))

    def _close(self) -> None:
        self.closed += 1

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


def output(tokens: list[int], *, reason: str = "completed", step: int | None = 0) -> TokenOutput:
    return TokenOutput(
        token_ids=tokens,
        log_probs=[-float(t) / 10 for t in tokens],
        stop_reason=reason,
        extra_fields={"global_steps": step},
    )
