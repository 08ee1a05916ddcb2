"""batching.overlap with the embedded engine: decode steps go on during an update, which comes out the same."""

from __future__ import annotations

import asyncio

import pytest

from swarmtune.engines.process import ProcessBackend
from swarmtune.types import GenerateChunk, GenerateRequest
from tests.engines.test_engine_process import LONG, PROMPT, SAFETY_S, ask, make_batch, make_config, tokens

SAME_LOSS = {"algorithm.rollout_correction": {"rollout_is": "token"}}


async def started(folder, work_dir, **keys: object) -> ProcessBackend:
    backend = ProcessBackend()
    work_dir.mkdir()
    await backend.start(make_config(folder, **SAME_LOSS, **keys), work_dir=work_dir, resume=None)
    return backend


async def test_generation_goes_on_during_an_update_whose_weights_are_those_of_one_alone(long_folder, tmp_path):
    overlapping = await started(long_folder, tmp_path / "overlapping", **{"batching.overlap": True})
    alone = await started(long_folder, tmp_path / "alone")
    try:
        batch = await make_batch(overlapping, 1)
        stream = overlapping.generate(GenerateRequest("long", PROMPT, LONG))
        chunks: list[GenerateChunk] = []

        async def listen() -> None:
            async for chunk in stream:
                chunks.append(chunk)

        listening = asyncio.create_task(listen())
        async with asyncio.timeout(SAFETY_S):
            while not chunks:  # noqa: ASYNC110 - the engine process sets no event
                await asyncio.sleep(0.01)
            before = len(chunks)
            result = await overlapping.train(batch)
            during = [chunk for chunk in chunks[before:] if chunk.weight_version == 0]
            while chunks[-1].weight_version != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            expected = await alone.train(batch)
        listening.cancel()
        assert len(during) > 3, "tokens came while the update computed"
        assert "s/drain" not in result.metrics and "s/weight_sync" in result.metrics
        versions = [chunk.weight_version for chunk in chunks]
        assert versions == sorted(versions), "each token has the version that sampled it"
        assert sum(len(chunk.logprobs) for chunk in chunks) == len(tokens(chunks))
        for name in ("actor/grad_norm", "actor/pg_loss"):
            assert result.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4)
        ours, theirs = await ask(overlapping, "after"), await ask(alone, "after")
        assert tokens(ours) == tokens(theirs)
        assert [c.logprobs[0] for c in ours] == pytest.approx([c.logprobs[0] for c in theirs], abs=1e-4)
    finally:
        await overlapping.stop()
        await alone.stop()
