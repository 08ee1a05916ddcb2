"""Training several servers at once: each takes its own number of steps of its own size, and nothing waits for good."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest

from swarmtune import Swarm
from swarmtune.config import TrainConfig
from swarmtune.errors import TrainingFailed
from swarmtune.swarm import SwarmEpisode
from tests.client.client_parts import ask, scripted

ROLES = ("white", "black")
TASKS = [f"task-{n}" for n in range(8)]


def duel(task: str, episode: SwarmEpisode) -> dict[str, float]:
    """Each role is asked once; white wins by its seed, so that groups have variance mostly."""
    for role in episode:
        ask(episode[role], task)
    won = float((episode["white"].seed or 0) % 2)
    return {"white": won, "black": 1.0 - won}


def test_both_servers_train_all_their_steps_with_whole_batches(swarm: Swarm) -> None:
    swarm.start(scripted(batch_tasks=2, repeats=2))
    records = swarm.train(TASKS, duel, steps=3)
    assert [[record.step for record in records[role]] for role in ROLES] == [[1, 2, 3]] * 2
    assert {record.metrics["episodes/trained"] for found in records.values() for record in found} == {4.0}
    for status in swarm.status().values():
        assert (status.step, status.open_episodes, status.pooled_episodes) == (3, 0, 0)


@pytest.mark.parametrize(
    ("white", "black", "steps"),
    [
        ({"batch_tasks": 2, "repeats": 2}, {"batch_tasks": 4, "repeats": 2}, {"white": 4, "black": 2}),
        ({"batch_tasks": 3, "repeats": 2}, {"batch_tasks": 2, "repeats": 2}, {"white": 2, "black": 3}),
        ({"batch_tasks": 2, "repeats": 2}, {"batch_tasks": 2, "repeats": 5}, {"white": 4, "black": 2}),
        ({"batch_tasks": 1, "repeats": 4}, {"batch_tasks": 3, "repeats": 2}, {"white": 1, "black": 3}),
    ],
    ids=["twice the batch", "batches that do not divide", "repeats that do not divide", "one finishes long before"],
)
@pytest.mark.parametrize("parallel", [1, 32])
def test_servers_may_differ_in_batch_repeats_and_steps(
    swarm: Swarm, white: dict[str, int], black: dict[str, int], steps: dict[str, int], parallel: int
) -> None:
    swarm.start({"white": scripted(**white), "black": scripted(**black)})
    records = swarm.train(TASKS, duel, steps=steps, parallel=parallel)
    assert {role: found[-1].step for role, found in records.items()} == steps
    for role, keys in {"white": white, "black": black}.items():
        sizes = {record.metrics["episodes/trained"] for record in records[role]}
        assert sizes == {keys["batch_tasks"] * keys["repeats"]}


def test_one_server_syncs_its_weights_while_the_other_rolls(swarm: Swarm) -> None:
    slow = scripted(batch_tasks=1, repeats=2, **{"engine.script_update_s": 0.5})
    swarm.start({"white": slow, "black": scripted(batch_tasks=4, repeats=2)})
    records = swarm.train(TASKS, duel, steps={"white": 4, "black": 1})
    assert {role: found[-1].step for role, found in records.items()} == {"white": 4, "black": 1}


def test_a_server_that_is_done_plays_on_without_being_trained(swarm: Swarm) -> None:
    swarm.start({"white": scripted(max_steps=1), "black": scripted()})
    records = swarm.train(TASKS, duel, steps={"white": 1, "black": 3})
    assert {role: len(found) for role, found in records.items()} == {"white": 1, "black": 3}
    assert swarm.status()["white"].pooled_episodes == 0


def test_two_runs_with_one_seed_play_the_same_tasks_with_the_same_seeds(swarm: Swarm) -> None:
    def first_rounds() -> list[tuple[str, int | None, int | None]]:
        seen = []

        def rollout(task: str, episode: SwarmEpisode) -> dict[str, float]:
            seen.append((task, episode["white"].seed, episode["black"].seed))
            return duel(task, episode)

        swarm.start(scripted(batch_tasks=3))
        swarm.train(TASKS, rollout, steps=2, seed=7)
        swarm.stop()
        return sorted(seen)

    first, second = first_rounds(), first_rounds()
    assert first == second
    assert len(first) == 12
    assert len({seed for _, *seeds in first for seed in seeds}) == 24


def test_an_episode_that_fails_is_run_again_and_both_batches_are_whole(swarm: Swarm) -> None:
    tries: Counter[str] = Counter()

    def rollout(task: str, episode: SwarmEpisode) -> dict[str, float]:
        tries[task] += 1
        if tries[task] == 1:
            raise ConnectionError("the agent's tool is down")
        return duel(task, episode)

    swarm.start(scripted())
    records = swarm.train(TASKS[:2], rollout, steps=1)
    assert [found[0].metrics["episodes/trained"] for found in records.values()] == [4, 4]
    assert tries == {"task-0": 3, "task-1": 3}


def test_an_episode_that_one_server_rejects_is_run_again_for_that_one_only(swarm: Swarm) -> None:
    """Black is not asked in the first episode of each task: its server has nothing to train from that."""
    tries: Counter[str] = Counter()

    def rollout(task: str, episode: SwarmEpisode) -> dict[str, float]:
        tries[task] += 1
        if tries[task] > 1:
            return duel(task, episode)
        ask(episode["white"])
        return {"white": 1.0, "black": 0.0}

    swarm.start(scripted())
    records = swarm.train(TASKS[:2], rollout, steps=1)
    assert [found[0].metrics["episodes/trained"] for found in records.values()] == [4, 4]
    assert tries == {"task-0": 3, "task-1": 3}
    assert {status.pooled_episodes for status in swarm.status().values()} == {0}


def test_a_task_that_always_fails_is_replaced(swarm: Swarm) -> None:
    def rollout(task: str, episode: SwarmEpisode) -> dict[str, float]:
        if task == "poison":
            raise ValueError("cannot be solved")
        return duel(task, episode)

    swarm.start(scripted())
    records = swarm.train(["poison", "good", "better"], rollout, steps=2, attempts=2)
    assert [[r.metrics["episodes/trained"] for r in found] for found in records.values()] == [[4, 4], [4, 4]]


@pytest.mark.parametrize("returned", [1.0, {"white": 1.0}, {"white": "won", "black": 0.0}, None])
def test_what_is_no_reward_for_each_role_fails_the_training_in_words(swarm: Swarm, returned: Any) -> None:
    def rollout(task: str, episode: SwarmEpisode) -> Any:
        ask(episode["white"])
        return returned

    swarm.start(scripted())
    with pytest.raises(TrainingFailed, match="reward"):
        swarm.train(TASKS, rollout, steps=1, attempts=1)


def test_steps_are_told_with_their_role_and_may_use_the_swarm(swarm: Swarm) -> None:
    told = []

    def look(role: str, record: Any) -> None:
        if role == "white":
            time.sleep(0.3)  # the other one's last step must not end the training before this one is told
        told.append((role, record.step, swarm[role].status().step))

    swarm.start(scripted())
    swarm.train(TASKS, duel, steps=2, on_step=look)
    assert sorted(told) == [("black", 1, 1), ("black", 2, 2), ("white", 1, 1), ("white", 2, 2)]


def test_policies_that_wait_for_agreement_agree_after_each_round(pair: Any) -> None:
    from swarmtune import SwarmClient

    with Swarm({role: SwarmClient(server.url, name="both") for role, server in zip(ROLES, pair, strict=True)}) as named:
        named.start({"white": scripted(**{"batching.policy": "all_clients_agree"}), "black": scripted()})
        records = named.train(TASKS, duel, steps=2)
        assert [len(found) for found in records.values()] == [2, 2]
        named.stop()


def test_more_steps_than_a_server_will_do_are_refused(swarm: Swarm) -> None:
    swarm.start({"white": scripted(max_steps=2), "black": scripted()})
    with pytest.raises(ValueError, match="white is to do 3, but its server stops after max_steps 2"):
        swarm.train(TASKS, duel, steps=3)


def test_two_swarms_train_the_same_servers(swarm: Swarm, pair: Any) -> None:
    """Four clients' worth of claims on two servers, in opposite orders."""
    from swarmtune import SwarmClient

    swarm.start(scripted(batch_tasks=4, repeats=2))
    others = Swarm({role: SwarmClient(server.url) for role, server in zip(ROLES, pair, strict=True)})
    others._swarm._order.reverse()
    with others:
        one = threading.Thread(
            target=lambda: others.train([f"other-{n}" for n in range(8)], duel, steps=3), daemon=True
        )
        one.start()
        records = swarm.train(TASKS, duel, steps=3)
        one.join(120)
    assert not one.is_alive()
    assert [found[-1].step for found in records.values()] == [3, 3]


def test_an_evaluation_gives_each_roles_numbers_and_pools_nothing(swarm: Swarm) -> None:
    swarm.start(scripted())
    evaluation = swarm.evaluate(TASKS[:3], duel, k=4)
    assert set(evaluation) == set(ROLES)
    white, black = evaluation["white"], evaluation["black"]
    assert [len(rewards) for rewards in white.rewards.values()] == [4, 4, 4]
    assert white.mean.value + black.mean.value == pytest.approx(1.0)
    assert {status.pooled_episodes for status in swarm.status().values()} == {0}


def test_a_role_may_play_without_being_trained(swarm: Swarm) -> None:
    swarm.start(scripted())
    with swarm.episode("t", kind={"white": "train", "black": "evaluate"}) as episode:
        for role in episode:
            ask(episode[role])
        results = episode.end({"white": 1.0, "black": 0.0})
    assert [result and result.outcome for result in results.values()] == ["admitted", "evaluated"]
    assert isinstance(swarm.config()["white"], TrainConfig)
