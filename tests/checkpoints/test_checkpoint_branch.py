"""A run that begins at a step of another one, and what a restart brings back.

Rules:
1. The run that is branched from is not changed by a byte, later steps included.
2. The branch has the checkpoint, the step records and the evaluations up to the step, and an empty pool.
3. A restarted server has in its pool what was accepted and not trained, and trains it once.
"""

from __future__ import annotations

import json

import pytest
from checkpoint_parts import snapshot, step, steps_on_disk, trained_episodes

from swarmtune.checkpoints import CheckpointError, StoredRun
from swarmtune.gateway.control import ControlRefused
from swarmtune.protocol import EvaluationOutcome, EvaluationRequest, Spread
from swarmtune.server import SwarmServer
from swarmtune.testing import LocalServer

KEEP = {"checkpoint.keep_last": 9}


async def leave_a_run(data, model, steps=4, **keys):
    """A training with some steps and one evaluation a step, its server gone; its folder."""
    async with LocalServer(data, model) as local:
        await local.boot(**KEEP, **keys)
        for number in range(steps):
            request = EvaluationRequest(evaluation_id=f"e{number}", name="test", tasks=1, k=1)
            await local.server.begin_evaluation(request)
            outcome = EvaluationOutcome(episodes=1, mean=Spread(value=number / 10))
            await local.server.finish_evaluation(f"e{number}", outcome)
            await step(local)
        await local.server.stop()
    return data / "runs" / "0001"


async def test_a_start_from_a_step_begins_a_new_run_and_leaves_the_old_one_alone(tmp_path, model):
    old = await leave_a_run(tmp_path / "data", model)
    before = snapshot(old)
    async with LocalServer(tmp_path / "data", model) as local:
        await local.server.start(local.config(**KEEP), from_step=2)
        status = await local.server.status_when(leaves="booting", wait_s=30)
        assert (status.state, status.step, status.weight_version, status.pooled_episodes) == ("rolling", 2, 2, 0)
        new = tmp_path / "data" / "runs" / "0002"
        assert status.run_dir == str(new)
        assert [r.step for r in await local.server.steps_after(0, wait_s=0)] == [1, 2]
        assert [e.weight_version for e in local.server.evaluations()] == [0, 1, 2]
        assert [json.loads(line)["step"] for line in (new / "metrics.jsonl").read_text().splitlines()] == [1, 2]
        assert await step(local) == 3
        assert trained_episodes(new, 3)[:4] == trained_episodes(old, 2)
        assert trained_episodes(new, 3) != trained_episodes(old, 3)
        assert steps_on_disk(new) == [2, 3]
    assert snapshot(old) == before
    assert StoredRun.read(new).history.meta["origin"] == {"run": str(old.resolve()), "step": 2}


async def test_a_branch_is_gone_on_with_after_a_restart(tmp_path, model):
    await leave_a_run(tmp_path / "data", model)
    async with LocalServer(tmp_path / "data", model) as local:
        await local.server.start(local.config(**KEEP), from_step=1)
        await local.server.status_when(leaves="booting", wait_s=30)
        await step(local)
    async with LocalServer(tmp_path / "data", model) as local:
        await local.server.status_when(leaves="booting", wait_s=30)
        status = local.server.status()
        assert (status.step, status.run_dir) == (2, str(tmp_path / "data" / "runs" / "0002"))


async def test_a_server_told_to_begin_at_a_step_of_another_folders_run_does(tmp_path, model):
    old = await leave_a_run(tmp_path / "data", model, seed=5)
    before = snapshot(old)
    server = SwarmServer(tmp_path / "elsewhere", from_step=3, from_run=str(old))
    try:
        await server.open()
        status = await server.status_when(leaves="booting", wait_s=30)
        assert (status.state, status.step, server.config()["seed"]) == ("rolling", 3, 5)
    finally:
        await server.close()
    assert snapshot(old) == before


async def test_another_configuration_may_begin_at_a_step(tmp_path, model):
    await leave_a_run(tmp_path / "data", model)
    async with LocalServer(tmp_path / "data", model) as local:
        await local.server.start(local.config(**KEEP, **{"optim.lr": 1e-4}), from_step=2, from_run="0001")
        await local.server.status_when(leaves="booting", wait_s=30)
        assert (local.server.status().step, local.server.config()["optim"]["lr"]) == (2, 1e-4)


async def test_a_step_without_a_checkpoint_is_refused_with_those_there_are(tmp_path, model):
    await leave_a_run(tmp_path / "data", model)
    async with LocalServer(tmp_path / "data", model) as local:
        with pytest.raises(ControlRefused, match="no checkpoint of step 7; there are: 1, 2, 3, 4") as refused:
            await local.server.start(local.config(**KEEP), from_step=7)
        assert refused.value.body.code == "not_found"
        assert local.server.status().state == "offline"
        assert len(list((tmp_path / "data" / "runs").iterdir())) == 1
    with pytest.raises(CheckpointError, match=r"no journal\.db is there"):
        server = SwarmServer(tmp_path / "other", from_step=1, from_run=str(tmp_path))
        try:
            await server.open()
        finally:
            await server.close()


async def test_a_live_training_is_not_taken_back_by_a_start(tmp_path, model):
    async with LocalServer(tmp_path / "data", model) as local:
        await local.boot(**KEEP)
        await step(local)
        with pytest.raises(ControlRefused, match="stop it first") as refused:
            await local.server.start(local.config(**KEEP), from_step=1)
        assert refused.value.body.code == "config_conflict"


async def test_a_start_from_a_step_that_is_repeated_joins_what_it_began(tmp_path, model):
    await leave_a_run(tmp_path / "data", model)
    async with LocalServer(tmp_path / "data", model) as local:
        for _ in range(2):
            await local.server.start(local.config(**KEEP), from_step=2)
        assert len(list((tmp_path / "data" / "runs").iterdir())) == 2


async def test_a_branch_that_the_disk_refuses_leaves_nothing(tmp_path, model, monkeypatch):
    await leave_a_run(tmp_path / "data", model)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async with LocalServer(tmp_path / "data", model) as local:
        with monkeypatch.context() as patch:
            patch.setattr("swarmtune.checkpoints.shutil.copytree", full)
            with pytest.raises(ControlRefused, match="free some space"):
                await local.server.start(local.config(**KEEP), from_step=2)
        assert [p.name for p in (tmp_path / "data" / "runs").iterdir()] == ["0001"]


async def test_the_pool_of_a_restarted_server_is_what_it_was_and_trains_once(tmp_path, model):
    keys = {"batch_tasks": 2, "checkpoint.every_steps": 1}
    async with LocalServer(tmp_path / "data", model) as local:
        await local.boot(**keys)
        for task in ("a", "b"):
            await local.run_episode(task, 0.0)
            await local.run_episode(task, 1.0)
        await local.server.steps_after(0, wait_s=30)
        await local.until(lambda: local.server.status().state == "rolling")
        waiting = [(await local.run_episode("c", reward)).episode_id for reward in (0.0, 1.0)]
        before = local.server.pool_view()
    async with LocalServer(tmp_path / "data", model) as local:
        await local.server.status_when(leaves="booting", wait_s=30)
        after = local.server.pool_view()
        assert (after.episodes, after.tasks_complete, after.step) == (before.episodes, before.tasks_complete, 2)
        ended = [(await local.run_episode("d", reward)).episode_id for reward in (0.0, 1.0)]
        await local.server.steps_after(1, wait_s=30)
        trained = local.backend.trained_episodes
        assert trained[4:] == waiting + ended and len(set(trained)) == len(trained) == 8
