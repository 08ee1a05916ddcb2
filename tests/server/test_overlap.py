"""batching.overlap: episodes go on, and new ones are claimed, while a step trains; states and pool say so."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio

from swarmtune.config import ConfigError, RolloutCorrectionConfig, TrainConfig
from swarmtune.protocol import Code, EngineState, RegisterRequest
from swarmtune.testing import LocalServer, chatml_model

HELD: list[asyncio.Event] = []
"""Updates that a test has not let go."""


@pytest.fixture
def model(tmp_path):
    return str(chatml_model(tmp_path / "model"))


@pytest_asyncio.fixture
async def local(model, tmp_path):
    async with LocalServer(tmp_path / "data", model) as server:
        yield server
        for told in HELD:
            told.set()
        HELD.clear()


def hold_updates(local: LocalServer) -> asyncio.Event:
    """Updates of the live backend take until the event is set, or until it is lost."""
    told, sleep = asyncio.Event(), local.backend._sleep
    HELD.append(told)

    async def until_told(seconds: float) -> None:
        while not told.is_set():
            await sleep(0.01)

    local.backend._sleep = until_told
    return told


async def begin_update(local: LocalServer, **overrides) -> asyncio.Event:
    """Start with overlap, fill the first batch, and wait until its step trains; the event ends the update."""
    await local.boot(**{"batching.overlap": True, **overrides})
    told = hold_updates(local)
    await local.run_episode("a", 0.0)
    await local.run_episode("a", 1.0)
    await local.until(lambda: local.server.status().training_step == 1)
    return told


async def test_while_a_step_trains_the_state_is_rolling_and_the_next_step_is_collected(local):
    await begin_update(local)
    status = local.server.status()
    assert (status.state, status.step, status.training_step) == (EngineState.ROLLING, 0, 1)
    pool = local.server.pool_view()
    assert (pool.step, pool.ready, pool.episodes) == (2, False, 0)


async def test_episodes_are_claimed_called_and_ended_while_a_step_trains(local):
    await begin_update(local)
    grant = await local.claim("b")
    await local.chat(grant.api_key)
    result = await local.end(grant.episode_id)
    assert (grant.step, grant.weight_version, result.outcome) == (2, 0, "admitted")
    assert local.server.status().training_step == 1, "all of it happened during the update"


async def test_a_batch_that_is_whole_during_an_update_waits_for_its_end_and_takes_no_more(local):
    told = await begin_update(local)
    for reward in (0.0, 1.0):
        await local.run_episode("b", reward)
    pool = local.server.pool_view()
    assert local.server.status().training_step == 1
    assert pool.ready and pool.explanation.endswith("it starts when step 1 is trained")
    assert local.server._run.pool.may_claim("c") is not None
    told.set()
    records = await local.server.steps_after(1, wait_s=30)
    assert records[0].metrics["staleness/max"] == records[0].metrics["staleness/mean"] == 1.0
    assert local.backend.trained_episodes and len(set(local.backend.trained_episodes)) == 4


async def test_what_is_sampled_after_the_update_is_not_stale(local):
    told = await begin_update(local)
    told.set()
    await local.server.steps_after(0, wait_s=30)
    for reward in (0.0, 1.0):
        await local.run_episode("b", reward)
    told.set()
    (record,) = await local.server.steps_after(1, wait_s=30)
    assert record.metrics["staleness/max"] == 0.0


async def test_an_episode_may_span_an_update_and_its_tokens_keep_their_own_versions(local):
    told = await begin_update(local)
    grant = await local.claim("b")
    await local.chat(grant.api_key, "one")
    told.set()
    await local.server.steps_after(0, wait_s=30)
    await local.chat(grant.api_key, "two")
    await local.end(grant.episode_id)
    (episode,) = local.server._run.pool.episodes()
    assert {v for s in episode.samples for v in s.weight_versions if v >= 0} == {0, 1}


async def test_an_engine_lost_in_an_overlapped_update_trains_each_episode_once(local):
    told = await begin_update(local, **{"checkpoint.every_steps": 0})
    await local.run_episode("b", 0.0)
    local.backend.lose("killed")
    told.set()
    await local.server.steps_after(0, wait_s=30)
    await local.run_episode("b", 1.0)
    told.set()
    await local.server.steps_after(1, wait_s=30)
    trained = local.backend.trained_episodes
    assert len(trained) == len(set(trained)) == 4
    assert [r.metrics["episodes/trained"] for r in await local.server.steps_after(0, wait_s=0)] == [2, 2]


async def test_a_server_stopped_in_an_overlapped_update_finishes_it_and_saves_whole_steps_only(local):
    told = await begin_update(local)
    await local.run_episode("b", 0.0)
    asyncio.get_running_loop().call_later(0.2, told.set)
    await local.server.stop(forget=False)
    await local.server.start(local.config(**{"batching.overlap": True}))
    status = await local.server.status_when(leaves=EngineState.BOOTING, wait_s=30)
    assert (status.step, status.pooled_episodes) == (1, 1)


async def test_no_checkpoint_is_saved_under_a_step_that_trains(local):
    from swarmtune.gateway.control import ControlRefused

    await begin_update(local)
    with pytest.raises(ControlRefused, match="step 1 is being trained"):
        await local.server.save_checkpoint()


async def test_after_the_last_batch_nothing_is_claimed_although_it_still_trains(local):
    from swarmtune.gateway.control import ControlRefused

    await begin_update(local, max_steps=1)
    with pytest.raises(ControlRefused) as refused:
        await local.claim("b")
    assert refused.value.body.code is Code.FINISHED
    assert local.server.status().training_step == 1


async def test_clients_agree_to_the_step_that_is_collected(local):
    await local.boot(**{"batching.overlap": True, "batching.policy": "all_clients_agree"})
    told = hold_updates(local)
    await local.server.register(RegisterRequest(name="c"))
    await local.run_episode("a", 0.0, client="c")
    await local.run_episode("a", 1.0, client="c")
    local.server.agree("c", 1)
    await local.until(lambda: local.server.status().training_step == 1)
    await local.run_episode("b", 1.0, client="c")
    local.server.agree("c", 2)
    told.set()
    assert len(await local.server.steps_after(1, wait_s=30)) == 1


async def test_the_pool_is_a_long_poll_on_the_step_that_is_collected(local):
    await local.boot(**{"batching.overlap": True})
    hold_updates(local)
    waiting = asyncio.create_task(local.http.get("/v1/pool", params={"after": 1, "wait_s": 30}))
    await local.run_episode("a", 0.0)
    assert not waiting.done()
    await local.run_episode("a", 1.0)
    assert (await (await waiting).json())["step"] == 2
    assert local.server.status().training_step == 1


async def test_without_overlap_nothing_changes(local):
    await local.boot()
    hold_updates(local)
    for reward in (0.0, 1.0):
        await local.run_episode("a", reward)
    await local.until(lambda: local.server.state is EngineState.WEIGHT_SYNCING)
    assert local.server.status().training_step == 1
    assert local.server.pool_view().step == 1


def test_overlap_corrects_per_token_unless_told_otherwise():
    base = {"model": "tiny", "batching.overlap": True}
    assert TrainConfig.from_dict(base).algorithm.rollout_correction == RolloutCorrectionConfig(rollout_is="token")
    assert TrainConfig.from_dict(base | {"algorithm.rollout_correction": None}).algorithm.rollout_correction is None
    resolved = TrainConfig.from_dict(base).model_dump(mode="json")
    assert not TrainConfig.from_dict(resolved).differences(TrainConfig.from_dict(base))
    assert TrainConfig.from_dict({"model": "tiny"}).algorithm.rollout_correction is None


def test_overlap_without_any_staleness_is_refused():
    with pytest.raises(ConfigError, match="max_staleness"):
        TrainConfig.from_dict({"model": "tiny", "batching.overlap": True, "batching.max_staleness": 0})
