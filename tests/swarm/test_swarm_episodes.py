"""What a swarm promises about one episode on several servers: on all or none, each role's reward once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from swarmtune import Swarm, SwarmClient
from swarmtune.client import EpisodeNotEnded
from swarmtune.errors import BadConfig, BadReward, NotRolling, NotStarted
from swarmtune.local import LocalServer
from swarmtune.protocol import EpisodeState
from tests.client.client_parts import ask, scripted, until

ROLES = ("white", "black")


def test_each_role_has_its_own_endpoint_and_its_own_reward(swarm: Swarm) -> None:
    swarm.start(scripted(batch_tasks=1, repeats=2))
    with swarm.episode("game") as episode:
        assert {episode[role].base_url for role in episode} == {f"{swarm[role].url}/v1" for role in ROLES}
        assert [ask(episode[role], role) for role in episode] == ["white", "black"]
        assert episode["white"].anthropic_base_url != episode["black"].anthropic_base_url
        results = episode.end({"white": 1.0, "black": -1.0}, metrics={"black": {"moves": 7}})
    assert {role: result and result.outcome for role, result in results.items()} == dict.fromkeys(ROLES, "admitted")
    assert [episode[role].view().reward for role in ROLES] == [1.0, -1.0]
    assert {role: view.pooled_episodes for role, view in swarm.status().items()} == {"white": 1, "black": 1}


def test_each_server_has_its_own_configuration(swarm: Swarm) -> None:
    swarm.start({"white": scripted(repeats=2), "black": scripted(repeats=4)})
    assert {role: config.repeats for role, config in swarm.config().items()} == {"white": 2, "black": 4}


def test_a_configuration_that_one_server_refuses_names_its_role(swarm: Swarm) -> None:
    with pytest.raises(BadConfig, match="no such model") as refused:
        swarm.start({"white": scripted(), "black": scripted(model="/nowhere")})
    assert refused.value.details["role"] == "black"
    assert refused.value.__notes__ == [f"from the server of 'black', {swarm['black'].url}"]


def test_a_sequence_of_clients_gets_numbers_as_roles() -> None:
    with Swarm([SwarmClient("http://127.0.0.1:1"), SwarmClient("http://127.0.0.1:2")]) as numbered:
        assert numbered.roles == ["0", "1"]


def test_two_roles_of_one_server_are_refused() -> None:
    with pytest.raises(ValueError, match="a server of its own"):
        Swarm([SwarmClient("http://127.0.0.1:1"), SwarmClient("http://127.0.0.1:1/")])


def test_a_role_that_is_not_there_is_named(swarm: Swarm) -> None:
    swarm.start(scripted())
    with pytest.warns(EpisodeNotEnded), swarm.episode("t") as episode, pytest.raises(KeyError, match="white, black"):
        episode["red"]


def test_a_claim_that_one_server_refuses_leaves_no_episode_anywhere(swarm: Swarm) -> None:
    swarm["white"].start(scripted())
    with pytest.raises(NotStarted):
        swarm.claim("t")
    assert swarm["white"].status().open_episodes == 0


def test_a_claim_that_one_server_has_no_place_for_is_not_kept_by_the_others(swarm: Swarm) -> None:
    swarm.start({"white": scripted(repeats=4), "black": scripted(batch_tasks=1, repeats=2)})
    held = [swarm["black"].claim("t") for _ in range(2)]
    with pytest.raises(NotRolling, match="needs 2"):
        swarm.claim("t", wait_s=0.5)
    assert swarm["white"].status().open_episodes == 0
    for episode in held:
        episode.abort()


@pytest.mark.parametrize(
    ("rewards", "error", "words"),
    [
        ({"white": 1.0}, ValueError, "'black'"),
        ({"white": 1.0, "black": 1.0, "red": 0.0}, ValueError, "'red'"),
        ({"white": 1.0, "black": float("nan")}, BadReward, "'black' is nan"),
        ({"white": "1", "black": 1.0}, BadReward, "'white'"),
    ],
)
def test_rewards_that_do_not_fit_reach_no_server(swarm: Swarm, rewards: Any, error: type, words: str) -> None:
    swarm.start(scripted())
    with swarm.episode("t") as episode:
        for role in episode:
            ask(episode[role])
        with pytest.raises(error, match=words):
            episode.end(rewards)
        assert [episode[role].view().state for role in ROLES] == [EpisodeState.CLAIMED] * 2
        episode.end({"white": 1.0, "black": 0.0})


def test_a_role_without_a_reward_is_given_up_and_the_others_train(swarm: Swarm) -> None:
    swarm.start(scripted())
    with swarm.episode("t") as episode:
        ask(episode["white"])
        results = episode.end({"white": 1.0, "black": None})
    assert results["black"] is None
    assert [episode[role].view().state for role in ROLES] == [EpisodeState.ENDED, EpisodeState.ABORTED]


def test_an_exception_aborts_every_role(swarm: Swarm) -> None:
    swarm.start(scripted())
    with pytest.raises(KeyError), swarm.episode("t") as episode:
        raise KeyError("agent bug")
    assert [episode[role].view().state for role in ROLES] == [EpisodeState.ABORTED] * 2


def test_ending_twice_gives_one_reward(swarm: Swarm) -> None:
    swarm.start(scripted())
    with swarm.episode("t") as episode:
        for role in episode:
            ask(episode[role])
        first = episode.end({"white": 1.0, "black": 0.0})
        assert episode.end({"white": 0.5, "black": 0.5}) == first
    assert [episode[role].view().reward for role in ROLES] == [1.0, 0.0]


def test_two_swarms_that_claim_in_different_orders_never_block_each_other(
    swarm: Swarm, pair: tuple[LocalServer, LocalServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One place per server at a time, and each swarm begins at another server."""
    monkeypatch.setattr("swarmtune.swarm.HOLD_S", 0.2)
    swarm.start(scripted(**{"batch_tasks": 64, "batching.max_open_episodes": 1}))
    white, black = pair
    played: list[str] = []

    def play(name: str, order: list[str]) -> None:
        with Swarm({"white": SwarmClient(white.url), "black": SwarmClient(black.url)}) as one:
            one._swarm._order = order
            for n in range(4):
                with one.episode(f"{name}-{n}") as episode:
                    for role in episode:
                        ask(episode[role])
                    episode.end({"white": 1.0, "black": 0.0})
                played.append(name)

    players = [
        threading.Thread(target=play, args=("first", ["white", "black"]), daemon=True),
        threading.Thread(target=play, args=("second", ["black", "white"]), daemon=True),
    ]
    for player in players:
        player.start()
    until(lambda: len(played) == 8, "both swarms have played all their episodes", within_s=120)
    assert {status.open_episodes for status in swarm.status().values()} == {0}
    assert {status.pooled_episodes for status in swarm.status().values()} == {8}


async def test_the_async_twin_does_the_same(pair: tuple[LocalServer, LocalServer]) -> None:
    from openai import AsyncOpenAI

    from swarmtune import AsyncSwarm, AsyncSwarmClient

    async with AsyncSwarm({"a": AsyncSwarmClient(pair[0].url), "b": AsyncSwarmClient(pair[1].url)}) as both:
        await both.start(scripted())
        async with both.episode("t") as episode:
            for role in episode:
                llm = AsyncOpenAI(base_url=episode[role].base_url, api_key=episode[role].api_key)
                await llm.chat.completions.create(model="swarm", messages=[{"role": "user", "content": "hi"}])
            results = await episode.end({"a": 1.0, "b": 0.0})
        assert [result and result.outcome for result in results.values()] == ["admitted"] * 2
        await both.stop()
