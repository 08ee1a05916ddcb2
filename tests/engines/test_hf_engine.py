"""The embedded engine beside a real trainer: pause, new weights, resume, errors."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from swarmtune.backend import GenerateFailed
from swarmtune.config import TrainConfig
from swarmtune.engines.hf import DTYPES, HFEngine, UnsupportedModel, load_model
from swarmtune.types import FinishedEpisode, GenerateChunk, GenerateRequest, Sample, SamplingParams, TrainBatch

SAFETY_S = 60.0
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


def make_config(folder: Path, dtype: str = "fp32") -> TrainConfig:
    return TrainConfig.from_dict(
        {
            "model": str(folder),
            "trainer.dtype": dtype,
            "optim.lr": 1e-2,
            "engine.context_length": 1024,
            "engine.max_batch": 4,
        }
    )


@pytest_asyncio.fixture
async def engine(long_folder) -> AsyncIterator[HFEngine]:
    with ThreadPoolExecutor(1) as torch_thread:
        engine = HFEngine.load(make_config(long_folder), long_folder, torch_thread, work_dir=long_folder)
        yield engine
        await engine.close()


async def ask(engine: HFEngine, name: str, sampling: SamplingParams = LONG) -> list[GenerateChunk]:
    return [chunk async for chunk in engine.generate(GenerateRequest(name, [1, 2, 3], sampling))]


def scaled(engine: HFEngine, factor: float) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor * factor) for name, tensor in engine.model.state_dict().items()]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
async def test_after_a_sync_engine_and_trainer_have_the_same_weights(model_folder, dtype, tmp_path):
    from swarmtune.trainer.trainer import Trainer

    config = make_config(model_folder, dtype)
    with ThreadPoolExecutor(1) as torch_thread:
        engine = HFEngine.load(config, model_folder, torch_thread, work_dir=model_folder)
        trainer = Trainer(config, model_folder, work_dir=tmp_path)
        trainer.start()
        before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
        trainer.update(rewarded_batch())
        await engine.pause(drain_s=0)
        await engine.load_weights(trainer.weights, version=1)
        await engine.resume()
        after = engine.model.state_dict()
        trained = {name: tensor.clone() for name, tensor in trainer.weights()}
        trainer.close()
    differences = {name: float((t.to(DTYPES[dtype]) - after[name]).abs().max()) for name, t in trained.items()}
    assert max(differences.values()) == 0
    assert any((before[name] != after[name]).any() for name in after)
    assert engine.weight_version == 1


def rewarded_batch() -> TrainBatch:
    episodes = []
    for i in range(4):
        sampled = [10 + i, 20 + i, 30 + i]
        sample = Sample(
            f"s{i}", f"e{i}", "task", [1, 2, *sampled], [0, 0, 1, 1, 1], [0.0, 0.0, -5, -5, -5], [-1, -1, 0, 0, 0]
        )
        episodes.append(FinishedEpisode(f"e{i}", "task", float(i % 2), [sample]))
    return TrainBatch(1, episodes)


async def test_pause_lets_running_ones_finish_while_new_ones_wait(engine):
    running = asyncio.create_task(ask(engine, "running"))
    await until_running(engine)
    pausing = asyncio.create_task(engine.pause(drain_s=SAFETY_S))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(ask(engine, "waiting", SamplingParams(max_tokens=2)))
    await pausing
    assert len(await running) == 400
    assert not waiting.done()
    await engine.load_weights(lambda: scaled(engine, 1.0), version=3)
    await engine.resume()
    assert {c.weight_version for c in await waiting} == {3}


async def test_generation_longer_than_the_drain_goes_on_under_the_new_weights(engine):
    stream = engine.generate(GenerateRequest("long", [1, 2, 3], LONG))
    chunks = [await anext(stream)]
    await engine.pause(drain_s=0)
    await engine.load_weights(lambda: scaled(engine, 1.1), version=1)
    await engine.resume()
    chunks += [chunk async for chunk in stream]
    versions = [c.weight_version for c in chunks]
    assert len(versions) == 400
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}


async def test_error_in_the_model_ends_its_requests_and_not_the_engine(engine):
    handle = engine.model.register_forward_pre_hook(lambda *_: exec("raise RuntimeError('broken kernel')"))
    results = await asyncio.gather(*[ask(engine, f"r{i}") for i in range(6)], return_exceptions=True)
    assert all(isinstance(r, GenerateFailed) and "broken kernel" in str(r) for r in results)
    handle.remove()
    assert len(await ask(engine, "well again")) == 400


async def test_chunks_of_an_aborted_request_never_reach_a_later_one_of_the_same_id(engine):
    for _ in range(20):
        stream = engine.generate(GenerateRequest("same", [1], LONG))
        await anext(stream)
        await stream.aclose()
        assert len(await ask(engine, "same", SamplingParams(max_tokens=5, ignore_eos=True))) == 5


async def test_closing_the_iterator_ends_the_work(engine):
    stream = engine.generate(GenerateRequest("gone", [1], LONG))
    await anext(stream)
    await stream.aclose()
    await engine.pause(drain_s=SAFETY_S)
    assert not engine._batch.has_work


def test_model_with_a_narrow_attention_window_is_refused(tmp_path):
    from transformers import MistralConfig

    MistralConfig(sliding_window=64).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"64 tokens; set engine\.context_length"):
        load_model(tmp_path, torch.float32, context_length=65)


async def until_running(engine: HFEngine) -> None:
    async with asyncio.timeout(SAFETY_S):
        while not engine._batch.has_running:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0.001)
