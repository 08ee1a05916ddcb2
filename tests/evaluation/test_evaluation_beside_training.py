"""`evaluate` beside `train`: counts, versions and numbers are right, and training loses nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import httpx
import pytest

from swarmtune import AsyncSwarmClient
from swarmtune.errors import WeightsReplaced
from swarmtune.testing import LocalServer

TASKS = [f"t{n}" for n in range(4)]


async def ask(episode, text: str = "hello") -> None:
    body = {"model": "swarm", "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=60, verify=False) as http:
        (await http.post(f"{episode.base_url}/chat/completions", json=body)).raise_for_status()


async def rollout(task: str, episode) -> float:
    await ask(episode, task)
    return float((episode.seed or 0) % 2)


async def graded(task: str, episode) -> float:
    await ask(episode, task)
    return float(task in ("t0", "t1"))


async def test_evaluations_beside_a_training_have_their_versions_and_disturb_nothing(tmp_path, model):
    async with LocalServer(tmp_path / "data", model) as local, AsyncSwarmClient(local.url, patience_s=60) as swarm:
        await swarm.start(local.config(batch_tasks=2, repeats=2, **{"evaluation.hold_sync_s": 300.0}))
        kinds: Counter[str] = Counter()

        async def evaluate(version: int):
            done = await swarm.evaluate(TASKS, graded, k=2, version=version, name="test", temperature=0, parallel=3)
            kinds["evaluated"] += len(done.episodes)
            return done

        evaluating = [asyncio.create_task(evaluate(version)) for version in (0, 2, 3)]
        records = await swarm.train(TASKS, rollout, steps=4, parallel=4)
        results = [await task for task in evaluating]

        assert [r.step for r in records] == [1, 2, 3, 4]
        assert [r.metrics["episodes/trained"] for r in records] == [4] * 4
        assert [(r.weight_version, r.complete, r.mean.value) for r in results] == [(v, True, 0.5) for v in (0, 2, 3)]
        for result in results:
            assert {e.weight_versions for e in result.episodes} == {(result.weight_version,)}
            assert (result.pass_at[1].value, result.pass_at[2].value) == (0.5, 0.5)
        assert kinds["evaluated"] == 3 * 8 and (await swarm.pool()).episodes <= 4
        table = await swarm.evaluations("test")
        assert [(r.weight_version, r.state, r.episodes, r.sampling) for r in table] == [
            (v, "finished", 8, {"temperature": 0}) for v in (0, 2, 3)
        ]
        assert [r.mean and r.mean.value for r in table] == [0.5] * 3
        greedy = [q.sampling.temperature for q in local.backend.requests if q.lane == "evaluate"]
        assert greedy and set(greedy) == {0.0}


async def test_an_evaluation_overtaken_by_a_step_counts_what_belongs_to_its_weights(tmp_path, model, caplog):
    async with LocalServer(tmp_path / "data", model) as local, AsyncSwarmClient(local.url, patience_s=60) as swarm:
        await swarm.start(local.config(**{"evaluation.hold_sync_s": 0.0}))
        begun = 0

        async def slow(task: str, episode) -> float:
            nonlocal begun
            begun += 1
            await ask(episode, task)
            if begun == 2:  # the second one lives through a step
                for reward in (0.0, 1.0):
                    await local.run_episode("train", reward)
                await local.server.steps_after(0, wait_s=30)
                await ask(episode, "again")
            return 1.0

        done = await swarm.evaluate(TASKS, slow, k=1, parallel=1)
        assert [e.outcome for e in done.episodes] == ["counted", "mixed", "skipped", "skipped"]
        assert done.episodes[1].weight_versions == (0, 1)
        assert (done.mixed, done.skipped, done.failed, done.complete) == (1, 2, 0, False)
        assert done.rewards == {"t0": [1.0]} and done.weight_version == 0
        (row,) = await swarm.evaluations()
        assert (row.episodes, row.mixed, row.skipped) == (1, 1, 2)
        assert "1 episodes mixed, 2 not begun" in caplog.text


async def test_an_evaluation_without_a_countable_episode_says_what_to_do(tmp_path, model):
    async with LocalServer(tmp_path / "data", model) as local, AsyncSwarmClient(local.url, patience_s=60) as swarm:
        await swarm.start(local.config(**{"evaluation.hold_sync_s": 0.0}))

        async def overtaken(task: str, episode) -> float:
            await ask(episode, task)
            for reward in (0.0, 1.0):
                await local.run_episode("train", reward)
            await local.server.steps_after(0, wait_s=30)
            await ask(episode, "again")
            return 1.0

        with pytest.raises(RuntimeError, match="allow a longer hold_sync_s"):
            await swarm.evaluate(["only"], overtaken)
        with pytest.raises(WeightsReplaced):
            await swarm.evaluate(["only"], rollout, version=0)


async def test_a_start_that_takes_long_is_told(tmp_path, model, monkeypatch, caplog):
    monkeypatch.setattr("swarmtune.client._BOOT_TELL_S", 0.05)
    async with LocalServer(tmp_path / "data", model) as local, AsyncSwarmClient(local.url, patience_s=60) as swarm:
        go_on = asyncio.Event()

        class Slow(type(local._make_backend())):
            async def start(self, *args, **keys):
                await go_on.wait()
                return await super().start(*args, **keys)

        monkeypatch.setitem(local.server._backends, "scripted", Slow)
        with caplog.at_level(logging.INFO, "swarmtune.client"):
            starting = asyncio.create_task(swarm.start(local.config()))
            await local.until(lambda: "booting" in caplog.text)
            go_on.set()
            await starting
        assert "the server brings up" in caplog.text
