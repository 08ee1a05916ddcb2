"""The swarm client: claims episodes, reports rewards, feeds a training, evaluates. Light: httpx and pydantic.

    swarm = SwarmClient("http://127.0.0.1:10086")
    swarm.start(TrainConfig(model="smollm2-135m", batch_tasks=8, repeats=8))
    with swarm.episode(task_id="add-3-4") as ep:
        llm = openai.OpenAI(base_url=ep.base_url, api_key=ep.api_key)
        ...
        ep.end(reward=1.0)

AsyncSwarmClient does the work; SwarmClient runs one on a background event loop and waits for it, so both behave alike.
What always holds: an episode left by an exception or without `end` is aborted; a request that got no answer is repeated
under its idempotency key, so a lost connection or a restarted server neither claims nor ends twice; while an episode is
open, heartbeats keep its lease, however long the agent thinks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from swarmtune.config import TrainConfig
from swarmtune.errors import EpisodeGone, NotStarted, StartFailed, SwarmError, TrainingFailed, UnknownClient
from swarmtune.protocol import (
    AbortRequest,
    AgreeRequest,
    CheckpointView,
    ClaimRequest,
    ClientView,
    EndRequest,
    EndResult,
    EngineState,
    EpisodeGrant,
    EpisodeKind,
    EpisodeView,
    EvaluationOutcome,
    EvaluationRecord,
    EvaluationRequest,
    Event,
    ExportRequest,
    ExportView,
    PoolView,
    RegisterRequest,
    ServerStatus,
    StartRequest,
    StepRecord,
    WarmupRequest,
    WarmupView,
)
from swarmtune.transport import Transport

if TYPE_CHECKING:
    from pathlib import Path

    from swarmtune.evaluation import Evaluation

T = TypeVar("T")
log = logging.getLogger(__name__)

DEFAULT_URL = "http://127.0.0.1:10086"
PATIENCE_S = 300.0
"""How long a server may be away (restarting, recovering its engine) before a client gives up."""
_POLL_S = 30.0
_BOOT_TELL_S = 5.0
_EXPORT_S = 3600.0
_CLAIM_WAIT_S = 30.0
_GOODBYE_S = 5.0
_CLIENT_HEARTBEAT_S = 5.0
_TELL_S = 60.0
_MOMENT_S = 0.5


class EpisodeNotEnded(UserWarning):
    """An episode's block was left without `end`; the episode was aborted and trains nothing."""


class AsyncEpisode:
    """One claimed agent run. `base_url` and `api_key` are for the agent; `end` reports what it was worth."""

    def __init__(self, transport: Transport, grant: EpisodeGrant, task_id: str, seed: int | None) -> None:
        self.grant = grant
        self.task_id = task_id
        self.seed = seed
        self.result: EndResult | None = None
        """What the server made of it; None until `end` returned."""
        self.reward: float | None = None
        """The last one that `end` was given."""
        self.metrics: dict[str, float] = {}
        """Sent with `end`, besides those it is given."""
        self._transport = transport
        self._submission_id = uuid.uuid4().hex
        self._aborted = False
        self._heart: asyncio.Task[None] | None = None

    @property
    def episode_id(self) -> str:
        return self.grant.episode_id

    @property
    def base_url(self) -> str:
        """For OpenAI-style clients."""
        return self.grant.base_url

    @property
    def anthropic_base_url(self) -> str:
        return self.grant.anthropic_base_url

    @property
    def api_key(self) -> str:
        return self.grant.api_key

    @property
    def model(self) -> str:
        """A model name for clients that insist on one; the server serves whatever it trains."""
        return "swarm"

    @property
    def over(self) -> bool:
        """Whether it was ended or aborted from here."""
        return self.result is not None or self._aborted

    async def end(self, reward: float, metrics: Mapping[str, float] | None = None) -> EndResult:
        """Report the reward. Repeating it is safe: an episode has one submission id, and the first end counts.

        Raises:
            BadReward: not a finite number; the episode stays open.
            EpisodeGone: expired, aborted or unknown to a server that lost it.
        """
        told = self.metrics | dict(metrics or {})
        body = EndRequest(reward=reward, metrics=told, submission_id=self._submission_id)
        self.reward = reward
        self.result = await _patiently(
            lambda: self._transport.post(f"/v1/episodes/{self.episode_id}/end", EndResult, body), PATIENCE_S
        )
        await self._rest()
        return self.result

    async def abort(self, reason: str = "") -> None:
        """Give the episode up; it trains nothing. Idempotent; a server that is away or has no such episode is fine.

        Cancelled, it still tells the server before it passes that on.
        """
        if self.over:
            return
        self._aborted = True
        await self._rest()
        body = AbortRequest(reason=reason[:500])
        telling = asyncio.ensure_future(
            self._transport.post(f"/v1/episodes/{self.episode_id}/abort", EpisodeView, body, patience_s=_GOODBYE_S)
        )
        try:
            with contextlib.suppress(SwarmError):
                await asyncio.shield(telling)
        except asyncio.CancelledError:
            # Untold, the episode would be open until its lease ends.
            await asyncio.wait({telling}, timeout=_GOODBYE_S)
            if not telling.cancel():
                telling.exception()  # looked at: nobody is left to hear of it
            raise

    async def view(self) -> EpisodeView:
        """State, calls and lease as the server sees them."""
        return await self._transport.get(f"/v1/episodes/{self.episode_id}", EpisodeView)

    def _start_heart(self) -> None:
        self._heart = asyncio.create_task(self._beat(), name=f"heartbeat of {self.episode_id}")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.grant.lease_s / 3)
            try:
                await self._transport.post(f"/v1/episodes/{self.episode_id}/heartbeat", EpisodeView)
            except EpisodeGone:
                return
            except SwarmError as error:
                log.warning("heartbeat of episode %s failed: %s", self.episode_id, error)

    async def _rest(self) -> None:
        if self._heart is not None:
            self._heart.cancel()
            self._heart = None


@dataclass(slots=True)
class _Started:
    """The training this client started, and the server process it was started in."""

    server_id: str = ""
    config: TrainConfig | None = None


class AsyncSwarmClient:
    """A client of one swarm server. Belongs to the event loop it is first used in."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        name: str | None = None,
        share: int | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Nothing is sent yet.

        Args:
            api_key: a key of the server with the capabilities this client needs, where the server has keys.
            name: registers the client under this name: needed for shares and for the policies that wait for agreement.
            share: tasks of each batch that are this client's.
            patience_s: how long the server may be away before ServerUnreachable is raised.

        Raises:
            ValueError: a share without a name, or no address that could ever answer.
        """
        if share is not None and name is None:
            raise ValueError("share: only a client with a name can have one; pass name=")
        self._transport = Transport(url, api_key=api_key, patience_s=patience_s)
        self.url = self._transport.url
        self.name = name
        self.share = share
        self._api_key = api_key
        self._heart: asyncio.Task[None] | None = None
        self._started = _Started()

    def twin(self) -> AsyncSwarmClient:
        """Another client with the same settings and the same memory of what was started, for another event loop."""
        patience_s = self._transport.patience_s
        twin = AsyncSwarmClient(
            self.url, api_key=self._api_key, name=self.name, share=self.share, patience_s=patience_s
        )
        twin._started = self._started
        return twin

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Say goodbye where registered, and close connections. The server goes on."""
        if self._heart is not None:
            self._heart.cancel()
            self._heart = None
            with contextlib.suppress(SwarmError):
                await self._transport.delete(f"/v1/clients/{self.name}", patience_s=_GOODBYE_S)
        await self._transport.close()

    # -- the server

    async def start(
        self,
        config: TrainConfig | Mapping[str, Any],
        *,
        from_step: int | None = None,
        from_run: str | Path | None = None,
    ) -> ServerStatus:
        """Wake the server with `config` and wait until it rolls; join when exactly this configuration is running.

        Args:
            from_step: begin a new run at that checkpoint of an earlier one, which stays as it is, later steps and all.
            from_run: that earlier run: a name in the server's data folder, or a folder on its machine; None is the
                last one.

        Raises:
            BadConfig: the configuration cannot be used.
            ConfigConflict: another one is running; `differences` and the message name the keys.
            StartFailed: the model could not be brought up; reason and log tail in the message.
            SwarmError: code not_found: no such run or checkpoint; the message names those there are.
        """
        config = config if isinstance(config, TrainConfig) else TrainConfig.from_dict(config)
        body = StartRequest(
            config=config.model_dump(mode="json"),
            from_step=from_step,
            from_run=str(from_run) if from_run is not None else None,
        )
        status = await self._transport.post("/v1/start", ServerStatus, body)
        status = await self._until_up(status)
        self._started.server_id, self._started.config = status.server_id, config
        if self.name is not None:
            await self.register()
        return status

    async def restart_if_lost(self) -> ServerStatus:
        """Start again what this client started, where the server process is another one than then and has no model.

        Raises:
            NotStarted: the same process was stopped, or this client never started it.
        """
        status = await self.status()
        if status.state is not EngineState.OFFLINE:
            return await self._until_up(status)
        if self._started.config is None or self._started.server_id == status.server_id:
            raise NotStarted("the server is offline: start it with a configuration (swarm.start)")
        log.warning("the server process is a new one without a model; starting it again")
        return await self.start(self._started.config)

    async def status(self) -> ServerStatus:
        return await self._transport.get("/v1/status", ServerStatus)

    async def config(self) -> TrainConfig:
        """The configuration that runs, as resolved.

        Raises:
            NotStarted
        """
        return TrainConfig.model_validate(await self._transport.get("/v1/config", dict))

    async def stop(self) -> ServerStatus:
        """Stop training; the server saves a checkpoint and goes offline."""
        return await self._transport.post("/v1/stop", ServerStatus, wait_s=120.0)

    async def shutdown(self) -> None:
        """End the server process."""
        await self._transport.post("/v1/shutdown", dict)

    async def pool(self, *, after: int | None = None, wait_s: float = 0.0) -> PoolView:
        """What the next step waits for, in numbers; with `after`, as soon as a later step is being collected."""
        return await self._transport.get("/v1/pool", PoolView, after=after, wait_s=wait_s)

    async def steps(self, after: int = 0) -> list[StepRecord]:
        """The steps done so far, later than `after`."""
        return await self._transport.get("/v1/steps", list[StepRecord], after=after)

    async def wait_step(self, after: int, *, timeout_s: float | None = None) -> list[StepRecord]:
        """Wait until a step later than `after` is done; returns all such.

        Raises:
            TimeoutError: none within `timeout_s`.
            StartFailed: the training failed meanwhile.
            NotStarted: it was stopped, or a new server process has no training.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = _POLL_S if deadline is None else max(0.0, min(_POLL_S, deadline - time.monotonic()))
            records = await self._transport.get("/v1/steps", list[StepRecord], after=after, wait_s=left_s)
            if records:
                return records
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"no step after {after} within {timeout_s:g} s; ask swarm.pool() what it waits for")
            status = await self.status()
            _raise_if_failed(status)
            if status.state is EngineState.OFFLINE:
                raise NotStarted(f"the server was stopped before step {after + 1}")
            if status.state is EngineState.STOPPING:
                await asyncio.sleep(_MOMENT_S)

    def events(self, after: int = 0) -> AsyncIterator[Event]:
        """Events as they happen, oldest first; goes on until closed, through reconnects."""
        return self._transport.events(after)

    async def events_so_far(self, after: int = 0) -> list[Event]:
        """The events up to now."""
        return await self._transport.get("/v1/events", list[Event], after=after)

    async def checkpoints(self) -> list[CheckpointView]:
        return await self._transport.get("/v1/checkpoints", list[CheckpointView])

    async def save_checkpoint(self) -> CheckpointView:
        """Write one now, waiting for an update to end; where the last step has one, that is returned."""
        return await _patiently(
            lambda: self._transport.post("/v1/checkpoints", CheckpointView, wait_s=_EXPORT_S), PATIENCE_S
        )

    async def export(
        self,
        folder: str | Path,
        *,
        step: int | None = None,
        adapter: bool = False,
        dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    ) -> ExportView:
        """Write weights as a Hugging Face folder on the server's machine, complete or not at all; training goes on.

        Args:
            folder: absent or empty; a relative one is taken from this process's folder.
            step: of a checkpoint; None saves the current weights and takes those.
            adapter: the LoRA adapter as a peft folder, instead of merged weights.
            dtype: None is what the engine computes in: exactly the weights that answer.

        Raises:
            SwarmError: the reason is in the message: the folder is taken, no such checkpoint, no space.
        """
        body = ExportRequest(path=os.path.abspath(folder), step=step, adapter=adapter, dtype=dtype)
        return await _patiently(
            lambda: self._transport.post("/v1/export", ExportView, body, wait_s=_EXPORT_S), PATIENCE_S
        )

    async def warm_up(
        self,
        conversations: Sequence[Any],
        *,
        steps: int,
        batch_size: int = 8,
        lr: float | None = None,
        seed: int = 0,
    ) -> list[StepRecord]:
        """Teach given conversations in supervised steps of the run, and wait for them; their records, with `sft/loss`.

        They count as steps like any other: towards `max_steps`, and towards the goal of `train`. Open episodes go on.
        Restarts of the server and of its engine are waited for; each step is trained once.

        Args:
            conversations: each `{"messages": […], "tools": […]}` or a list of messages, in OpenAI's form. The assistant
                messages are taught.
            batch_size: conversations per step; all of them where there are fewer.
            lr: constant; None takes the configuration's `optim.lr`.
            seed: of the order of the conversations.

        Raises:
            SwarmError: a conversation that cannot be taught, by index and field.
            TrainingFinished: `max_steps` leaves no room for so many steps.
            TrainingFailed: the update of one of the steps failed; the rest is not trained.
            NotStarted, StartFailed
        """
        body = WarmupRequest(
            warmup_id=uuid.uuid4().hex,
            conversations=list(conversations),
            steps=steps,
            batch_size=batch_size,
            lr=lr,
            seed=seed,
        )
        view = await _patiently(
            lambda: self._transport.post("/v1/warmup", WarmupView, body, wait_s=_EXPORT_S), PATIENCE_S
        )
        while len(view.done) < steps and view.failed is None:
            view = await _patiently(partial(self._warmup, body.warmup_id, len(view.done)), PATIENCE_S)
        if view.failed is not None:
            raise TrainingFailed(f"the warm-up ended after {len(view.done)} of {steps} steps: {view.failed}")
        return [record for record in await self.steps() if record.step in view.done]

    async def _warmup(self, warmup_id: str, done: int) -> WarmupView:
        """As it is, once more than `done` of its steps are trained, or after a while."""
        return await self._transport.get(f"/v1/warmup/{warmup_id}", WarmupView, after=done, wait_s=_POLL_S)

    async def evaluations(self, name: str | None = None) -> list[EvaluationRecord]:
        """The run's evaluations, in order of weight version; those with one name make a curve over the training."""
        return await self._transport.get("/v1/evaluations", list[EvaluationRecord], name=name)

    async def begin_evaluation(self, request: EvaluationRequest) -> EvaluationRecord:
        """Tell the server of an evaluation; its episodes are claimed with its id. `evaluate` does all of it.

        Raises:
            WeightsReplaced: the weights asked for are gone.
            NotStarted, StartFailed
        """
        return await self._transport.post("/v1/evaluations", EvaluationRecord, request)

    async def finish_evaluation(self, evaluation_id: str, outcome: EvaluationOutcome) -> EvaluationRecord:
        """Put an evaluation's numbers into the server's table. Repeating it is safe."""
        return await self._transport.post(f"/v1/evaluations/{evaluation_id}/finish", EvaluationRecord, outcome)

    async def merge_report(self, episode_id: str) -> dict[str, Any]:
        """How the episode's calls were merged into samples."""
        return await self._transport.get(f"/v1/episodes/{episode_id}/merge", dict)

    # -- this client

    async def register(self) -> ClientView:
        """Register under the client's name and keep sending heartbeats until `close`; `start` and `train` do this.

        Raises:
            ValueError: the client has no name.
        """
        if self.name is None:
            raise ValueError("register: the client has no name; pass name= when making it")
        body = RegisterRequest(name=self.name, share=self.share)
        view = await self._transport.post("/v1/clients", ClientView, body)
        if self._heart is None:
            self._heart = asyncio.create_task(self._beat(), name=f"heartbeat of client {self.name}")
        return view

    async def heartbeat(self) -> ClientView:
        """One sign of life, registering again where a restarted server has forgotten the client."""
        try:
            return await self._transport.post(f"/v1/clients/{self.name}/heartbeat", ClientView)
        except UnknownClient:
            return await self.register()

    async def agree(self, step: int) -> ClientView:
        """Agree that `step` (the server's current step + 1) may start.

        Raises:
            StepMismatch: another step is being collected.
        """
        body = AgreeRequest(step=step)
        try:
            return await self._transport.post(f"/v1/clients/{self.name}/agree", ClientView, body)
        except UnknownClient:
            await self.register()
            return await self._transport.post(f"/v1/clients/{self.name}/agree", ClientView, body)

    # -- episodes

    async def claim(
        self,
        task_id: str,
        *,
        kind: EpisodeKind = "train",
        sampling: Mapping[str, Any] | None = None,
        seed: int | None = None,
        lease_s: float | None = None,
        wait_s: float | None = None,
        evaluation_id: str | None = None,
    ) -> AsyncEpisode:
        """Claim an episode, waiting while the server changes weights, is full, or holds the claim for another's share.

        Args:
            sampling: overrides of the configuration's `sampling` for this episode.
            seed: makes the episode's sampling repeatable.
            evaluation_id: of `begin_evaluation`, for kind evaluate.
            wait_s: how long to wait at most; None waits as long as the server asks to.

        Raises:
            NotRolling: not within `wait_s`; `code` and the message say why.
            NotStarted, TrainingFinished, StartFailed
        """
        body = ClaimRequest(
            task_id=task_id,
            kind=kind,
            client=self.name,
            sampling=dict(sampling or {}),
            seed=seed,
            lease_s=lease_s,
            heartbeats=True,
            evaluation_id=evaluation_id,
            claim_id=uuid.uuid4().hex,
            wait_s=_CLAIM_WAIT_S if wait_s is None else min(wait_s, _CLAIM_WAIT_S),
        )

        async def once() -> EpisodeGrant:
            try:
                return await self._transport.post("/v1/episodes", EpisodeGrant, body, wait_s=body.wait_s)
            except UnknownClient:
                await self.register()
                return await self._transport.post("/v1/episodes", EpisodeGrant, body, wait_s=body.wait_s)

        claiming = asyncio.ensure_future(_patiently(once, wait_s))
        try:
            grant = await asyncio.shield(claiming)
        except asyncio.CancelledError:
            await self._give_back(claiming, task_id)
            raise
        episode = AsyncEpisode(self._transport, grant, task_id, seed)
        episode._start_heart()
        return episode

    async def _give_back(self, claiming: asyncio.Future[EpisodeGrant], task_id: str) -> None:
        """Abort what a claim nobody waits for any more may still bring: its answer can be on its way already."""
        await asyncio.wait({claiming}, timeout=_MOMENT_S)
        if not claiming.done():
            claiming.cancel()  # the server sees the connection close, and gives up what it grants to it
        elif not claiming.cancelled() and claiming.exception() is None:
            await AsyncEpisode(self._transport, claiming.result(), task_id, None).abort("the claim was given up")

    @contextlib.asynccontextmanager
    async def episode(self, task_id: str, **options: Any) -> AsyncIterator[AsyncEpisode]:
        """Claim an episode for a block; takes the options of `claim`. Leaving it without `end` aborts."""
        episode = await self.claim(task_id, **options)
        try:
            yield episode
        except BaseException as error:
            await episode.abort(f"{type(error).__name__}: {error}")
            raise
        if not episode.over:
            await episode.abort("left without end")
            _warn_not_ended(episode)

    # -- loops

    async def train(
        self,
        tasks: Sequence[Any],
        rollout: Callable[..., Any],
        *,
        steps: int,
        parallel: int = 32,
        attempts: int = 4,
        seed: int | None = None,
        episode_timeout_s: float | None = None,
        progress: bool | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> list[StepRecord]:
        """Run episodes until the server has done `steps` steps in all; returns the records of those done meanwhile.

        Each step gets `batch_tasks` tasks (or this client's share) with `repeats` episodes each, in an order fixed by
        the seed. Restarts of the server and of its engine are waited for.

        Args:
            tasks: a task is a string, or a mapping or object with `task_id`.
            rollout: `rollout(task, episode)` runs the agent and returns the reward, or (reward, metrics), or None when
                it ended the episode itself. A plain function runs in a thread of its own, `async def` on this loop.
            parallel: episodes run at once at most.
            attempts: how often one episode is tried before its task is dropped for another one.
            seed: of task order and sampling; None takes the configuration's.
            episode_timeout_s: an episode that takes longer is aborted and counts as failed.
            progress: a progress bar on standard error; None shows one where that is a terminal.
            on_step: called in a thread with the record of each step done, before the next one is counted.

        Raises:
            TrainingFailed: within one step as many tasks as a batch has, and at least 3, had to be dropped.
            ValueError: fewer tasks than a step takes, or two with one task_id.
            StartFailed, ServerUnreachable, TrainingFinished, AccessDenied
        """
        from swarmtune.feeder import Feeder

        feeder = Feeder(
            self,
            tasks,
            rollout,
            steps=steps,
            parallel=parallel,
            attempts=attempts,
            seed=seed,
            episode_timeout_s=episode_timeout_s,
            progress=progress,
            on_step=on_step,
        )
        return await feeder.run()

    async def evaluate(
        self,
        tasks: Sequence[Any],
        rollout: Callable[..., Any],
        *,
        k: int = 1,
        name: str = "evaluation",
        version: int | None = None,
        temperature: float | None = None,
        sampling: Mapping[str, Any] | None = None,
        hold_sync_s: float | None = None,
        parallel: int = 32,
        seed: int = 0,
        success: float = 1.0,
        episode_timeout_s: float | None = None,
    ) -> Evaluation:
        """Run `k` evaluation episodes per task; they never enter the pool. `rollout` as in `train`.

        All of it belongs to one weight version. It may run while a training does, from another thread or task: the step
        that would replace these weights waits for it, within bounds, and what is left after that is not run.

        Args:
            name: evaluations of one name make a curve in `evaluations()`.
            version: the weights to evaluate: the current ones (None), or those of a later step, which are waited for.
            temperature: 0 is greedy; short for the key of `sampling`.
            sampling: overrides for these episodes, such as {"top_p": 0.9}; None takes the configuration's.
            hold_sync_s: how long a step may wait for it; None takes evaluation.hold_sync_s.
            success: the reward from which an episode counts as solved, for pass@k.

        Raises:
            RuntimeError: no episode can be counted; the message says why, and a last error is chained.
            WeightsReplaced: `version` is an earlier one than the server has.
        """
        from swarmtune.evaluation import evaluate

        return await evaluate(
            self,
            tasks,
            rollout,
            k=k,
            name=name,
            version=version,
            sampling=dict(sampling or {}) | ({} if temperature is None else {"temperature": temperature}),
            hold_sync_s=hold_sync_s,
            parallel=parallel,
            seed=seed,
            success=success,
            episode_timeout_s=episode_timeout_s,
        )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_CLIENT_HEARTBEAT_S)
            try:
                await self.heartbeat()
            except SwarmError as error:
                log.warning("heartbeat of client %s failed: %s", self.name, error)

    async def _until_up(self, status: ServerStatus) -> ServerStatus:
        began = time.monotonic()
        while status.state is EngineState.BOOTING:
            status = await self._transport.get(
                "/v1/status", ServerStatus, wait_s=_BOOT_TELL_S, **{"while": EngineState.BOOTING.value}
            )
            waited = time.monotonic() - began
            if status.state is EngineState.BOOTING and waited >= _BOOT_TELL_S:
                log.info("the server brings up %s: %s, %.0f s so far", status.model, status.state.value, waited)
        _raise_if_failed(status)
        return status


class Episode:
    """The twin of AsyncEpisode for plain code."""

    def __init__(self, episode: AsyncEpisode, wait: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._episode = episode
        self._wait = wait

    @property
    def grant(self) -> EpisodeGrant:
        return self._episode.grant

    @property
    def task_id(self) -> str:
        return self._episode.task_id

    @property
    def seed(self) -> int | None:
        return self._episode.seed

    @property
    def episode_id(self) -> str:
        return self._episode.episode_id

    @property
    def base_url(self) -> str:
        """For OpenAI-style clients."""
        return self._episode.base_url

    @property
    def anthropic_base_url(self) -> str:
        return self._episode.anthropic_base_url

    @property
    def api_key(self) -> str:
        return self._episode.api_key

    @property
    def model(self) -> str:
        """A model name for clients that insist on one; the server serves whatever it trains."""
        return self._episode.model

    @property
    def over(self) -> bool:
        """Whether it was ended or aborted from here."""
        return self._episode.over

    @property
    def result(self) -> EndResult | None:
        """What the server made of it; None until `end` returned."""
        return self._episode.result

    def end(self, reward: float, metrics: Mapping[str, float] | None = None) -> EndResult:
        """See AsyncEpisode.end."""
        return self._wait(self._episode.end(reward, metrics))

    def abort(self, reason: str = "") -> None:
        """See AsyncEpisode.abort."""
        self._wait(self._episode.abort(reason))

    def view(self) -> EpisodeView:
        """State, calls and lease as the server sees them."""
        return self._wait(self._episode.view())


class SwarmClient:
    """A client of one swarm server for plain code. May be used from several threads.

    Takes the arguments of AsyncSwarmClient and has its methods, without `await`.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        name: str | None = None,
        share: int | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._client = AsyncSwarmClient(url, api_key=api_key, name=name, share=share, patience_s=patience_s)
        self._loop = _BackgroundLoop()

    @property
    def url(self) -> str:
        return self._client.url

    @property
    def name(self) -> str | None:
        return self._client.name

    def async_twin(self) -> AsyncSwarmClient:
        """See AsyncSwarmClient.twin."""
        return self._client.twin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Say goodbye where registered, and close connections. The server goes on."""
        self._loop.wait(self._client.close())
        self._loop.stop()

    def start(
        self,
        config: TrainConfig | Mapping[str, Any],
        *,
        from_step: int | None = None,
        from_run: str | Path | None = None,
    ) -> ServerStatus:
        """See AsyncSwarmClient.start."""
        return self._loop.wait(self._client.start(config, from_step=from_step, from_run=from_run))

    def status(self) -> ServerStatus:
        return self._loop.wait(self._client.status())

    def config(self) -> TrainConfig:
        """The configuration that runs, as resolved."""
        return self._loop.wait(self._client.config())

    def stop(self) -> ServerStatus:
        """Stop training; the server saves a checkpoint and goes offline."""
        return self._loop.wait(self._client.stop())

    def shutdown(self) -> None:
        """End the server process."""
        self._loop.wait(self._client.shutdown())

    def pool(self) -> PoolView:
        """What the next step waits for, in numbers."""
        return self._loop.wait(self._client.pool())

    def steps(self, after: int = 0) -> list[StepRecord]:
        """The steps done so far, later than `after`."""
        return self._loop.wait(self._client.steps(after))

    def wait_step(self, after: int, *, timeout_s: float | None = None) -> list[StepRecord]:
        """See AsyncSwarmClient.wait_step."""
        return self._loop.wait(self._client.wait_step(after, timeout_s=timeout_s))

    def events(self, after: int = 0) -> Iterator[Event]:
        """Events as they happen, oldest first; goes on until closed, through reconnects."""
        stream = self._client.events(after)
        try:
            while True:
                yield self._loop.wait(_next(stream))
        finally:
            self._loop.wait(_close(stream))

    def events_so_far(self, after: int = 0) -> list[Event]:
        """The events up to now."""
        return self._loop.wait(self._client.events_so_far(after))

    def checkpoints(self) -> list[CheckpointView]:
        return self._loop.wait(self._client.checkpoints())

    def warm_up(
        self,
        conversations: Sequence[Any],
        *,
        steps: int,
        batch_size: int = 8,
        lr: float | None = None,
        seed: int = 0,
    ) -> list[StepRecord]:
        """See AsyncSwarmClient.warm_up."""
        teaching = self._client.warm_up(conversations, steps=steps, batch_size=batch_size, lr=lr, seed=seed)
        return self._loop.wait(teaching)

    def save_checkpoint(self) -> CheckpointView:
        """See AsyncSwarmClient.save_checkpoint."""
        return self._loop.wait(self._client.save_checkpoint())

    def export(
        self,
        folder: str | Path,
        *,
        step: int | None = None,
        adapter: bool = False,
        dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    ) -> ExportView:
        """See AsyncSwarmClient.export."""
        return self._loop.wait(self._client.export(folder, step=step, adapter=adapter, dtype=dtype))

    def evaluations(self, name: str | None = None) -> list[EvaluationRecord]:
        """See AsyncSwarmClient.evaluations."""
        return self._loop.wait(self._client.evaluations(name))

    def merge_report(self, episode_id: str) -> dict[str, Any]:
        """How the episode's calls were merged into samples."""
        return self._loop.wait(self._client.merge_report(episode_id))

    def register(self) -> ClientView:
        """See AsyncSwarmClient.register."""
        return self._loop.wait(self._client.register())

    def heartbeat(self) -> ClientView:
        """See AsyncSwarmClient.heartbeat."""
        return self._loop.wait(self._client.heartbeat())

    def agree(self, step: int) -> ClientView:
        """See AsyncSwarmClient.agree."""
        return self._loop.wait(self._client.agree(step))

    def claim(
        self,
        task_id: str,
        *,
        kind: EpisodeKind = "train",
        sampling: Mapping[str, Any] | None = None,
        seed: int | None = None,
        lease_s: float | None = None,
        wait_s: float | None = None,
        evaluation_id: str | None = None,
    ) -> Episode:
        """See AsyncSwarmClient.claim."""
        claiming = self._client.claim(
            task_id,
            kind=kind,
            sampling=sampling,
            seed=seed,
            lease_s=lease_s,
            wait_s=wait_s,
            evaluation_id=evaluation_id,
        )
        return Episode(self._loop.wait(claiming), self._loop.wait)

    @contextlib.contextmanager
    def episode(self, task_id: str, **options: Any) -> Iterator[Episode]:
        """Claim an episode for a block; takes the options of `claim`. Leaving it without `end` aborts."""
        episode = self.claim(task_id, **options)
        try:
            yield episode
        except BaseException as error:
            episode.abort(f"{type(error).__name__}: {error}")
            raise
        if not episode.over:
            episode.abort("left without end")
            _warn_not_ended(episode)

    def train(
        self, tasks: Sequence[Any], rollout: Callable[..., Any], *, steps: int, **options: Any
    ) -> list[StepRecord]:
        """See AsyncSwarmClient.train, whose options it takes."""
        return self._loop.wait(self._client.train(tasks, rollout, steps=steps, **options))

    def evaluate(self, tasks: Sequence[Any], rollout: Callable[..., Any], **options: Any) -> Evaluation:
        """See AsyncSwarmClient.evaluate, whose options it takes."""
        return self._loop.wait(self._client.evaluate(tasks, rollout, **options))


class _BackgroundLoop:
    """An event loop on a daemon thread, started at the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for it; an interrupt cancels it, lets it clean up briefly, and goes on."""
        loop = self._running()
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a SwarmClient method was called inside an async rollout: take AsyncSwarmClient there")
        finished = threading.Event()

        async def guarded() -> T:
            try:
                return await work
            finally:
                finished.set()

        future = asyncio.run_coroutine_threadsafe(guarded(), loop)
        try:
            # Looks up now and then: where the system hands an interrupt to another thread, it does not wake this one.
            while not concurrent.futures.wait([future], _MOMENT_S).done:
                pass
            return future.result()
        except BaseException:
            if future.cancel():
                finished.wait(_GOODBYE_S)
            raise

    def stop(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_GOODBYE_S)
            self._loop = None

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="swarm client", daemon=True)
                self._thread.start()
            return self._loop


async def _next(stream: AsyncIterator[T]) -> T:
    return await anext(stream)


async def _close(stream: Any) -> None:
    await stream.aclose()


async def _patiently(request: Callable[[], Awaitable[T]], wait_s: float | None) -> T:
    """Repeat a request for as long as the server refuses it only for now, at most `wait_s`; None has no limit."""
    began = time.monotonic()
    told = began
    while True:
        try:
            return await request()
        except SwarmError as refusal:
            now, pause_s = time.monotonic(), refusal.retry_after_s
            if pause_s is None or (wait_s is not None and now + pause_s > began + wait_s):
                raise
            if now - told > _TELL_S:
                log.warning("waiting for %.0f s: %s", now - began, refusal)
                told = now
            await asyncio.sleep(pause_s)


def _raise_if_failed(status: ServerStatus) -> None:
    if status.state is EngineState.FAILED:
        tail = f"\n--- the engine's last lines ---\n{status.log_tail}" if status.log_tail else ""
        raise StartFailed(f"the server failed: {status.reason}{tail}", details={"log_tail": status.log_tail})


def _warn_not_ended(episode: AsyncEpisode | Episode) -> None:
    warnings.warn(
        f"episode {episode.episode_id} of task {episode.task_id!r} was left without end(reward=…); it was aborted",
        EpisodeNotEnded,
        stacklevel=4,
    )
