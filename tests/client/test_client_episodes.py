"""What a client promises about single episodes: claimed once, ended once, aborted when left."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from swarmtune import AsyncSwarmClient, SwarmClient
from swarmtune.client import EpisodeNotEnded
from swarmtune.errors import (
    BadConfig,
    BadReward,
    ConfigConflict,
    EpisodeGone,
    NotStarted,
    ServerUnreachable,
    SwarmError,
)
from swarmtune.local import LocalServer
from swarmtune.protocol import EngineState, EpisodeState
from swarmtune.transport import Transport
from tests.client.client_parts import LosingProxy, ask, scripted, until


@pytest.mark.parametrize("url", ["127.0.0.1:10086", "localhost:10086", "ftp://x", "", "http://", "http://a:b"])
def test_an_address_that_could_never_answer_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=r"such as http://127\.0\.0\.1:10086"):
        SwarmClient(url)


def test_an_episode_that_ends_is_admitted(swarm: SwarmClient) -> None:
    swarm.start(scripted())
    with swarm.episode("add-1-2") as episode:
        assert ask(episode, "ping") == "ping"
        result = episode.end(reward=1.0, metrics={"exact": 1})
    assert (result.outcome, result.samples) == ("admitted", 1)
    assert episode.view().state is EpisodeState.ENDED


def test_an_exception_aborts_the_episode_and_travels_on(swarm: SwarmClient) -> None:
    swarm.start(scripted())
    with pytest.raises(KeyError), swarm.episode("t") as episode:
        raise KeyError("agent bug")
    view = episode.view()
    assert view.state is EpisodeState.ABORTED
    assert "agent bug" in (view.reason or "")


def test_a_claim_cancelled_while_its_grant_is_on_its_way_leaves_no_episode(
    swarm: SwarmClient, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted = asyncio.Event()

    async def late(transport: Transport, path: str, *args: Any, **options: Any) -> Any:
        answer = await post(transport, path, *args, **options)
        if path == "/v1/episodes":
            granted.set()
            await asyncio.sleep(0.05)
        return answer

    async def claim_and_give_up() -> None:
        async with AsyncSwarmClient(server.url) as client:
            claiming = asyncio.create_task(client.claim("t"))
            await granted.wait()
            claiming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await claiming

    swarm.start(scripted())
    post = Transport.post
    with monkeypatch.context() as patch:
        patch.setattr(Transport, "post", late)
        asyncio.run(claim_and_give_up())
    assert swarm.status().open_episodes == 0


def test_an_abort_that_is_cancelled_before_it_was_sent_still_reaches_the_server(
    swarm: SwarmClient, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborting = asyncio.Event()

    async def late(transport: Transport, path: str, *args: Any, **options: Any) -> Any:
        if path.endswith("/abort"):
            aborting.set()
            await asyncio.sleep(0.05)
        return await post(transport, path, *args, **options)

    async def abort_and_give_up() -> None:
        async with AsyncSwarmClient(server.url) as client:
            episode = await client.claim("t")
            giving_up = asyncio.create_task(episode.abort("no use"))
            await aborting.wait()
            giving_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await giving_up

    swarm.start(scripted())
    post = Transport.post
    with monkeypatch.context() as patch:
        patch.setattr(Transport, "post", late)
        asyncio.run(abort_and_give_up())
    assert swarm.status().open_episodes == 0


def test_leaving_without_end_aborts_and_warns(swarm: SwarmClient) -> None:
    swarm.start(scripted())
    with pytest.warns(EpisodeNotEnded, match="without end"), swarm.episode("t") as episode:
        ask(episode)
    assert episode.view().state is EpisodeState.ABORTED


def test_start_joins_the_same_configuration_and_refuses_another_with_the_differences(swarm: SwarmClient) -> None:
    config = scripted()
    swarm.start(config)
    assert swarm.start(config).state is EngineState.ROLLING
    with pytest.raises(ConfigConflict, match="repeats") as conflict:
        swarm.start(config.model_copy(update={"repeats": 5}))
    assert conflict.value.differences == {"repeats": (2, 5)}


def test_a_model_that_does_not_exist_is_a_bad_configuration(swarm: SwarmClient) -> None:
    with pytest.raises(BadConfig, match="smollm2-135m"):
        swarm.start(scripted(model="no-such-model"))


def test_a_failed_start_tells_why_and_can_be_repeated(swarm: SwarmClient) -> None:
    with pytest.raises(SwarmError, match="no_such_module"):
        swarm.start(scripted(engine__script="no_such_module:answer"))
    assert swarm.status().state is EngineState.FAILED
    assert swarm.start(scripted()).state is EngineState.ROLLING


def test_a_server_without_training_says_not_started(swarm: SwarmClient) -> None:
    with pytest.raises(NotStarted, match="start"):
        swarm.claim("t")


def test_a_claim_whose_answer_is_lost_claims_once(swarm: SwarmClient, proxy: LosingProxy) -> None:
    swarm.start(scripted())
    with SwarmClient(proxy.url) as flaky:
        flaky.status()
        proxy.lose_answers(2)
        episode = flaky.claim("t")
        assert proxy.lost == 2
        assert swarm.status().open_episodes == 1
        episode.abort()


def test_an_end_whose_answer_is_lost_ends_once(swarm: SwarmClient, proxy: LosingProxy) -> None:
    swarm.start(scripted())
    with SwarmClient(proxy.url) as flaky, flaky.episode("t") as episode:
        ask(episode)
        proxy.lose_answers(2)
        assert episode.end(reward=0.5).outcome == "admitted"
    assert proxy.lost == 2
    assert swarm.pool().episodes == 1


def test_nobody_at_the_address_is_said_with_the_address() -> None:
    with (
        SwarmClient("http://127.0.0.1:9", patience_s=0.1) as client,
        pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:9.*swarmtune serve"),
    ):
        client.status()


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "high", None, True])
def test_a_reward_that_is_no_number_is_refused_and_the_episode_stays_open(swarm: SwarmClient, reward: object) -> None:
    swarm.start(scripted())
    with swarm.episode("t") as episode:
        ask(episode)
        with pytest.raises(BadReward):
            episode.end(reward=reward)  # pyright: ignore[reportArgumentType]
        assert episode.end(reward=0.0).outcome == "admitted"


def test_an_episode_without_a_call_is_rejected_with_the_reason(swarm: SwarmClient) -> None:
    swarm.start(scripted())
    with swarm.episode("t") as episode:
        result = episode.end(reward=1.0)
    assert (result.outcome, result.code) == ("rejected", "no_calls")


def test_an_aborted_episode_cannot_be_ended(swarm: SwarmClient) -> None:
    swarm.start(scripted())
    episode = swarm.claim("t")
    episode.abort("enough")
    with pytest.raises(EpisodeGone):
        episode.end(reward=1.0)


def test_heartbeats_keep_a_thinking_agents_lease(swarm: SwarmClient) -> None:
    swarm.start(scripted())
    began = time.monotonic()
    with swarm.episode("t", lease_s=0.6) as episode:
        until(lambda: time.monotonic() - began > 2.0, "two seconds of thinking")
        assert episode.view().state is EpisodeState.CLAIMED
        ask(episode)
        assert episode.end(reward=1.0).outcome == "admitted"


def test_a_claim_waits_through_a_weight_sync(swarm: SwarmClient) -> None:
    swarm.start(scripted(engine__script_update_s=0.5))
    for task in ("a", "b"):
        for _ in range(2):
            with swarm.episode(task) as episode:
                ask(episode)
                episode.end(reward=1.0)
    until(lambda: swarm.status().state is not EngineState.ROLLING, "the step begins")
    episode = swarm.claim("c")
    assert episode.grant.weight_version == 1
    episode.abort()


def test_a_claim_that_may_not_wait_is_refused_during_a_weight_sync(swarm: SwarmClient) -> None:
    swarm.start(scripted(engine__script_update_s=1.0))
    for task in ("a", "b"):
        for _ in range(2):
            with swarm.episode(task) as episode:
                ask(episode)
                episode.end(reward=1.0)
    until(lambda: swarm.status().state is EngineState.WEIGHT_SYNCING, "the update begins")
    with pytest.raises(SwarmError) as refused:
        swarm.claim("c", wait_s=0)
    assert refused.value.code == "not_rolling"


def test_waiting_for_a_step_that_does_not_come_times_out(swarm: SwarmClient) -> None:
    swarm.start(scripted())
    with pytest.raises(TimeoutError, match="pool"):
        swarm.wait_step(after=0, timeout_s=0.2)


def test_events_come_in_order_and_go_on_after_a_lost_connection(swarm: SwarmClient, proxy: LosingProxy) -> None:
    swarm.start(scripted(batch_tasks=4))
    with SwarmClient(proxy.url) as flaky:
        stream = flaky.events()
        first = next(stream)
        proxy.lose_answers(1)
        for n in range(3):
            with swarm.episode(f"t{n}") as episode:
                ask(episode)
                episode.end(reward=1.0)
        numbers = [first.seq]
        while len(numbers) < len(swarm.events_so_far()):
            numbers.append(next(stream).seq)
        assert numbers == [event.seq for event in swarm.events_so_far()]
        stream.close()


def test_a_client_with_a_share_needs_a_name() -> None:
    with pytest.raises(ValueError, match="name"):
        SwarmClient(share=2)


def test_a_closed_client_says_goodbye(server: LocalServer, swarm: SwarmClient) -> None:
    swarm.start(scripted())
    with SwarmClient(server.url, name="guest") as guest:
        guest.register()
        assert swarm.status().clients == 1
    assert swarm.status().clients == 0
