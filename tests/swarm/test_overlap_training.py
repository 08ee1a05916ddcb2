"""Training with overlapping steps: the next one is played while one trains, and each episode is trained once."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from swarmtune import Swarm, SwarmClient
from swarmtune.client import Episode
from swarmtune.errors import EpisodeGone
from swarmtune.swarm import SwarmEpisode
from tests.client.client_parts import RestartableServer, ask, scripted, until

TASKS = [f"task-{n}" for n in range(10)]
OVERLAP: dict[str, Any] = {"batching.overlap": True, "engine.script_update_s": 0.4}


def play(task: str, episode: Episode) -> float:
    ask(episode, task)
    return float((episode.seed or 0) % 2)


def test_steps_are_whole_in_number_and_size_and_the_next_is_played_while_one_trains(swarm: Swarm) -> None:
    white = swarm["white"]
    during: list[int | None] = []

    def rollout(task: str, episode: Episode) -> float:
        during.append(white.status().training_step)
        return play(task, episode)

    white.start(scripted(batch_tasks=2, repeats=2, **OVERLAP | {"engine.script_update_s": 1.5}))
    records = white.train(TASKS, rollout, steps=4)
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert {record.metrics["episodes/trained"] for record in records} == {4.0}
    assert {1, 2, 3} <= set(during), "each later step was played while the one before trained"
    assert [record.metrics["staleness/max"] for record in records] == [0.0, 1.0, 1.0, 1.0]
    status = white.status()
    assert (status.step, status.open_episodes, status.pooled_episodes) == (4, 0, 0)


@pytest.mark.parametrize("policy", ["episode_count", "all_clients_agree", "nonzero_variance_task_count"])
def test_every_policy_trains_its_steps(pair: Any, policy: str) -> None:
    with SwarmClient(pair[0].url, name="one") as client:
        client.start(scripted(**OVERLAP, **{"batching.policy": policy}))
        assert [record.step for record in client.train(TASKS, play, steps=3)] == [1, 2, 3]
        client.stop()


def test_a_swarm_overlaps_where_a_server_does(swarm: Swarm) -> None:
    def duel(task: str, episode: SwarmEpisode) -> dict[str, float]:
        return {role: float(bool(ask(episode[role], task))) for role in episode}

    swarm.start({"white": scripted(**OVERLAP), "black": scripted()})
    records = swarm.train(TASKS, duel, steps=3)
    assert [[record.step for record in found] for found in records.values()] == [[1, 2, 3]] * 2
    assert {record.metrics["episodes/trained"] for found in records.values() for record in found} == {4.0}


def test_each_admitted_episode_is_trained_once_through_kills_in_overlapped_updates(tmp_path: Path) -> None:
    """The server is killed each time a step trains while the next one is played, at first before any checkpoint."""
    server = RestartableServer(tmp_path / "data")
    server.start()
    admitted: list[str] = []

    def rollout(task: str, episode: Episode) -> None:
        ask(episode, task)
        try:
            result = episode.end(float((episode.seed or 0) % 2))
        except EpisodeGone:
            raise ConnectionError("the server forgot it") from None
        admitted.append(result.episode_id)

    try:
        with SwarmClient(server.url) as client, SwarmClient(server.url) as watch:
            client.start(scripted(**OVERLAP | {"checkpoint.every_steps": 3, "engine.script_update_s": 1.0}))
            trained: dict[str, Any] = {}

            def train() -> None:
                trained["records"] = client.train(TASKS, rollout, steps=6)

            training = threading.Thread(target=train, daemon=True)
            training.start()
            for step in (1, 2, 4):
                until(lambda step=step: watch.status().training_step == step, f"step {step} trains", within_s=120)
                seen = len(admitted)
                until(lambda seen=seen: len(admitted) > seen, "an episode of the next step is admitted", within_s=60)
                server.kill()
                server.start()
            training.join(200)
            assert not training.is_alive()
            assert [record.step for record in trained["records"]][-1] == 6
            watch.stop()
        (state,) = sorted((tmp_path / "data" / "runs").glob("*/checkpoints/step-000006/state.json"))
        weights = json.loads(state.read_text())["episodes"]
        assert len(weights) == len(set(weights)) == 6 * 4, "no episode is in the weights twice"
        assert set(weights) <= set(admitted), "what was trained was admitted"
    finally:
        server.kill()
