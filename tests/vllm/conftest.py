"""Engines over stand-ins of vLLM's server, and a small model that vLLM can run on a CPU."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from swarmtune import models
from swarmtune.config import TrainConfig
from swarmtune.engines.vllm import ModelFacts, VllmEngine

# importmode=importlib puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
from stand_in import StandIn

FACTS = ModelFacts(
    vocabulary=100_000,
    context_length=4096,
    eos_token_ids=frozenset({99_999}),
    decode=lambda tokens: "".join(f"<{token % 1000}>" for token in tokens),
)


def make_config(**keys: Any) -> TrainConfig:
    base = {"model": "tiny", "engine.kind": "vllm", "trainer.dtype": "fp32", "engine.context_length": 4096}
    return TrainConfig.from_dict(base | keys)


def tensors() -> list[tuple[str, torch.Tensor]]:
    return [("weight", torch.zeros(2, 2))]


@pytest_asyncio.fixture
async def make_engine(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[VllmEngine]]]:
    """`await make_engine(server, …)`: an engine with weights 0 over stand-ins."""
    made: list[VllmEngine] = []
    thread = ThreadPoolExecutor(1)

    async def make(*servers: StandIn, start: bool = True, end_process: Any = None, **keys: Any) -> VllmEngine:
        engine = VllmEngine(
            make_config(**keys), FACTS, list(servers), thread, work_dir=tmp_path, end_process=end_process
        )
        made.append(engine)
        if start:
            await engine.load_weights(tensors, version=0)
        return engine

    yield make
    for engine in made:
        await engine.close()
    thread.shutdown()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The catalogue's tiny model with heads of 32, the smallest that vLLM computes on a CPU, and sharper weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    source, folder = models.resolve("tiny"), tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**json.loads((source / "config.json").read_text()) | {"head_dim": 32}))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3 if "embed" in name else 0.15)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    return folder
