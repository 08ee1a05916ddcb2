"""The training loop: whole batches, the right number of steps, through failures of agents and servers."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from swarmtune import AsyncSwarmClient, SwarmClient
from swarmtune.client import AsyncEpisode, Episode
from swarmtune.errors import BadConfig, TrainingFailed, TrainingFinished
from swarmtune.local import LocalServer
from swarmtune.protocol import StepRecord
from tests.client.client_parts import LosingProxy, RestartableServer, ask, echo_rollout, scripted, until

CORE = Path(__file__).parents[2] / "core"
TASKS = [f"task-{n}" for n in range(10)]


def test_training_stops_exactly_at_its_last_step(swarm: SwarmClient) -> None:
    swarm.start(scripted(batch_tasks=3, repeats=2))
    records = swarm.train(TASKS, echo_rollout, steps=4)
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert {record.metrics["episodes/trained"] for record in records} == {6.0}
    status = swarm.status()
    assert (status.step, status.open_episodes, status.pooled_episodes) == (4, 0, 0)


def test_training_goes_on_from_the_servers_step(swarm: SwarmClient) -> None:
    swarm.start(scripted())
    swarm.train(TASKS, echo_rollout, steps=2)
    assert [record.step for record in swarm.train(TASKS, echo_rollout, steps=3)] == [3]
    assert swarm.train(TASKS, echo_rollout, steps=3) == []


def test_two_runs_with_one_seed_begin_with_the_same_tasks_and_sampling_seeds(swarm: SwarmClient) -> None:
    def first_batch(config_seed: int) -> list[tuple[str, int | None]]:
        seen = []

        def rollout(task: str, episode: Episode) -> float:
            ask(episode)
            seen.append((task, episode.seed))
            return 1.0

        swarm.start(scripted(seed=config_seed, max_steps=1, batch_tasks=3))
        swarm.train(TASKS, rollout, steps=1, seed=7)
        swarm.stop()
        return sorted(seen)

    first, second = first_batch(10_001), first_batch(10_002)
    assert first == second
    assert len({seed for _, seed in first}) == 6


def test_a_step_never_gets_one_task_twice(swarm: SwarmClient) -> None:
    """Also where one round through the tasks ends and the next begins: at steps 2, 4 and 5 of this one."""
    swarm.start(scripted(batch_tasks=3, repeats=2))
    records = swarm.train(TASKS[:5], echo_rollout, steps=8)
    assert [record.metrics["episodes/tasks"] for record in records] == [3.0] * 8
    assert [record.metrics["episodes/trained"] for record in records] == [6.0] * 8


def test_a_step_may_need_every_task_and_not_more_than_there_are(swarm: SwarmClient) -> None:
    swarm.start(scripted(batch_tasks=3))
    assert len(swarm.train(TASKS[:3], echo_rollout, steps=3)) == 3
    with pytest.raises(ValueError, match="3 different"):
        swarm.train(TASKS[:2], echo_rollout, steps=4)


def test_another_seed_takes_other_tasks(swarm: SwarmClient) -> None:
    def tasks_of(seed: int) -> set[str]:
        seen: set[str] = set()

        def rollout(task: str, episode: Episode) -> float:
            ask(episode)
            seen.add(task)
            return 1.0

        swarm.start(scripted(batch_tasks=5, seed=10_100 + seed))
        swarm.train([f"many-{n}" for n in range(1000)], rollout, steps=1, seed=seed)
        swarm.stop()
        return seen

    assert tasks_of(1) != tasks_of(2)


def test_an_episode_that_fails_is_run_again_and_the_batch_is_whole(
    swarm: SwarmClient, caplog: pytest.LogCaptureFixture
) -> None:
    tries: Counter[str] = Counter()

    def rollout(task: str, episode: Episode) -> float:
        tries[task] += 1
        if tries[task] == 1:
            raise ConnectionError("the agent's tool is down")
        ask(episode)
        return 1.0

    swarm.start(scripted(batch_tasks=2, repeats=2))
    with caplog.at_level(logging.WARNING, "swarmtune"):
        records = swarm.train(TASKS[:2], rollout, steps=1)
    assert records[0].metrics["episodes/trained"] == 4
    assert tries == {"task-0": 3, "task-1": 3}
    assert "the agent's tool is down" in caplog.text


def test_a_rollout_that_ends_its_episode_itself_returns_nothing(swarm: SwarmClient) -> None:
    def rollout(task: str, episode: Episode) -> None:
        ask(episode)
        episode.end(reward=0.25)

    swarm.start(scripted())
    assert swarm.train(TASKS, rollout, steps=1)[0].metrics["reward/mean"] == 0.25


def test_a_task_that_always_fails_is_replaced(swarm: SwarmClient) -> None:
    def rollout(task: str, episode: Episode) -> float:
        if task == "poison":
            raise ValueError("cannot be solved")
        ask(episode)
        return 1.0

    swarm.start(scripted(batch_tasks=2, repeats=2))
    records = swarm.train(["poison", "good", "better"], rollout, steps=2, attempts=2)
    assert [record.metrics["episodes/trained"] for record in records] == [4, 4]


def test_a_task_that_cannot_be_replaced_ends_the_training(swarm: SwarmClient) -> None:
    def rollout(task: str, episode: Episode) -> float:
        if task == "poison":
            raise ValueError("cannot be solved")
        ask(episode)
        return 1.0

    swarm.start(scripted(batch_tasks=2, repeats=2))
    with pytest.raises(TrainingFailed, match="cannot be solved"):
        swarm.train(["poison", "good"], rollout, steps=1, attempts=1)


def test_training_fails_with_the_cause_when_nothing_works(swarm: SwarmClient) -> None:
    def rollout(task: str, episode: Episode) -> float:
        raise ZeroDivisionError("reward of nothing")

    swarm.start(scripted())
    with pytest.raises(TrainingFailed, match="reward of nothing") as failed:
        swarm.train(TASKS, rollout, steps=1, attempts=2)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    until(lambda: swarm.status().open_episodes == 0, "what was being claimed at that moment is given up")


@pytest.mark.parametrize("returned", ["high", None, float("nan")])
def test_what_is_no_reward_fails_the_training_in_words(swarm: SwarmClient, returned: Any) -> None:
    def rollout(task: str, episode: Episode) -> Any:
        ask(episode)
        return returned

    swarm.start(scripted())
    with pytest.raises(TrainingFailed, match="reward"):
        swarm.train(TASKS, rollout, steps=1, attempts=1)


def test_an_agent_that_never_returns_is_given_up(swarm: SwarmClient) -> None:
    hung = threading.Event()
    release = threading.Event()

    def rollout(task: str, episode: Episode) -> float:
        ask(episode)
        if not hung.is_set():
            hung.set()
            release.wait(60)
        return 1.0

    swarm.start(scripted())
    records = swarm.train(TASKS, rollout, steps=1, episode_timeout_s=1.0)
    release.set()
    assert records[0].metrics["episodes/trained"] == 4


def test_steps_are_reported_as_they_happen_and_may_use_the_client(swarm: SwarmClient) -> None:
    seen: list[tuple[int, int]] = []

    def on_step(record: StepRecord) -> None:
        seen.append((record.step, swarm.status().step))

    swarm.start(scripted())
    swarm.train(TASKS, echo_rollout, steps=2, on_step=on_step)
    assert [step for step, _ in seen] == [1, 2]
    assert all(server_step >= step for step, server_step in seen)


def test_a_server_with_fewer_steps_than_asked_for_is_told(swarm: SwarmClient) -> None:
    swarm.start(scripted(max_steps=2))
    with pytest.raises(TrainingFinished, match="max_steps"):
        swarm.train(TASKS, echo_rollout, steps=3)
    assert swarm.status().step == 2


def test_a_server_with_just_as_many_steps_is_fine(swarm: SwarmClient) -> None:
    swarm.start(scripted(max_steps=2))
    assert len(swarm.train(TASKS, echo_rollout, steps=2)) == 2


def test_under_nonzero_variance_tasks_are_added_until_enough_differ(swarm: SwarmClient) -> None:
    lock = threading.Lock()
    repeats: Counter[str] = Counter()

    def rollout(task: str, episode: Episode) -> float:
        ask(episode)
        with lock:
            repeats[task] += 1
            return float(repeats[task] % 2) if int(task.split("-")[1]) % 2 else 1.0

    swarm.start(scripted(batching__policy="nonzero_variance_task_count", batch_tasks=3))
    records = swarm.train([f"task-{n}" for n in range(40)], rollout, steps=2)
    assert [record.step for record in records] == [1, 2]
    assert all(record.metrics["reward/mean"] == 0.5 for record in records)


def test_episode_count_trains_with_whatever_episodes_come(swarm: SwarmClient) -> None:
    swarm.start(scripted(batching__policy="episode_count", batch_tasks=2, repeats=3))
    records = swarm.train(TASKS, echo_rollout, steps=3)
    assert [record.metrics["episodes/trained"] for record in records] == [6, 6, 6]


def test_policies_that_wait_for_agreement_need_a_name(swarm: SwarmClient) -> None:
    swarm.start(scripted(batching__policy="all_clients_agree"))
    with pytest.raises(BadConfig, match="name"):
        swarm.train(TASKS, echo_rollout, steps=1)


@pytest.mark.parametrize("policy", ["all_clients_agree", "any_client_agrees"])
def test_clients_that_must_agree_train_together(server: LocalServer, swarm: SwarmClient, policy: str) -> None:
    config = scripted(batching__policy=policy, batching__client_timeout_s=30.0)
    swarm.start(config)
    done: dict[str, int] = {}

    def run(name: str) -> None:
        with SwarmClient(server.url, name=name) as client:
            client.start(config)
            together.wait(20)
            client.train([f"{name}-{n}" for n in range(5)], echo_rollout, steps=3)
            done[name] = client.status().step

    together = threading.Barrier(2)
    clients = [threading.Thread(target=run, args=(name,)) for name in ("left", "right")]
    for client in clients:
        client.start()
    for client in clients:
        client.join(60)
    assert done == {"left": 3, "right": 3}


def test_shares_divide_each_batch(server: LocalServer, swarm: SwarmClient) -> None:
    config = scripted(batch_tasks=4)
    swarm.start(config)
    before = swarm.events_so_far()[-1].seq

    def run(name: str, share: int) -> None:
        with SwarmClient(server.url, name=name, share=share) as client:
            client.start(config)
            together.wait(20)
            client.train([f"{name}-{n}" for n in range(8)], echo_rollout, steps=3)
            together.wait(20)

    together = threading.Barrier(2)
    clients = [threading.Thread(target=run, args=pair) for pair in (("small", 1), ("large", 3))]
    for client in clients:
        client.start()
    for client in clients:
        client.join(60)
    ended = Counter(
        event.data["client"]
        for event in swarm.events_so_far(after=before)
        if event.kind == "episode" and event.data.get("outcome") == "admitted"
    )
    assert swarm.status().step == 3
    assert ended == {"small": 6, "large": 18}


def test_lost_answers_do_not_disturb_a_training(swarm: SwarmClient, proxy: LosingProxy) -> None:
    swarm.start(scripted(batch_tasks=2, repeats=4))

    def rollout(task: str, episode: Episode) -> float:
        base_url = str(episode.base_url).replace(proxy.url, swarm.url)  # agents have their own way of retrying
        ask(_At(base_url, episode.api_key))
        if (episode.seed or 0) % 2:
            proxy.lose_answers(1)
        return 1.0

    with SwarmClient(proxy.url) as flaky:
        records = flaky.train(TASKS, rollout, steps=4)
    assert [record.metrics["episodes/trained"] for record in records] == [8, 8, 8, 8]
    assert proxy.lost > 4


class _At:
    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url, self.api_key = base_url, api_key


def test_training_survives_a_killed_server(restartable: RestartableServer) -> None:
    config = scripted(batch_tasks=2, repeats=2, checkpoint__every_steps=1, engine__script_update_s=0.2)
    killed = threading.Event()

    def on_step(record: StepRecord) -> None:
        if record.step == 2 and not killed.is_set():
            killed.set()
            restartable.kill()
            restartable.start()

    with SwarmClient(restartable.url, patience_s=60) as client:
        client.start(config)
        records = client.train(TASKS, echo_rollout, steps=4, on_step=on_step)
        assert killed.is_set()
        assert [record.step for record in records] == [1, 2, 3, 4]
        assert client.status().step == 4


async def test_the_async_twin_trains_with_async_agents(server: LocalServer) -> None:
    seen: list[str] = []

    async def rollout(task: dict[str, str], episode: AsyncEpisode) -> tuple[float, dict[str, float]]:
        seen.append(task["task_id"])
        async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as llm:
            await llm.chat.completions.create(model="swarm", messages=[{"role": "user", "content": "hello"}])
        return 1.0, {"turns": 1.0}

    async with AsyncSwarmClient(server.url) as client:
        await client.start(scripted())
        records = await client.train([{"task_id": "a"}, {"task_id": "b"}], rollout, steps=2)
        await client.stop()
    assert [record.step for record in records] == [1, 2]
    assert records[0].metrics["client/turns"] == 1.0
    assert Counter(seen) == {"a": 4, "b": 4}


def test_ctrl_c_ends_a_training_and_aborts_what_runs(server: LocalServer, swarm: SwarmClient) -> None:
    swarm.start(scripted())
    code = f"""
import time
from swarmtune import SwarmClient
SwarmClient({server.url!r}).train(["a", "b"], lambda task, episode: time.sleep(60), steps=1)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(CORE)}, stderr=subprocess.PIPE, text=True
    )
    until(lambda: swarm.status().open_episodes == 4, "all episodes run")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=50)  # less than the agents sleep
    assert "KeyboardInterrupt" in said
    assert swarm.status().open_episodes == 0


def test_remax_plays_each_tasks_greedy_answer_once_and_sends_its_reward_as_the_baseline(swarm: SwarmClient) -> None:
    swarm.start(scripted(algorithm__advantage="remax"))
    played: Counter[tuple[str, float]] = Counter()

    def rollout(task: str, episode: Episode) -> float | None:
        ask(episode, task)
        greedy = episode.seed is None  # what is played for the baseline has no seed of its own
        reward = 0.25 if greedy else 1.0
        played[task, reward] += 1
        if task == "ends itself":
            episode.end(reward)
            return None
        return reward

    (record,) = swarm.train(["a", "ends itself"], rollout, steps=1)
    assert record.metrics["client/reward_baseline"] == 0.25
    assert record.metrics["reward/mean"] == 1.0
    assert {task: played[task, 0.25] for task in ("a", "ends itself")} == {"a": 1, "ends itself": 1}


def test_tasks_with_one_name_are_refused(swarm: SwarmClient) -> None:
    swarm.start(scripted())
    with pytest.raises(ValueError, match="same task_id"):
        swarm.train(["a", "a"], echo_rollout, steps=1)
    with pytest.raises(TypeError, match="task_id"):
        swarm.train([{"name": "a"}], echo_rollout, steps=1)
