"""Supervised warm-up with the real engine and trainer on the tiny model.

It says what it was taught, and a killed engine process changes nothing about the weights.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from swarmtune.client import AsyncSwarmClient
from swarmtune.config import TrainConfig
from swarmtune.protocol import EngineState, WarmupRequest
from swarmtune.server import SwarmServer
from swarmtune.testing import LocalServer

PATIENCE_S = 240
TAUGHT = "The sky over Lisbon is blue."
ASK = {"role": "user", "content": "Which colour has the sky over Lisbon?"}


def conversations() -> list[list[dict[str, str]]]:
    said = [TAUGHT, "One two three.", "No.", "Ask me later, please."]
    asked = [ASK["content"], "Count.", "Yes?", "Now?"]
    return [
        [{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in zip(asked, said, strict=True)
    ]


def config(**keys: object) -> dict[str, object]:
    base = {
        "model": "tiny",
        "trainer.dtype": "fp32",
        "engine.threads": 1,
        "engine.context_length": 256,
        "sampling.max_tokens": 32,
        "batch_tasks": 1,
        "repeats": 2,
        "checkpoint.every_steps": 2,
    }
    return TrainConfig.from_dict(base | keys).model_dump(mode="json")


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[LocalServer]:
    """A server in this event loop whose engine process is a real one."""
    local = LocalServer(tmp_path / "data", "tiny")
    local.server = SwarmServer(tmp_path / "data")
    await local.open()
    yield local
    await local.close()


async def boot(local: LocalServer, **keys: object) -> None:
    await local.server.start(config(**keys))
    status = await local.server.status_when(leaves=EngineState.BOOTING, wait_s=PATIENCE_S)
    assert status.state is EngineState.ROLLING, status.reason


async def test_loss_falls_and_the_model_says_the_taught_answer(real: LocalServer):
    await boot(real, **{"checkpoint.every_steps": 0})
    async with AsyncSwarmClient(real.url) as swarm:
        records = await swarm.warm_up(conversations(), steps=60, batch_size=4, lr=1e-2)
    losses = [r.metrics["sft/loss"] for r in records]
    assert losses[-1] < 0.1 < 1.0 < losses[0]
    grant = await real.claim("ask", kind="evaluate", sampling={"temperature": 0.0})
    answer = await real.chat(grant.api_key, ASK["content"])
    assert answer["choices"][0]["message"]["content"] == TAUGHT


async def test_a_killed_engine_process_leaves_the_weights_as_without_the_kill(tmp_path: Path):
    straight = await warmed_up(tmp_path / "straight", kill_after=None)
    killed = await warmed_up(tmp_path / "killed", kill_after=3)
    assert straight.keys() == killed.keys()
    assert all(torch.equal(straight[name], killed[name]) for name in straight)


async def warmed_up(data_dir: Path, *, kill_after: int | None) -> dict[str, torch.Tensor]:
    """The weights of the checkpoint after six steps; the engine process is killed after some of them."""
    local = LocalServer(data_dir, "tiny")
    local.server = SwarmServer(data_dir)
    await local.open()
    try:
        await boot(local)
        body = WarmupRequest(warmup_id="w", conversations=conversations(), steps=6, batch_size=3, lr=1e-3)
        await local.server.warm_up(body)
        if kill_after is not None:
            await done(local, kill_after)
            os.kill(local.server._backend._child.pid, signal.SIGKILL)  # type: ignore[union-attr]
        assert await done(local, 6) == [1, 2, 3, 4, 5, 6]
        return await saved_weights(local, step=6)
    finally:
        await local.close()


async def done(local: LocalServer, steps: int) -> list[int]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            view = await local.server.warmup_when("w", after=steps - 1, wait_s=5)
            if len(view.done) >= steps:
                return view.done


async def test_two_servers_train_an_adapter_each_on_one_base_models_files(tmp_path: Path):
    servers = [LocalServer(tmp_path / name, "tiny") for name in ("a", "b")]
    for name, local in zip(("a", "b"), servers, strict=True):
        local.server = SwarmServer(tmp_path / name)
        await local.open()
    try:
        keys = {"lora.rank": 4, "checkpoint.every_steps": 2}
        await asyncio.gather(*(boot(local, **keys, seed=n) for n, local in enumerate(servers)))
        for n, local in enumerate(servers):
            body = WarmupRequest(warmup_id="w", conversations=conversations()[n : n + 1], steps=2, lr=1e-2)
            await local.server.warm_up(body)
        first, second = [await saved_weights(local, step=2) for local in servers]
        base = {name for name in first if "lora_" not in name}
        assert base and all(torch.equal(first[name], second[name]) for name in base)
        assert any(not torch.equal(first[name], second[name]) for name in first.keys() - base)
    finally:
        for local in servers:
            await local.close()


async def saved_weights(local: LocalServer, step: int) -> dict[str, torch.Tensor]:
    """Of the checkpoint of that step, once it is there."""
    await local.until(lambda: [c.step for c in local.server.checkpoints()][-1:] == [step], PATIENCE_S)
    (file,) = Path(local.server.checkpoints()[-1].path).glob("model_world_size_1_rank_0.pt")
    state = torch.load(file, weights_only=False)
    return {k: v.to_local() if hasattr(v, "to_local") else v for k, v in state.items()}
