"""The embedded engine: a transformers model in this process, requests in a rolling batch, weights copied in memory.

Computes on the torch thread it is given, one round at a time, so a weight update queued there falls between two tokens.
Requests wait while the engine is paused; what is still running when the drain time is over keeps its tokens and goes on
under the new weights, each chunk stamped with the version that sampled it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from swarmtune.backend import GenerateFailed
from swarmtune.config import TrainConfig
from swarmtune.engines.answers import Decode
from swarmtune.engines.constraint import Grammars, can_constrain
from swarmtune.engines.engine import NamedTensors, SaveAdapter
from swarmtune.engines.rolling import ATTENTION, Emission, RollingBatch
from swarmtune.types import GenerateChunk, GenerateRequest

log = logging.getLogger(__name__)

T = TypeVar("T")

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class UnsupportedModel(ValueError):
    """A model whose attention this engine cannot compute."""


class HFEngine:
    """See the module's text; `engine.Engine` says what each method promises."""

    def __init__(self, batch: RollingBatch, torch_thread: ThreadPoolExecutor) -> None:
        self.context_length = batch.context_length
        self.constrains = batch.constrains
        self.takes_adapter = False
        self._batch = batch
        self._torch_thread = torch_thread
        self._streams: dict[str, asyncio.Queue[GenerateChunk | Exception]] = {}
        self._keys = itertools.count()
        self._wake = asyncio.Event()
        self._paused = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._pump: asyncio.Task[None] | None = None

    @classmethod
    def load(cls, config: TrainConfig, model_path: Path, torch_thread: ThreadPoolExecutor, *, work_dir: Path) -> Self:
        wanted = config.engine.context_length
        model = load_model(model_path, DTYPES[config.trainer.dtype], context_length=wanted)
        tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
        ends = eos_token_ids(model)
        batch = RollingBatch(
            model,
            max_batch=config.engine.max_batch,
            evaluation_slots=config.evaluation.slots,
            context_length=min(wanted, getattr(model.config, "max_position_embeddings", None) or wanted),
            decode=_decoder(tokenizer),
            eos_token_ids=ends,
            seed=config.seed,
            grammars=Grammars(model_path / "tokenizer.json", ends) if ends and can_constrain() else None,
        )
        return cls(batch, torch_thread)

    @property
    def weight_version(self) -> int:
        return self._batch.weight_version

    @property
    def model(self) -> PreTrainedModel:
        return self._batch.model

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        if request.sampling.grammar is not None:
            await asyncio.to_thread(self._batch.compile, request.sampling.grammar)
        # A key of our own: chunks of an aborted request must not reach a later one with the same id.
        key = str(next(self._keys))
        self._batch.submit(replace(request, request_id=key))
        stream = self._streams[key] = asyncio.Queue()
        self._start_pump()
        self._wake.set()
        finished = False
        try:
            while not finished:
                item = await stream.get()
                if isinstance(item, Exception):
                    finished = True
                    raise GenerateFailed(f"{type(item).__name__}: {item}") from item
                finished = item.finish_reason is not None
                yield item
        finally:
            del self._streams[key]
            if not finished:
                self._batch.abort(key)
                self._wake.set()

    async def pause(self, *, drain_s: float) -> None:
        self._paused = True
        self._wake.set()
        try:
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        await self._on_torch_thread(self._batch.hold)

    async def load_weights(self, tensors: NamedTensors, *, version: int) -> None:
        await self._on_torch_thread(lambda: self._batch.take_weights(tensors(), version))

    async def load_adapter(self, save: SaveAdapter, *, version: int) -> None:
        raise ValueError("the embedded engine takes all weights, with the adapter merged; call load_weights")

    async def resume(self) -> None:
        self._paused = False
        self._wake.set()

    async def close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])
            self._pump = None

    def _start_pump(self) -> None:
        if self._pump is None:
            self._pump = asyncio.create_task(self._run(), name="hf-engine")

    async def _run(self) -> None:
        """Step while there is work; deliver each round's chunks while the next one computes."""
        delivered: list[Emission] = []
        while True:
            if not self._may_step():
                self._deliver(delivered)
                delivered = []
                self._idle.set()
                self._wake.clear()
                if not self._may_step():
                    await self._wake.wait()
                continue
            self._idle.clear()
            step = asyncio.get_running_loop().run_in_executor(self._torch_thread, self._step)
            self._deliver(delivered)
            try:
                delivered = await step
            except Exception as error:
                log.exception("a generation step failed")
                delivered = []
                self._batch.clear()
                for stream in self._streams.values():
                    stream.put_nowait(error)

    def _step(self) -> list[Emission]:
        return self._batch.step(admit=not self._paused)

    def _may_step(self) -> bool:
        return self._batch.has_running if self._paused else self._batch.has_work

    def _deliver(self, emissions: list[Emission]) -> None:
        for key, item in emissions:
            if (stream := self._streams.get(key)) is not None:
                stream.put_nowait(item)
            elif isinstance(item, GenerateChunk) and item.finish_reason is None:
                self._batch.abort(key)

    async def _on_torch_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch_thread, work)


def load_model(model_path: Path, dtype: torch.dtype, *, context_length: int) -> PreTrainedModel:
    """The causal model of a Hugging Face folder, ready for a RollingBatch. Never asks the hub.

    Raises:
        UnsupportedModel: some layer sees less than the whole context, or is no attention at all, or there is no head.
    """
    _check_attention(AutoConfig.from_pretrained(model_path, local_files_only=True), context_length)
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=dtype, attn_implementation=ATTENTION, local_files_only=True
    )
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModel(f"{model_path}: the model has no output layer; take a causal language model")
    head.register_forward_pre_hook(_contiguous_input)
    return model.eval().requires_grad_(False)


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Every token that ends an answer, by generation_config.json or else config.json."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    if configured is None:
        configured = model.config.eos_token_id
    if configured is None:
        return frozenset()
    return frozenset([configured] if isinstance(configured, int) else configured)


def _check_attention(config: PreTrainedConfig, context_length: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < context_length:
        raise UnsupportedModel(
            f"{config.model_type}: its attention window is {window} tokens; set engine.context_length to that or less"
        )
    if not kinds <= {"full_attention", "sliding_attention"} or getattr(config, "attn_logit_softcapping", None):
        raise UnsupportedModel(
            f"{config.model_type}: the embedded engine computes plain attention only, not {', '.join(sorted(kinds))}"
            " or soft-capped scores; take a Llama, Qwen or Mistral model"
        )


def _contiguous_input(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The last column of a prefill is a strided view, for which torch's linear copies the whole head once per row."""
    return (args[0].contiguous(), *args[1:])


def _decoder(tokenizer: Tokenizer) -> Decode:
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)
