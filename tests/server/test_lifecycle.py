"""Starting, joining, failing, losing the engine, stopping: the state machine as clients see it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import swarmtune
from swarmtune.backend import StartFailed, UpdateFailed
from swarmtune.config import ConfigError
from swarmtune.gateway.control import ControlRefused
from swarmtune.journal import BatchPlanned, JournalError
from swarmtune.protocol import TRANSITIONS, Code, EngineState
from swarmtune.testing import LocalServer


async def post(local: LocalServer, path: str, body=None, **headers: str):
    async with local.http.post(path, json=body if body is not None else {}, headers=headers) as response:
        return response.status, await response.json()


async def states(local: LocalServer) -> list[str]:
    return [e.data["state"] for e in await local.server.events.after(0) if e.kind == "state"]


async def step(local: LocalServer) -> int:
    """Run one batch of two episodes and wait until its step is done, checkpoint and all."""
    before = local.server.status().step
    for n in range(2):
        await local.run_episode(f"task-{before}", float(n))
    records = await local.server.steps_after(before, wait_s=20)
    await local.server.status_when(leaves=EngineState.WEIGHT_SYNCING, wait_s=20)
    return records[-1].step


async def test_a_server_starts_bare_and_says_so(local):
    async with local.http.get("/v1/status") as response:
        status = await response.json()
    assert (status["state"], status["model"]) == ("offline", None)
    status, body = await post(local, "/v1/episodes", {"task_id": "t"})
    assert (status, body["error"]["code"]) == (409, "not_started")


async def test_start_answers_at_once_and_the_long_poll_says_when_it_is_up(local):
    status, body = await post(local, "/v1/start", {"config": local.config()})
    assert (status, body["state"]) == (200, "booting")
    async with local.http.get("/v1/status", params={"while": "booting", "wait_s": "30"}) as response:
        assert (await response.json())["state"] == "rolling"


async def test_the_same_configuration_joins_and_another_conflicts_with_the_differences(local):
    await local.boot()
    status, body = await post(local, "/v1/start", {"config": local.config()})
    assert (status, body["state"]) == (200, "rolling")
    status, body = await post(local, "/v1/start", {"config": local.config(**{"optim.lr": 0.5, "repeats": 3})})
    assert (status, body["error"]["code"]) == (409, "config_conflict")
    assert body["error"]["details"]["differences"] == {"optim.lr": [1e-6, 0.5], "repeats": [2, 3]}


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"model": "tiny", "reapeats": 4}, "bad_config", "did you mean 'repeats'"),
        ({"model": "tiny", "repeats": 1}, "bad_config", "set repeats to 2 or more"),
        ({"model": "tiny", "sampling.max_tokens": 4096}, "bad_config", "leaves no room for a prompt"),
        ({"model": "no-such-model"}, "unknown_model", "known names: "),
        ({"model": "/no/such/folder"}, "unknown_model", "no such model or folder"),
        ({}, "bad_config", "model"),
    ],
)
async def test_a_wrong_configuration_is_refused_with_code_sentence_and_fix(local, config, code, words):
    status, body = await post(local, "/v1/start", {"config": config})
    assert (status, body["error"]["code"]) == (400, code)
    assert words in body["error"]["message"]
    assert local.server.state is EngineState.OFFLINE


async def test_a_folder_that_holds_no_model_fails_the_start_with_the_reason_and_can_be_started_again(local, tmp_path):
    status, _ = await post(local, "/v1/start", {"config": local.config(model=str(tmp_path))})
    assert status == 200
    status = await local.server.status_when(leaves="booting", wait_s=30)
    assert (status.state, "config.json" in str(status.reason)) == ("failed", True)
    assert (await local.boot()).state == "rolling"


async def test_a_failed_start_keeps_reason_and_log_tail_until_it_is_started_again(local):
    make = local.server._backends["scripted"]

    def failing():
        backend = make()
        backend.fail_next("start", StartFailed("out of memory", "line 1\nline 2"))
        local.server._backends = {"scripted": make}
        return backend

    local.server._backends = {"scripted": failing}
    status = await local.boot()
    assert (status.state, status.reason, status.log_tail) == ("failed", "out of memory", "line 1\nline 2")
    code, body = await post(local, "/v1/episodes", {"task_id": "t"})
    assert (code, body["error"]["code"]) == (503, "start_failed")
    assert "out of memory" in body["error"]["message"]
    status = await local.boot()
    assert (status.state, status.reason, status.log_tail) == ("rolling", None, None)


async def test_every_transition_is_in_the_table_and_is_an_event(local):
    await local.boot()
    await step(local)
    local.backend.lose()
    await local.server.status_when(leaves="rolling", wait_s=10)
    await local.server.status_when(leaves="booting", wait_s=10)
    await local.server.stop()
    seen = await states(local)
    assert seen == [
        *("booting", "rolling", "rolling_post", "weight_syncing", "rolling"),
        *("booting", "rolling", "stopping", "offline"),
    ]
    for before, after in pairwise(["offline", *seen]):
        assert EngineState(after) in TRANSITIONS[EngineState(before)]


async def test_a_step_is_recorded_with_its_metrics_and_files(local):
    await local.boot()
    assert await step(local) == 1
    status = local.server.status()
    run = Path(status.run_dir)
    line = json.loads((run / "metrics.jsonl").read_text())
    assert (line["step"], line["reward/mean"], line["reward/std"], line["reward/max"]) == (1, 0.5, 0.5, 1.0)
    for name in ("actor/grad_norm", "timing/rollout_s", "timing/update_s", "timing/step_s", "weight_version"):
        assert name in line
    assert line["episodes/trained"] == 2 and line["merge/rows_text"] == 2
    assert json.loads((run / "config.json").read_text()) == local.server.config()
    await local.server.stop()
    kinds = [json.loads(text)["kind"] for text in (run / "events.jsonl").read_text().splitlines()]
    assert {"state", "episode", "step", "checkpoint"} <= set(kinds)


async def test_checkpoints_are_written_each_k_steps_pruned_and_once_more_at_stop(local):
    await local.boot(**{"checkpoint.every_steps": 2, "checkpoint.keep_last": 2})
    for _ in range(7):
        await step(local)
    folder = Path(local.server.status().run_dir) / "checkpoints"
    await local.server.status_when(leaves="weight_syncing", wait_s=10)
    assert sorted(p.name for p in folder.iterdir()) == ["step-000004", "step-000006"]
    await local.server.stop()
    assert sorted(p.name for p in folder.iterdir()) == ["step-000006", "step-000007"]


async def test_a_checkpoint_that_finds_no_space_is_a_warning_and_training_goes_on(local):
    await local.boot()
    await step(local)
    local.backend.fail_next("save", OSError(28, "No space left on device"))
    assert await step(local) == 2
    warnings = [e.data for e in await local.server.events.after(0) if e.kind == "warning"]
    assert warnings[0]["code"] == Code.NO_SPACE and "No space left" in warnings[0]["message"]
    assert [c.step for c in local.server.checkpoints()] == [1]
    assert await step(local) == 3
    assert [c.step for c in local.server.checkpoints()] == [1, 3]


async def test_a_journal_that_cannot_take_the_plan_fails_the_training_which_goes_on_when_started_again(
    local, monkeypatch
):
    await local.boot()
    ids = [(await local.run_episode("a", float(n))).episode_id for n in range(1)]
    journal = local.server.live_run().journal
    write = journal.write

    async def full(*entries):
        if any(isinstance(entry, BatchPlanned) for entry in entries):
            raise JournalError(Code.NO_SPACE, "no space left on the journal's disk; free some")
        await write(*entries)

    monkeypatch.setattr(journal, "write", full)
    ids.append((await local.run_episode("a", 1.0)).episode_id)
    await local.until(lambda: local.server.state is EngineState.FAILED)
    assert "no space left" in local.server.status().reason
    assert (await local.boot()).reason is None
    assert [r.step for r in await local.server.steps_after(0, wait_s=20)] == [1]
    assert sorted(local.backend.trained_episodes) == sorted(ids)


async def test_a_lost_engine_comes_back_from_the_checkpoint_and_trains_again_what_came_after(local):
    await local.boot(**{"checkpoint.every_steps": 2})
    for _ in range(3):
        await step(local)
    before = local.backend.trained_episodes
    local.backend.lose("killed")
    await local.server.status_when(leaves="rolling", wait_s=10)
    assert (await local.server.status_when(leaves="booting", wait_s=10)).state == "rolling"
    assert local.backend.trained_episodes == before
    assert [r.step for r in await local.server.steps_after(0, wait_s=0)] == [1, 2, 3]
    assert await step(local) == 4


async def test_an_engine_lost_in_the_update_trains_the_same_batch_after_its_return(local):
    await local.boot(**{"engine.script_update_s": 30.0})
    await local.run_episode("a", 0.0)
    await local.run_episode("a", 1.0)
    await local.server.status_when(leaves="rolling", wait_s=10)
    await local.server.status_when(leaves="rolling_post", wait_s=10)
    assert local.server.state is EngineState.WEIGHT_SYNCING
    planned = [e.episode_id for e in local.server.live_run().unsaved[-1].episodes]
    object.__setattr__(local.server.live_run().config.engine, "script_update_s", 0.0)
    local.backend.lose("killed in the update")
    records = await local.server.steps_after(0, wait_s=20)
    assert [r.step for r in records] == [1]
    assert local.backend.trained_episodes == planned


async def test_an_update_that_raises_costs_its_batch_says_why_and_the_training_goes_on(local):
    await local.boot()
    await step(local)
    local.backend.fail_next("train", UpdateFailed("a token beyond the vocabulary"))
    failed = [(await local.run_episode("bad", float(n))).episode_id for n in range(2)]
    await local.until(lambda: local.server.live_run().tally.dropped["update_failed"] == 2)
    assert await step(local) == 2
    assert len(local.backend.trained_episodes) == 4
    assert not set(failed) & set(local.backend.trained_episodes)
    (warning,) = [e.data for e in await local.server.events.after(0) if e.kind == "warning"]
    assert (warning["code"], warning["step"], warning["episodes"]) == ("update_failed", 2, failed)
    assert "a token beyond the vocabulary" in warning["message"]
    assert local.server.live_run().records[-1].metrics["dropped/update_failed"] == 2.0
    assert len(local.backends) == 1, "the engine is well and stays"


async def test_two_updates_in_a_row_that_raise_fail_the_training_and_keep_the_second_batch(local):
    await local.boot()
    for n in range(2):
        local.backend.fail_next("train", UpdateFailed("unknown key"))
        for k in range(2):
            await local.run_episode(f"bad-{n}", float(k))
        if n == 0:
            await local.until(lambda: local.server.live_run().tally.dropped["update_failed"] == 2)
            await local.until(lambda: local.server.state is EngineState.ROLLING)
    await local.until(lambda: local.server.state is EngineState.FAILED)
    assert "2 updates in a row failed, the last of step 1: unknown key" in (local.server.status().reason or "")
    await local.boot()
    (record,) = await local.server.steps_after(0, wait_s=20)
    assert record.metrics["episodes/trained"] == 2.0
    assert len(local.backend.trained_episodes) == 2


async def test_three_losses_without_a_step_end_in_failed_and_a_step_between_resets_the_count(local):
    await local.boot()
    for _ in range(2):
        local.backend.lose()
        await local.server.status_when(leaves="rolling", wait_s=10)
        await local.server.status_when(leaves="booting", wait_s=10)
    await step(local)
    for _ in range(3):
        assert local.server.state is EngineState.ROLLING
        local.backend.lose("again")
        await local.server.status_when(leaves="rolling", wait_s=10)
        status = await local.server.status_when(leaves="booting", wait_s=10)
    assert status.state == "failed" and "3 times" in status.reason


async def test_stop_keeps_the_pool_and_a_start_with_the_same_configuration_goes_on(local):
    await local.boot()
    await step(local)
    await local.run_episode("next", 0.25)
    status = await local.server.stop()
    assert status.state == "offline"
    status = await local.boot()
    assert (status.state, status.step, status.pooled_episodes) == ("rolling", 1, 1)
    await local.run_episode("next", 0.75)
    assert (await local.server.steps_after(1, wait_s=20))[0].metrics["reward/mean"] == 0.5


async def test_another_configuration_after_a_stop_is_a_new_run(local):
    await local.boot()
    await step(local)
    first = local.server.status().run_dir
    await local.server.stop()
    status = await local.boot(seed=7)
    assert status.step == 0 and status.run_dir != first


async def test_stop_is_idempotent_and_leaves_open_episodes_aborted(local):
    await local.boot()
    grant = await local.claim()
    await local.server.stop()
    assert (await local.server.stop()).state == "offline"
    await local.boot()
    assert local.server.episode_view(grant.episode_id).state == "aborted"


async def test_stop_does_not_wait_for_an_update_without_end(local, monkeypatch):
    monkeypatch.setattr("swarmtune.server.UPDATE_GRACE_S", 0.05)
    await local.boot(**{"engine.script_update_s": 600.0})
    await local.run_episode("a")
    await local.run_episode("a")
    await local.server.status_when(leaves="rolling", wait_s=10)
    await local.server.status_when(leaves="rolling_post", wait_s=10)
    await asyncio.wait_for(local.server.stop(), 10)
    assert local.server.state is EngineState.OFFLINE


async def test_max_steps_ends_claims_saves_and_leaves_evaluation(local):
    await local.boot(max_steps=1, **{"checkpoint.every_steps": 0})
    await step(local)
    await local.server.status_when(leaves="weight_syncing", wait_s=10)
    assert [c.step for c in local.server.checkpoints()] == [1]
    with pytest.raises(ControlRefused) as refused:
        await local.claim()
    assert refused.value.body.code is Code.FINISHED
    assert (await local.run_episode(kind="evaluate")).outcome == "evaluated"


async def test_a_configuration_for_an_engine_this_server_lacks_is_refused(local):
    with pytest.raises(ConfigError, match=r"engine\.kind"):
        await local.server.start(local.config(**{"engine.kind": "hf"}))


def test_the_server_process_never_loads_torch_or_transformers():
    heavy = {"torch", "transformers", "ray", "verl", "vllm"}
    code = "import sys, swarmtune.serve, swarmtune.cli, swarmtune.rendering.load; print(*sys.modules)"
    source = str(Path(swarmtune.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": source}, capture_output=True, text=True, check=True, timeout=60
    )
    assert not heavy & set(done.stdout.split())
