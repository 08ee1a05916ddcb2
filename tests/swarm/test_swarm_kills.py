"""Servers and clients killed with SIGKILL at every point of a common episode: rewards are given once, nothing waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarmtune import Swarm, SwarmClient
from swarmtune.errors import EndedInPart, EpisodeGone, NotRolling, ServerUnreachable
from swarmtune.local import LocalServer
from swarmtune.protocol import EpisodeState
from swarmtune.swarm import SwarmEpisode
from tests.client.client_parts import LosingProxy, RestartableServer, ask, scripted, until

CORE = Path(__file__).parents[2] / "core"
ROLES = ("white", "black")
TASKS = [f"task-{n}" for n in range(8)]
Servers = tuple[RestartableServer, RestartableServer]


def both(servers: Servers, **options: Any) -> Swarm:
    return Swarm({role: SwarmClient(server.url, **options) for role, server in zip(ROLES, servers, strict=True)})


def duel(task: str, episode: SwarmEpisode) -> dict[str, float]:
    for role in episode:
        ask(episode[role], task)
    won = float((episode["white"].seed or 0) % 2)
    return {"white": won, "black": 1.0 - won}


def weights_of(data_dir: Path) -> list[str]:
    """The episodes that the newest checkpoint's weights contain."""
    newest = max((data_dir / "runs" / "0001" / "checkpoints").glob("step-*"))
    return json.loads((newest / "state.json").read_text())["episodes"]


def test_a_server_that_is_gone_during_the_claim_does_not_keep_the_others_place(
    killable: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmtune.swarm.HOLD_S", 0.5)
    monkeypatch.setattr("swarmtune.swarm._ANSWER_S", 0.5)
    with both(killable, patience_s=60) as swarm:
        swarm.start(scripted())
        swarm._swarm._order = ["white", "black"]
        killable[1].kill()
        claimed: list[SwarmEpisode] = []
        claiming = threading.Thread(target=lambda: claimed.append(swarm.claim("t")), daemon=True)
        claiming.start()
        white = swarm["white"]
        until(lambda: any(e.data.get("aborted") for e in white.events_so_far()), "white's place is given back")
        killable[1].start()
        claiming.join(60)
        (episode,) = claimed
        episode.end({"white": None, "black": None})
        assert {status.open_episodes for status in swarm.status().values()} == {0}


def test_a_server_that_stays_away_during_the_claim_is_named_and_no_episode_is_left(
    killable: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmtune.swarm.HOLD_S", 0.3)
    monkeypatch.setattr("swarmtune.swarm._ANSWER_S", 0.3)
    with both(killable, patience_s=2) as swarm:
        swarm.start(scripted())
        killable[1].kill()
        with pytest.raises((ServerUnreachable, NotRolling)) as gone:
            swarm.claim("t", wait_s=20)
        assert gone.value.details["role"] == "black"
        assert swarm["white"].status().open_episodes == 0


def test_a_server_killed_between_the_two_ends_leaves_the_others_reward_and_says_who_has_one(killable: Servers) -> None:
    with both(killable, patience_s=3) as swarm:
        swarm.start(scripted())
        with pytest.raises(EndedInPart, match="taken by white") as part, swarm.episode("t") as episode:
            for role in episode:
                ask(episode[role])
            killable[1].kill()
            episode.end({"white": 1.0, "black": 0.0})
        assert set(part.value.ended) == {"white"} and set(part.value.failed) == {"black"}
        assert isinstance(part.value.failed["black"], ServerUnreachable)
        view = episode["white"].view()
        assert (view.state, view.reward) == (EpisodeState.ENDED, 1.0)
        assert swarm["white"].status().pooled_episodes == 1


def test_an_end_waits_for_a_server_that_comes_back_and_says_that_the_episode_is_gone_there(killable: Servers) -> None:
    """A restarted server has aborted its open episodes: the reward was not given, and is not given to another one."""
    with both(killable, patience_s=60) as swarm:
        swarm.start(scripted())
        episode = swarm.claim("t")
        for role in episode:
            ask(episode[role])
        killable[1].kill()
        found: list[EndedInPart] = []

        def end() -> None:
            with pytest.raises(EndedInPart) as part:
                episode.end({"white": 1.0, "black": 0.0})
            found.append(part.value)

        ending = threading.Thread(target=end, daemon=True)
        ending.start()
        until(lambda: swarm["white"].status().pooled_episodes == 1, "white has its reward at once")
        killable[1].start()
        ending.join(60)
        assert isinstance(found[0].failed["black"], EpisodeGone)
        assert {role: status.pooled_episodes for role, status in swarm.status().items()} == {"white": 1, "black": 0}


def test_an_end_whose_answer_was_lost_with_the_server_is_given_once(killable: Servers) -> None:
    """Black has the reward on disk, but dies before anybody hears of it: repeated after the restart it counts once."""
    with LosingProxy(killable[1].url) as proxy:
        clients = {"white": SwarmClient(killable[0].url), "black": SwarmClient(proxy.url, patience_s=60)}
        with Swarm(clients) as swarm:
            swarm.start(scripted())
            episode = swarm.claim("t")
            for role in episode:
                ask(episode[role])
            swarm["black"].status()
            proxy.lose_answers(10_000)
            results: list[Any] = []
            ending = threading.Thread(
                target=lambda: results.append(episode.end({"white": 1.0, "black": 0.5})), daemon=True
            )
            ending.start()
            with SwarmClient(killable[1].url) as direct:
                until(lambda: direct.status().pooled_episodes == 1, "black has it")
                killable[1].kill()
                proxy.lose_answers(0)
                killable[1].start()
                ending.join(60)
                assert results[0]["black"].outcome == "admitted"
                assert direct.status().pooled_episodes == 1


def test_ending_again_after_a_server_came_back_sends_only_what_is_missing(
    swarm: Swarm, pair: tuple[LocalServer, LocalServer]
) -> None:
    """A server that is out of reach for a while, without losing its episodes."""
    with LosingProxy(pair[1].url) as proxy:
        clients = {"white": SwarmClient(pair[0].url), "black": SwarmClient(proxy.url, patience_s=1)}
        with Swarm(clients) as reached:
            swarm.start(scripted())
            episode = reached.claim("t")
            for role in episode:
                ask(episode[role])
            proxy.lose_answers(10_000)
            with pytest.raises(EndedInPart):
                episode.end({"white": 1.0, "black": 0.5})
            proxy.lose_answers(0)
            results = episode.end({"white": 1.0, "black": 0.5})
            assert {role: result and result.outcome for role, result in results.items()} == dict.fromkeys(
                ROLES, "admitted"
            )
            assert {status.pooled_episodes for status in swarm.status().values()} == {1}


@pytest.mark.parametrize("when", ["claim", "episode", "sync"])
def test_training_goes_on_through_a_kill_of_one_server_and_trains_each_episode_once(
    killable: Servers, tmp_path: Path, when: str
) -> None:
    struck = threading.Event()
    admitted: dict[str, list[str]] = {role: [] for role in ROLES}
    black = killable[1]

    def strike() -> None:
        struck.set()
        black.kill()
        black.start()

    def rollout(task: str, episode: SwarmEpisode) -> None:
        rewards = duel(task, episode)
        if when == "episode" and not struck.is_set():
            strike()
        try:
            results = episode.end(rewards)
        except EndedInPart as part:
            note(part.ended)
            raise
        note(results)

    def note(results: Any) -> None:
        for role, result in results.items():
            if result is not None and result.outcome == "admitted":
                admitted[role].append(result.episode_id)

    def strike_when(condition: Callable[[], bool]) -> None:
        until(condition, when, within_s=60)
        strike()

    with both(killable) as swarm, SwarmClient(black.url, patience_s=60) as watch:
        slow = {"engine.script_update_s": 1.0} if when == "sync" else {}
        swarm.start({"white": scripted(), "black": scripted(**slow)})
        if when != "episode":
            condition = {
                "claim": lambda: watch.status().step >= 1,
                "sync": lambda: watch.status().training_step == 1,
            }[when]
            threading.Thread(target=strike_when, args=(condition,), daemon=True).start()
        records = swarm.train(TASKS, rollout, steps=4)
        until(struck.is_set, "the kill has struck")
        assert [found[-1].step for found in records.values()] == [4, 4]
        swarm.stop()
    for role in ROLES:
        weights = weights_of(tmp_path / role)
        assert len(weights) == len(set(weights)) == 16, f"{role}: four whole batches, no episode twice"
        assert set(weights) <= set(admitted[role])


CLIENT = """
import os, sys
from swarmtune import Swarm, SwarmClient
swarm = Swarm({"white": SwarmClient(sys.argv[1]), "black": SwarmClient(sys.argv[2])})
def rollout(task, episode):
    os.write(1, b"playing\\n")  # in one piece: threads do this
    import time; time.sleep(600)
swarm.train(["a", "b", "c"], rollout, steps=1)
"""


def test_a_client_that_is_killed_frees_its_places_on_every_server(
    swarm: Swarm, pair: tuple[LocalServer, LocalServer]
) -> None:
    swarm.start(scripted(batch_tasks=2, repeats=2, **{"batching.heartbeat_lease_s": 2.0}))
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, pair[0].url, pair[1].url],
        env=os.environ | {"PYTHONPATH": str(CORE)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    for _ in range(4):
        assert client.stdout.readline() == "playing\n"
    client.send_signal(signal.SIGKILL)
    client.wait()
    records = swarm.train(TASKS, duel, steps=2)
    assert [[r.metrics["episodes/trained"] for r in found] for found in records.values()] == [[4, 4], [4, 4]]
