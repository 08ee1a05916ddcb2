"""The engine verl: veRL's hybrid replicas (vLLM or SGLang) on GPUs generate; weights go there from GPU to GPU.

Token ids go in, token ids and logprobs come back, a whole answer at a time. What always holds: an answer that a weight
sync cuts off goes on from the tokens it has once the new weights are there, and each chunk names the weights that
sampled it. Written against veRL 0.9.1 and not yet run on a GPU: docs/gpus.md says what was tested and how.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from ray.exceptions import RayError

from swarmtune.backend import GenerateFailed, RequestRefused
from swarmtune.config import TrainConfig
from swarmtune.engines.answers import check_request, find_stop, stop_bytes
from swarmtune.engines.engine import NamedTensors, SaveAdapter
from swarmtune.engines.verl_cluster import VerlCluster, call_id, open_cluster
from swarmtune.engines.vllm import ModelFacts
from swarmtune.types import FinishReason, GenerateChunk, GenerateRequest, Lane, SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")

ABORT_S = 5.0
"""How long the abort of a cancelled request may take."""
CLOSE_S = 20.0


class VerlEngine:
    """See the module's text; `engine.Engine` says what each method promises."""

    takes_adapter = False
    constrains = False

    def __init__(
        self,
        config: TrainConfig,
        facts: ModelFacts,
        cluster: VerlCluster,
        torch_thread: ThreadPoolExecutor,
        *,
        end_process: Callable[[str], None] | None = None,
    ) -> None:
        self.context_length = facts.context_length
        self._facts = facts
        self._cluster = cluster
        self._torch_thread = torch_thread
        self._end_process = end_process or _end_process
        self._version = 0
        self._numbers = itertools.count()
        self._running: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()
        """Generations may begin; not set before the first weights are there."""
        self._started = False
        self._synced = False
        """The replicas hold the weights of `weight_version`; colocated ones that sleep hold none."""
        verl = config.engine.verl
        replicas = verl.generating_gpus // (verl.tensor_parallel * verl.pipeline_parallel)
        slots = config.evaluation.slots
        train = asyncio.Semaphore(config.engine.max_batch * replicas)
        self._lanes: dict[Lane, asyncio.Semaphore] = {
            "train": train,
            "evaluate": asyncio.Semaphore(slots * replicas) if slots else train,
        }

    @classmethod
    def load(cls, config: TrainConfig, model_path: Path, torch_thread: ThreadPoolExecutor, *, work_dir: Path) -> Self:
        """Raises:
        StartFailed: no GPU, too few, or a package is missing: what to do.
        ConfigError: an override that is no key of veRL's, or no such Ray cluster.
        """
        facts = ModelFacts.read(model_path, wanted_context=config.engine.context_length)
        cluster = open_cluster(config, model_path, context_length=facts.context_length, work_dir=work_dir)
        return cls(config, facts, cluster, torch_thread)

    @property
    def weight_version(self) -> int:
        return self._version

    # Generation.

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        check_request(request, vocabulary=self._facts.vocabulary, context_length=self.context_length)
        check_sampling(request.sampling)
        answer = Answer(request, self._facts)
        async with self._lanes[request.lane]:
            while not answer.finished:
                await self._open.wait()
                if (chunk := answer.take(await self._attempt(answer), self._version)) is not None:
                    yield chunk

    async def _attempt(self, answer: Answer) -> Any:
        """veRL's TokenOutput of what is still to come, as far as it gets.

        Raises:
            GenerateFailed: the replica raised, and is still there.
        """
        call = f"{answer.request.request_id}-{next(self._numbers)}"
        call_id.set(call)
        self._running.add(call)
        self._idle.clear()
        try:
            return await self._cluster.client.generate(
                answer.request.episode_id or call,
                prompt_ids=[*answer.request.prompt_token_ids, *answer.sampled],
                sampling_params=answer.parameters(),
            )
        except asyncio.CancelledError:
            await self._abort(call)
            raise
        except RayError as error:
            await self._note_failure(error)
            raise GenerateFailed(f"{type(error).__name__}: {error}".splitlines()[0]) from error
        finally:
            self._cluster.client.forget(call)
            self._running.discard(call)
            if not self._running:
                self._idle.set()

    async def _abort(self, call: str) -> None:
        """Have the server drop a request that nobody waits for any more."""
        server = self._cluster.client.server_of(call)
        if server is None:
            return
        with contextlib.suppress(TimeoutError, RayError, AttributeError):  # SGLang's server aborts all or none
            async with asyncio.timeout(ABORT_S):
                await server.abort_request.remote(call, reset_prefix_cache=False)

    async def _note_failure(self, error: RayError) -> None:
        """A server that died takes its share of the GPUs along: then the process ends and is started again."""
        from ray.exceptions import RayActorError

        if isinstance(error, RayActorError):
            self._end_process(f"a replica died: {error}")

    # Weights.

    async def pause(self, *, drain_s: float) -> None:
        self._open.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        await self._on_torch_thread(self._cluster.abort_generations)
        await self._idle.wait()
        if self._cluster.colocated:
            await self._on_torch_thread(self._cluster.sleep)
            self._synced = False

    async def load_weights(self, tensors: NamedTensors, *, version: int) -> None:
        """veRL's checkpoint engine takes them from the trainer's ranks; `tensors` would go through this process."""
        del tensors
        await self._on_torch_thread(lambda: self._cluster.sync_weights(version))
        self._version, self._synced = version, True
        if not self._started:
            self._started = True
            await self.resume()

    async def load_adapter(self, save: SaveAdapter, *, version: int) -> None:
        raise ValueError("this engine takes merged weights; call load_weights")

    async def resume(self) -> None:
        """After an update that failed, colocated replicas get the weights back that they gave up for it."""
        if not self._synced:
            await self._on_torch_thread(lambda: self._cluster.sync_weights(self._version))
            self._synced = True
        await self._on_torch_thread(self._cluster.allow_generations)
        self._open.set()

    async def close(self) -> None:
        self._open.clear()
        for call in list(self._running):
            await self._abort(call)
        if not self._cluster.is_lost:
            await self._on_torch_thread(self._cluster.close)

    async def _on_torch_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch_thread, work)


@dataclass(slots=True)
class Answer:
    """One generation over all its attempts."""

    request: GenerateRequest
    facts: ModelFacts
    sampled: list[int] = field(default_factory=list)
    finished: bool = False

    def parameters(self) -> dict[str, Any]:
        """veRL's sampling parameters for what is still to come.

        Stop strings are looked for here: the replicas run without a tokenizer.
        """
        sampling = self.request.sampling
        parameters: dict[str, Any] = {
            "max_tokens": sampling.max_tokens - len(self.sampled),
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "logprobs": True,
            "stop_token_ids": sorted(self._ends()),
            "ignore_eos": True,  # the model's own end tokens are among stop_token_ids
        }
        if sampling.seed is not None:
            parameters["seed"] = (sampling.seed + len(self.sampled)) % (1 << 63)
        return parameters

    def take(self, output: Any, version: int) -> GenerateChunk | None:
        """Record a TokenOutput up to the token that ends the answer; None when it brought nothing.

        Args:
            version: of the weights, where the output does not say it.

        Raises:
            GenerateFailed: tokens without logprobs, which could not be trained.
        """
        tokens: list[int] = list(output.token_ids)
        logprobs: list[float] = list(output.log_probs or ())
        if len(logprobs) != len(tokens):
            raise GenerateFailed(f"the replica gave {len(tokens)} tokens and {len(logprobs)} logprobs")
        stamped = output.extra_fields.get("global_steps")
        reason, stop_string, kept = None, None, 0
        for token in tokens:
            self.sampled.append(token)
            kept += 1
            reason, stop_string = self._finish(token)
            if reason is not None:
                break
        if reason is None and output.stop_reason not in ("aborted", "abort"):
            reason = FinishReason.LENGTH if kept else FinishReason.STOP
        self.finished = reason is not None
        if not kept and reason is None:
            return None
        return GenerateChunk(
            tokens[:kept], logprobs[:kept], version if stamped is None else int(stamped), reason, stop_string
        )

    def _finish(self, token: int) -> tuple[FinishReason | None, str | None]:
        sampling = self.request.sampling
        if token in self._ends():
            return FinishReason.STOP, None
        if sampling.stop:
            longest = stop_bytes(sampling.stop)
            if (found := find_stop(self.sampled, sampling.stop, self.facts.decode, longest=longest)) is not None:
                return FinishReason.STOP, found
        return (FinishReason.LENGTH, None) if len(self.sampled) >= sampling.max_tokens else (None, None)

    def _ends(self) -> frozenset[int]:
        sampling = self.request.sampling
        own = frozenset() if sampling.ignore_eos else self.facts.eos_token_ids
        return own | frozenset(sampling.stop_token_ids)


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse what veRL's replicas cannot do, or would report with logprobs of another distribution."""
    if sampling.grammar is not None:
        raise RequestRefused("the engine verl does not constrain answers; send no grammar")
    if sampling.top_logprobs:
        raise RequestRefused("the engine verl reports the sampled token's logprob alone; ask for no top_logprobs")
    if sampling.top_p < 1.0 or sampling.top_k > 0:
        raise RequestRefused(
            "the engine verl reports logprobs after top_p and top_k, which cannot be trained; set sampling.top_p to 1 "
            "and sampling.top_k to 0 (sampling.pinned: true keeps requests to it)"
        )


def _end_process(reason: str) -> None:
    """The swarm server starts this process again from the last checkpoint."""
    log.critical("a replica on the GPUs died; ending", extra={"reason": reason})
    print(reason, flush=True)
    logging.shutdown()
    os._exit(1)
