"""The engine vllm: real vLLM servers on this machine generate; weights go there after each update.

Token ids go in, token ids and logprobs come back as they are sampled. What always holds: an answer that is cut off by a
weight sync, or because its server died, goes on elsewhere or later from the tokens it has, prefilled again, so every
token was sampled with exactly the weights its version names and with keys and values of those weights alone. A
constrained answer cannot be taken up in the middle of its grammar: it is delivered whole, and begun anew when cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from tokenizers import Tokenizer

from swarmtune.backend import GenerateFailed, RequestRefused, StartFailed
from swarmtune.config import TrainConfig
from swarmtune.engines.answers import Decode, check_request, find_stop, stop_bytes
from swarmtune.engines.engine import NamedTensors, SaveAdapter
from swarmtune.engines.vllm_client import Interrupted, Piece, Unreachable, VllmClient
from swarmtune.engines.vllm_replicas import Replica, Replicas
from swarmtune.engines.vllm_server import SERVED_NAME, Server, make_servers, sends_adapter
from swarmtune.engines.vllm_sync import AdapterSync, FileSync, IpcSync, label_of
from swarmtune.types import FinishReason, GenerateChunk, GenerateRequest, Lane, SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MAX_FAILURES = 4
"""Tries of one generation in a row without a token, on servers that are well, until it fails."""
MAX_DEATHS = 3
"""Servers that die in a row under one generation without a token until it fails: it may be what kills them."""
RETRY_S = 0.2
HEALTH_S = 10.0
_PROBE_TEMPERATURE = 2.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What requests are checked against, read from a Hugging Face folder."""

    vocabulary: int
    context_length: int
    eos_token_ids: frozenset[int]
    decode: Decode

    @classmethod
    def read(cls, folder: Path, *, wanted_context: int) -> ModelFacts:
        """Raises:
        OSError, ValueError, KeyError: not a model's folder.
        """
        config = json.loads((folder / "config.json").read_text())
        generation = folder / "generation_config.json"
        ends = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
        ends = config.get("eos_token_id") if ends is None else ends
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return cls(
            vocabulary=int(config["vocab_size"]),
            context_length=min(wanted_context, config.get("max_position_embeddings") or wanted_context),
            eos_token_ids=frozenset([ends] if isinstance(ends, int) else ends or ()),
            decode=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        )


class VllmEngine:
    """See the module's text; `engine.Engine` says what each method promises."""

    def __init__(
        self,
        config: TrainConfig,
        facts: ModelFacts,
        servers: list[Server],
        torch_thread: ThreadPoolExecutor,
        *,
        work_dir: Path,
        end_process: Callable[[str], None] | None = None,
    ) -> None:
        self.context_length = facts.context_length
        self.takes_adapter = sends_adapter(config)
        self._config = config
        self._facts = facts
        self._torch_thread = torch_thread
        self._version = 0
        self._started = False
        self._whole = True
        """Whether logprobs are of the whole distribution: servers started through vllm_launch say so."""
        self._sync = _make_sync(config, work_dir / "vllm-weights")
        self._replicas = Replicas(servers, self._sync, on_all_given_up=end_process or _end_process)
        slots, count = config.evaluation.slots, len(servers)
        train = asyncio.Semaphore(config.engine.max_batch * count)
        self._lanes: dict[Lane, asyncio.Semaphore] = {
            "train": train,
            "evaluate": asyncio.Semaphore(slots * count) if slots else train,
        }

    @classmethod
    def load(cls, config: TrainConfig, model_path: Path, torch_thread: ThreadPoolExecutor, *, work_dir: Path) -> Self:
        """Prepares alone: the servers are started with the first weights.

        Raises:
            StartFailed: no interpreter with vLLM.
        """
        facts = ModelFacts.read(model_path, wanted_context=config.engine.context_length)
        servers = make_servers(config, model_path, work_dir, context_length=facts.context_length)
        return cls(config, facts, servers, torch_thread, work_dir=work_dir)

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def constrains(self) -> bool:
        return self._whole

    # Generation.

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        check_request(request, vocabulary=self._facts.vocabulary, context_length=self.context_length)
        self._check_sampling(request.sampling)
        answer = _Answer(request, self._facts, labels=self._sync.labels)
        async with self._lanes[request.lane]:
            while not answer.finished:
                async with contextlib.aclosing(self._attempt(request.episode_id, answer)) as chunks:
                    async for chunk in chunks:
                        yield chunk

    async def _attempt(self, episode_id: str, answer: _Answer) -> AsyncGenerator[GenerateChunk, None]:
        """Generate on one server, as far as it gets."""
        async with self._replicas.place(episode_id) as (replica, client):
            assert replica.version is not None
            version = replica.version
            pieces = client.generate(answer.body(replica.model), top=answer.request.sampling.top_logprobs)
            try:
                async with contextlib.aclosing(pieces):
                    async for piece in pieces:
                        if piece.finish_reason == "abort":  # by somebody else, or a pause that came first
                            raise Interrupted
                        for chunk in answer.take(piece, version):
                            yield chunk
                        if answer.finished:
                            return
            except Interrupted:
                answer.cut_off()
            except _Mislabelled as error:
                self._replicas.suspect(replica)
                raise GenerateFailed(str(error)) from error
            except Unreachable as error:
                await self._note_failure(replica, client, answer, error)

    async def _note_failure(self, replica: Replica, client: VllmClient, answer: _Answer, error: Unreachable) -> None:
        """Another try follows, unless a server that is well fails again and again, or servers die of it.

        Raises:
            GenerateFailed
        """
        answer.cut_off()
        if replica.client is not client or not await client.healthy(timeout_s=HEALTH_S):
            if replica.client is client:
                self._replicas.suspect(replica)
            answer.deaths += 1
            if answer.deaths >= MAX_DEATHS:
                raise GenerateFailed(f"{answer.deaths} vLLM servers died under this request: {error}") from error
            return
        answer.failures += 1
        if answer.failures >= MAX_FAILURES:
            raise GenerateFailed(str(error)) from error
        await asyncio.sleep(RETRY_S * answer.failures)

    def _check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse what servers that were started otherwise than by us would record wrongly."""
        if self._whole:
            return
        if sampling.grammar is not None:
            raise RequestRefused("this engine does not constrain answers; send no grammar")
        if sampling.temperature not in (0.0, 1.0):
            raise RequestRefused(
                f"temperature {sampling.temperature}: the attached vLLM reports logprobs for temperature 1 alone; ask "
                "for temperature 1 or 0, or start it through swarmtune/engines/vllm_launch.py"
            )

    # Weights.

    async def pause(self, *, drain_s: float) -> None:
        self._replicas.hold()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._replicas.wait_idle()
        self._replicas.interrupt()

    async def load_weights(self, tensors: NamedTensors, *, version: int) -> None:
        sync = self._sync
        if isinstance(sync, AdapterSync):
            raise ValueError("this engine was configured to take adapters (engine.vllm.lora); call load_adapter")
        await self._take(lambda: sync.stage(tensors, version), version)

    async def load_adapter(self, save: SaveAdapter, *, version: int) -> None:
        sync = self._sync
        assert isinstance(sync, AdapterSync)
        await self._take(lambda: sync.stage(save, version), version)

    async def _take(self, stage: Callable[[], None], version: int) -> None:
        """Stage weights, while the servers come up if they have not yet, and hand them over.

        Raises:
            StartFailed: a server does not come up.
            ValueError: a server does not take the weights.
        """
        coming_up = None if self._started else asyncio.create_task(self._replicas.come_up())
        try:
            await self._on_torch_thread(stage)
        except BaseException:
            if coming_up is not None:
                coming_up.cancel()
            raise
        if coming_up is not None:
            await coming_up
        try:
            await self._replicas.hand_over(version)
        except* RequestRefused as refusals:
            raise ValueError(f"vLLM did not take the weights: {refusals.exceptions[0]}") from refusals
        self._version = version
        if not self._started:
            self._started = True
            try:
                self._whole = await self._reports_whole_distribution()
            except (Unreachable, Interrupted, RequestRefused) as error:
                raise StartFailed(
                    f"vLLM fails at its first tokens: {error}; {self._replicas.last_words()}; "
                    "if it cannot compute this model, set engine.kind to hf"
                ) from error

    async def resume(self) -> None:
        self._replicas.release()

    async def close(self) -> None:
        self._replicas.hold()
        self._replicas.interrupt()
        await self._replicas.close()
        self._sync.forget(keep=None)

    async def _reports_whole_distribution(self) -> bool:
        """Whether every server's logprobs know the temperature and no cut: `vllm_launch` sees to it.

        Raises:
            StartFailed: they are of the cut distribution; nothing can be recorded truly.
        """
        values = [await self._probe(client) for client in self._replicas.clients]
        if any(value == 0.0 for value, _ in values):
            raise StartFailed(
                "the attached vLLM server reports logprobs after top_k: start it without --logprobs-mode, or through "
                "swarmtune/engines/vllm_launch.py"
            )
        whole = all(value != plain for value, plain in values)
        if not whole:
            log.warning("logprobs of the attached vLLM are right at temperature 1 alone; others are refused")
        return whole

    async def _probe(self, client: VllmClient) -> tuple[float, float]:
        """(logprob of the most likely token at temperature 2 when top_k leaves only it, the same at temperature 0)."""
        prompt = sorted(self._facts.eos_token_ids)[:1] or [0]
        replica_model = self._replicas.model_of(client)
        values = []
        for settings in ({"temperature": _PROBE_TEMPERATURE, "top_k": 1}, {"temperature": 0.0}):
            body = {
                "model": replica_model,
                "token_ids": prompt,
                "sampling_params": {"max_tokens": 1, "logprobs": 0, "ignore_eos": True, "detokenize": False} | settings,
            }
            async with contextlib.aclosing(client.generate(body)) as pieces:
                values += [piece.logprobs[0] async for piece in pieces if piece.logprobs]
        return values[0], values[1]

    async def _on_torch_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch_thread, work)


class _Mislabelled(Exception):
    """The server answered with other weights than it was given, as one that was started anew behind our back."""


@dataclass(slots=True)
class _Answer:
    """One generation over all its attempts."""

    request: GenerateRequest
    facts: ModelFacts
    labels: bool
    """Whether the server labels its answers with the weights' version."""
    sampled: list[int] = field(default_factory=list)
    finished: bool = False
    failures: int = 0
    """In a row without a token, on servers that were well."""
    deaths: int = 0
    """Of servers, in a row without a token."""
    _withheld: list[GenerateChunk] = field(default_factory=list)
    """Of a constrained answer, until it is whole."""

    def body(self, model: str) -> dict[str, Any]:
        """vLLM's request for what is still to come."""
        sampling = self.request.sampling
        params: dict[str, Any] = {
            "max_tokens": sampling.max_tokens - len(self.sampled),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            # vLLM counts the sampled token among them, whatever its rank; none asked for means that one alone.
            "logprobs": sampling.top_logprobs + 1 if sampling.top_logprobs else 0,
            "stop_token_ids": sorted(self._ends()),
            "ignore_eos": True,  # the model's own end tokens are among stop_token_ids
            "detokenize": False,
        }
        if sampling.seed is not None:
            params["seed"] = (sampling.seed + len(self.sampled)) % (1 << 63)
        if sampling.grammar is not None:
            params["structured_outputs"] = {"grammar": sampling.grammar}
        return {
            "model": model,
            "token_ids": [*self.request.prompt_token_ids, *self.sampled],
            "sampling_params": params,
        }

    def take(self, piece: Piece, version: int) -> list[GenerateChunk]:
        """Record a piece; the chunks that are to be delivered now.

        Raises:
            _Mislabelled
        """
        if self.labels and piece.weight_labels - {label_of(version)}:
            raise _Mislabelled(f"sampled by weights {sorted(piece.weight_labels)}, not by {label_of(version)}")
        chunk = self._chunk(piece, version)
        if chunk.token_ids:
            self.failures = self.deaths = 0
        self.finished = chunk.finish_reason is not None
        if self.request.sampling.grammar is None:
            return [chunk] if chunk.token_ids or self.finished else []
        self._withheld.append(chunk)
        return self._withheld if self.finished else []

    def cut_off(self) -> None:
        """The attempt is over, and another one follows."""
        if self._withheld:
            self._withheld = []
            self.sampled = []

    def _chunk(self, piece: Piece, version: int) -> GenerateChunk:
        """The piece up to the token that ends the answer."""
        reason, stop_string, kept = None, None, 0
        for token in piece.token_ids:
            self.sampled.append(token)
            kept += 1
            reason, stop_string = self._finish(token)
            if reason is not None:
                break
        if reason is None and piece.finish_reason is not None:
            reason = FinishReason.STOP if piece.finish_reason == "stop" else FinishReason.LENGTH
        top = None if piece.top_logprobs is None else piece.top_logprobs[:kept]
        return GenerateChunk(piece.token_ids[:kept], piece.logprobs[:kept], version, reason, stop_string, top)

    def _finish(self, token: int) -> tuple[FinishReason | None, str | None]:
        sampling = self.request.sampling
        if token in self._ends():
            return FinishReason.STOP, None
        if sampling.stop:
            longest = stop_bytes(sampling.stop)
            if (found := find_stop(self.sampled, sampling.stop, self.facts.decode, longest=longest)) is not None:
                return FinishReason.STOP, found
        if len(self.sampled) >= sampling.max_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def _ends(self) -> frozenset[int]:
        sampling = self.request.sampling
        own = frozenset() if sampling.ignore_eos else self.facts.eos_token_ids
        return own | frozenset(sampling.stop_token_ids)


def _make_sync(config: TrainConfig, folder: Path) -> FileSync | AdapterSync | IpcSync:
    dtype = DTYPES[config.engine.vllm.dtype or config.trainer.dtype]
    if sends_adapter(config):
        return AdapterSync(folder)
    if config.engine.vllm.sync == "ipc":
        return IpcSync(dtype, SERVED_NAME)
    return FileSync(folder, dtype, SERVED_NAME)


def _end_process(reason: str) -> None:
    """No server can be brought up: the swarm server starts this process again from the last checkpoint, or gives up."""
    log.critical("no vLLM server can be brought up; ending", extra={"reason": reason})
    print(f"no vLLM server can be brought up: {reason}", flush=True)
    logging.shutdown()
    os._exit(1)
