"""The evaluation lane, over a scripted server.

Rules:
1. Evaluation episodes have places of their own: training cannot take them, and they take none of training's.
2. An evaluation belongs to one weight version. The step that would replace it waits, at most hold_sync_s, and only
   while somebody works on the evaluation.
3. After that, what runs is told as mixed, and what has not begun is refused.
4. An evaluation of later weights waits for them.
5. Nothing of it enters the pool; the table of evaluations is on disk.
"""

from __future__ import annotations

import asyncio

import pytest

from swarmtune import lane, server
from swarmtune.gateway.control import ControlRefused
from swarmtune.lane import LaneError
from swarmtune.protocol import ClaimRequest, Code, EvaluationOutcome, EvaluationRequest, Spread
from swarmtune.testing import LocalServer

DONE = EvaluationOutcome(episodes=2, mean=Spread(value=0.5))


async def begin(local: LocalServer, evaluation_id: str = "e", **fields):
    request = EvaluationRequest(evaluation_id=evaluation_id, name="test", tasks=1, k=1, **fields)
    return await local.server.begin_evaluation(request)


async def claim(local: LocalServer, evaluation_id: str | None = "e", wait_s: float = 0.0):
    request = ClaimRequest(task_id="q", kind="evaluate", evaluation_id=evaluation_id, wait_s=wait_s)
    return await local.server.claim(request, origin=local.url)


async def fill_batch(local: LocalServer) -> None:
    for reward in (0.0, 1.0):
        await local.run_episode("task", reward)


async def reached(local: LocalServer, step: int) -> None:
    await local.until(lambda: local.server.status().step >= step and local.server.status().state == "rolling")


async def test_training_cannot_take_the_places_of_evaluations_nor_they_its(data, model):
    async with LocalServer(data, model) as local:
        await local.boot(**{"repeats": 4, "batching.max_open_episodes": 2, "evaluation.slots": 1})
        evaluated = await claim(local, None)
        training = [await local.claim("task") for _ in range(2)]
        with pytest.raises(ControlRefused, match=r"evaluation\.slots") as refused:
            await claim(local, None)
        assert (refused.value.body.code, refused.value.body.retry_after_s is not None) == ("too_many_episodes", True)
        with pytest.raises(Exception, match="max_open_episodes"):
            await local.server.claim(ClaimRequest(task_id="task"), origin=local.url)
        waiting = asyncio.create_task(claim(local, None, wait_s=30))
        await local.chat(evaluated.api_key)
        await local.end(evaluated.episode_id)
        assert (await waiting).episode_id != evaluated.episode_id
        assert {e.episode_id for e in training} <= {e.episode_id for e in local.server.live_run().book.open_episodes()}


async def test_without_slots_evaluations_take_places_as_training_does(data, model):
    async with LocalServer(data, model) as local:
        await local.boot(**{"batching.max_open_episodes": 1, "evaluation.slots": 0})
        await local.claim("task")
        with pytest.raises(ControlRefused, match="every place"):
            await claim(local, None)


async def test_a_step_waits_for_the_evaluation_of_the_weights_it_replaces(data, model):
    async with LocalServer(data, model) as local:
        await local.boot(**{"evaluation.hold_sync_s": 1000.0})
        assert (await begin(local)).weight_version == 0
        first = await claim(local)
        await fill_batch(local)
        await local.until(lambda: local.server.status().state == "rolling_post")
        second = await claim(local)  # of the same evaluation: it gets in while the step waits for it
        for grant in (first, second):
            await local.chat(grant.api_key)
            assert (await local.end(grant.episode_id)).weight_versions == [0]
        assert local.server.status().step == 0
        await local.server.finish_evaluation("e", DONE)
        (record,) = await local.server.steps_after(0, wait_s=30)
        assert record.metrics["timing/evaluation_hold_s"] > 0


async def test_a_step_waits_for_an_evaluation_episode_that_belongs_to_none(data, model):
    async with LocalServer(data, model) as local:
        await local.boot(**{"evaluation.hold_sync_s": 1000.0})
        grant = await claim(local, None)
        await fill_batch(local)
        await local.until(lambda: local.server.status().state == "rolling_post")
        await local.chat(grant.api_key)
        assert (await local.end(grant.episode_id)).weight_versions == [0]
        await reached(local, 1)


async def test_a_step_waits_no_longer_than_it_may_and_what_is_mixed_is_told(data, model):
    async with LocalServer(data, model) as local:
        await local.boot(**{"evaluation.hold_sync_s": 1000.0})
        await begin(local, hold_sync_s=0.2)
        grant = await claim(local)
        await local.chat(grant.api_key, "before")
        await fill_batch(local)
        await reached(local, 1)
        await local.chat(grant.api_key, "after")
        assert (await local.end(grant.episode_id)).weight_versions == [0, 1]
        with pytest.raises(ControlRefused, match="weights of step 0, which were replaced") as refused:
            await claim(local, wait_s=30)
        assert (refused.value.body.code, refused.value.body.retry_after_s) == (Code.VERSION_PASSED, None)
        await fill_batch(local)
        (record,) = await local.server.steps_after(1, wait_s=30)
        assert "timing/evaluation_hold_s" not in record.metrics  # it holds only the step that replaces its weights


async def test_a_step_does_not_wait_for_an_evaluation_nobody_works_on(data, model, monkeypatch):
    monkeypatch.setattr(lane, "IDLE_S", 0.0)
    async with LocalServer(data, model) as local:
        await local.boot(**{"evaluation.hold_sync_s": 1000.0})
        await begin(local)
        await fill_batch(local)
        await reached(local, 1)


@pytest.mark.parametrize("overlap", [False, True])
async def test_an_evaluation_begun_while_a_step_trains_is_of_the_weights_that_come_of_it(data, model, overlap):
    async with LocalServer(data, model) as local:
        await local.boot(**{"engine.script_update_s": 0.5, "batching.overlap": overlap})
        await fill_batch(local)
        await local.until(lambda: local.server.live_run().training == 1)
        assert (await begin(local)).weight_version == 1
        grant = await claim(local, wait_s=30)
        await local.chat(grant.api_key)
        assert (grant.weight_version, (await local.end(grant.episode_id)).weight_versions) == (1, [1])


async def test_an_evaluation_episode_of_its_own_does_not_begin_while_a_step_trains(data, model):
    async with LocalServer(data, model) as local:
        await local.boot(**{"engine.script_update_s": 0.5, "batching.overlap": True})
        await fill_batch(local)
        await local.until(lambda: local.server.live_run().training == 1)
        grant = await claim(local, None, wait_s=30)
        await local.chat(grant.api_key)
        assert (grant.weight_version, (await local.end(grant.episode_id)).weight_versions) == (1, [1])


async def test_an_evaluation_of_later_weights_waits_for_them(data, model):
    async with LocalServer(data, model) as local:
        await local.boot()
        assert (await begin(local, weight_version=2)).weight_version == 2
        waiting = asyncio.create_task(claim(local, wait_s=60))
        for step in (1, 2):
            assert not waiting.done()
            await fill_batch(local)
            await reached(local, step)
        grant = await waiting
        await local.chat(grant.api_key)
        assert (grant.weight_version, (await local.end(grant.episode_id)).weight_versions) == (2, [2])


async def test_an_evaluation_of_weights_that_will_not_come_is_refused(data, model):
    async with LocalServer(data, model) as local:
        await local.boot(max_steps=1)
        with pytest.raises(ControlRefused, match="step 2 will not come") as refused:
            await begin(local, weight_version=2)
        assert (refused.value.body.code, local.server.evaluations()) == (Code.FINISHED, [])


async def test_sampling_that_no_episode_could_have_begins_no_evaluation(data, model):
    async with LocalServer(data, model) as local:
        await local.boot()
        with pytest.raises(ControlRefused, match="sampling: temperature"):
            await begin(local, sampling={"temperature": 9})
        assert local.server.evaluations() == []


async def test_an_evaluation_whose_client_died_is_told_as_abandoned_until_it_comes_back(data, model, monkeypatch):
    monkeypatch.setattr(server, "TICK_S", 0.01)

    def forget_after(seconds: float) -> None:
        monkeypatch.setattr(lane, "ABANDONED_S", seconds)

    def states() -> list[str]:
        return [e.state for e in local.server.evaluations()]

    async with LocalServer(data, model) as local:
        await local.boot()
        await begin(local)
        grant = await claim(local)
        forget_after(0.0)
        await asyncio.sleep(0.1)  # ten looks at it
        assert states() == ["open"]  # its episode is
        await local.server.abort(grant.episode_id, "died")
        await local.until(lambda: states() == ["abandoned"])
        assert [e.data["abandoned"] for e in await local.server.events.after(0) if e.kind == "evaluation"] == [True]
    async with LocalServer(data, model) as local:
        await local.server.status_when(leaves="booting", wait_s=30)
        assert states() == ["abandoned"]
        forget_after(1000.0)
        grant = await claim(local, wait_s=30)
        assert states() == ["open"]
        await local.chat(grant.api_key)
        await local.end(grant.episode_id)
        forget_after(0.0)
        await local.until(lambda: states() == ["abandoned"])
        await local.server.finish_evaluation("e", DONE)
        assert states() == ["finished"]


async def test_an_evaluation_of_earlier_weights_says_how_to_serve_them(data, model):
    async with LocalServer(data, model) as local:
        await local.boot()
        await fill_batch(local)
        await reached(local, 1)
        with pytest.raises(LaneError, match="--from-step 0") as refused:
            await begin(local, weight_version=0)
        assert refused.value.code is Code.VERSION_PASSED


async def test_evaluations_are_told_over_http_and_survive_a_restart(data, model):
    async with LocalServer(data, model) as local:
        await local.boot()
        body = {"evaluation_id": "e", "name": "test", "tasks": 2, "k": 1, "sampling": {"temperature": 0}}
        for _ in range(2):  # repeated, it is the same one
            async with local.http.post("/v1/evaluations", json=body) as response:
                assert (response.status, (await response.json())["state"]) == (200, "open")
        found = {"episodes": 2, "mean": {"value": 0.5, "low": 0.1}, "pass_at": {"1": {"value": 0.5}}}
        async with local.http.post("/v1/evaluations/e/finish", json=found) as response:
            assert response.status == 200
        async with local.http.post("/v1/evaluations/none/finish", json=found) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "unknown_evaluation")
        assert [e.data["mean"] for e in await local.server.events.after(0) if e.kind == "evaluation"] == [0.5]
        before = local.server.evaluations()
    async with LocalServer(data, model) as local:
        await local.server.status_when(leaves="booting", wait_s=30)
        assert local.server.evaluations() == before
        async with local.http.get("/v1/evaluations", params={"name": "test"}) as response:
            (row,) = await response.json()
        assert (row["weight_version"], row["state"], row["sampling"]) == (0, "finished", {"temperature": 0})
        assert (row["mean"]["value"], row["pass_at"]["1"]["value"]) == (0.5, 0.5)


async def test_an_evaluation_that_was_open_goes_on_after_a_restart(data, model):
    async with LocalServer(data, model) as local:
        await local.boot()
        await begin(local)
    async with LocalServer(data, model) as local:
        await local.server.status_when(leaves="booting", wait_s=30)
        grant = await claim(local, wait_s=30)
        await local.chat(grant.api_key)
        assert (await local.end(grant.episode_id)).outcome == "evaluated"
        assert local.server.pool_view().episodes == 0


async def test_an_evaluation_is_for_evaluation_episodes(data, model):
    async with LocalServer(data, model) as local:
        await local.boot()
        await begin(local)
        with pytest.raises(ControlRefused, match="only for episodes of kind evaluate"):
            await local.server.claim(ClaimRequest(task_id="task", evaluation_id="e"), origin=local.url)
        with pytest.raises(LaneError, match="begin it with POST"):
            await claim(local, "unknown")
