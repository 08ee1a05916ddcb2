"""Evaluation: its numbers against plain computations, and that it never feeds a training."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarmtune import SwarmClient
from swarmtune.client import Episode
from swarmtune.evaluation import chance_of_one, summarize, t_interval, wilson_interval
from tests.client.client_parts import ask, scripted


def test_evaluation_gives_every_reward_and_pools_nothing(swarm: SwarmClient) -> None:
    def rollout(task: str, episode: Episode) -> float:
        ask(episode)
        return float(task == "easy")

    swarm.start(scripted())
    done = swarm.evaluate(["easy", "hard"], rollout, k=3)
    assert done.rewards == {"easy": [1.0] * 3, "hard": [0.0] * 3}
    assert (done.mean.value, done.pass_at[1].value, done.pass_at[3].value, done.failed) == (0.5, 0.5, 0.5, 0)
    assert swarm.status().pooled_episodes == 0
    assert swarm.pool().episodes == 0


def test_failed_episodes_are_counted_and_in_no_number(swarm: SwarmClient) -> None:
    def rollout(task: str, episode: Episode) -> float:
        if task == "broken":
            raise OSError("no tool")
        ask(episode)
        return 1.0

    swarm.start(scripted())
    done = swarm.evaluate(["fine", "broken"], rollout, k=2)
    assert (done.failed, done.rewards, done.mean.value) == (2, {"fine": [1.0, 1.0]}, 1.0)
    assert swarm.status().open_episodes == 0


def test_an_evaluation_in_which_all_fail_raises_the_cause(swarm: SwarmClient) -> None:
    def rollout(task: str, episode: Episode) -> float:
        raise OSError("no tool")

    swarm.start(scripted())
    with pytest.raises(RuntimeError, match="no tool"):
        swarm.evaluate(["a"], rollout)


def test_one_seed_gives_the_same_sampling_seeds(swarm: SwarmClient) -> None:
    def seeds(seed: int) -> set[int | None]:
        found: set[int | None] = set()

        def rollout(task: str, episode: Episode) -> float:
            ask(episode)
            found.add(episode.seed)
            return 1.0

        swarm.evaluate(["a", "b"], rollout, k=2, seed=seed)
        return found

    swarm.start(scripted())
    assert seeds(1) == seeds(1)
    assert seeds(1).isdisjoint(seeds(2))


def test_an_evaluated_rollout_that_ends_itself_is_an_error(swarm: SwarmClient) -> None:
    def rollout(task: str, episode: Episode) -> None:
        ask(episode)
        episode.end(reward=1.0)

    swarm.start(scripted())
    with pytest.raises(RuntimeError, match="returns its reward"):
        swarm.evaluate(["a"], rollout)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_solved_one(n: int, data: st.DataObject) -> None:
    solved, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(itertools.combinations([True] * solved + [False] * (n - solved), k))
    assert chance_of_one(n, solved, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_the_t_interval_covers_the_mean_in_95_of_100_cases() -> None:
    draw = random.Random(5)
    intervals = [t_interval([draw.gauss(3, 2) for _ in range(5)]) for _ in range(2000)]
    assert sum(i.low <= 3 <= i.high for i in intervals) / 2000 == pytest.approx(0.95, abs=0.015)


def test_one_task_has_no_interval_and_json_says_so() -> None:
    done = summarize({"only": [1.0]}, k=1, success=1.0)
    assert math.isinf(done.mean.high)
    assert done.as_dict()["mean"] == {"value": 1.0, "low": None, "high": None}


@given(st.floats(0, 1), st.integers(1, 1000))
@example(0.0, 5)
@example(1.0, 3)
def test_a_wilson_interval_holds_its_share_and_is_never_empty(share: float, n: int) -> None:
    found = wilson_interval(share, n)
    assert 0 <= found.low <= share <= found.high <= 1
    assert found.low < found.high
