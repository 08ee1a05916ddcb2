"""Which claims are granted (docs/batching.md):

1. A task gets as many episodes as it needs: finished plus open ones up to N. Failed ones free their place.
2. A batch gets as many tasks as it needs: complete ones and those that move. A stuck one gives up its place.
3. A client with a share claims up to it; the others share the rest.
4. A client that goes on claiming is not blocked for ever while the batch lacks something that it could bring.
"""

from __future__ import annotations

import pytest

from swarmtune.pool import PATIENCE_IDLE_S, PATIENCE_LEAST_S, PATIENCE_UNKNOWN_S
from swarmtune.protocol import Code

COUNTING = ["task_count", "nonzero_variance_task_count"]


@pytest.mark.parametrize("policy", COUNTING)
def test_a_task_with_n_episodes_finished_or_open_needs_no_more(swarm, policy):
    s = swarm(policy, batch_tasks=2, repeats=3)
    s.run("a", 1.0)
    opened = [s.claim("a"), s.claim("a")]
    wait = s.pool.may_claim("a")
    assert wait is not None and wait.code is Code.TOO_MANY_EPISODES
    assert "3 episodes" in wait.message and 0.5 <= wait.retry_after_s <= 10.0
    s.book.abort(opened[0].episode_id)
    assert s.may_claim("a")


def test_an_evaluation_takes_no_place(swarm):
    s = swarm(batch_tasks=1, repeats=1)
    s.book.claim("a", lease_s=60.0, kind="evaluate")
    assert s.may_claim("a")


@pytest.mark.parametrize("policy", COUNTING)
def test_a_batch_of_tasks_is_claimed_and_no_further_one(swarm, policy):
    s = swarm(policy, batch_tasks=2, repeats=2)
    s.run_task("a", [0.0, 1.0])
    last = s.claim("b")
    wait = s.pool.may_claim("c")
    assert wait is not None and wait.code is Code.TOO_MANY_EPISODES and "of 2" in wait.message
    assert s.may_claim("b")
    s.book.abort(last.episode_id)
    assert s.may_claim("c")


def test_claims_open_again_with_the_next_step(swarm):
    s = swarm(batch_tasks=1, repeats=2)
    s.run_task("a", [0.0, 1.0])
    assert not s.may_claim("a") and not s.may_claim("b")
    s.step()
    assert s.may_claim("a") and s.may_claim("b")


def test_an_abandoned_task_gives_up_its_place_and_may_still_be_finished(swarm):
    s = swarm(batch_tasks=1, repeats=2)
    s.run("a")
    assert not s.may_claim("b")
    s.clock.advance(max(PATIENCE_LEAST_S, PATIENCE_UNKNOWN_S) + 1)
    assert s.may_claim("b")
    assert s.may_claim("a")


def test_tasks_begun_by_a_client_that_is_gone_hold_no_place_for_long_once_nothing_is_open(swarm):
    s = swarm(batch_tasks=1, repeats=2)
    s.run("begun")
    assert not s.may_claim("other")
    s.clock.advance(PATIENCE_IDLE_S + 1)
    assert s.may_claim("other") and s.may_claim("begun")
    s.claim("begun")
    assert not s.may_claim("other")


def test_a_task_that_was_begun_before_a_restart_holds_no_place_until_someone_goes_on_with_it(swarm):
    s = swarm(batch_tasks=1, repeats=2)
    s.run("begun")
    (before,) = s.pool.episodes()
    after = swarm(batch_tasks=1, repeats=2)
    after.pool.restore(before)
    assert after.may_claim("other")
    after.claim("begun")
    assert not after.may_claim("other")


def test_a_stuck_episode_does_not_hold_up_the_batch(swarm):
    s = swarm(batch_tasks=2, repeats=1)
    stuck = s.claim("stuck")
    quick = s.claim("quick")
    s.clock.advance(20)
    s.end(quick)
    assert not s.may_claim("c")
    s.clock.advance(61)  # four times the usual 20 s have passed since the claim
    assert s.may_claim("c")
    s.book.abort(stuck.episode_id)
    s.run("c")
    assert s.ready


@pytest.mark.parametrize("policy", COUNTING)
def test_a_client_that_repeats_more_than_n_times_in_a_row_does_not_wait_for_itself(swarm, policy):
    s = swarm(policy, batch_tasks=2, repeats=2)
    done = []
    for task in "ab":
        for reward in (0.0, 1.0, 0.5):
            if s.ready:
                break
            assert s.may_claim(task)
            done.append(s.run(task, reward))
    assert s.ready
    assert s.step() == done


def test_beyond_two_batches_a_surplus_comes_in_drops(swarm):
    s = swarm(batch_tasks=2, repeats=2)
    while s.may_claim("a"):
        s.run("a")
        assert len(s.pool) <= 8
    assert len(s.pool) == 8
    assert "'a'" in (s.pool.may_claim("a") or pytest.fail("granted")).message
    assert s.may_claim("b")
    s.clock.advance(PATIENCE_UNKNOWN_S + 1)
    assert s.may_claim("a")
    s.run("a")
    assert not s.may_claim("a")


def test_no_surplus_once_the_batch_is_complete(swarm):
    s = swarm(batch_tasks=1, repeats=2)
    s.run_task("a", [0.0, 1.0])
    assert s.ready and not s.may_claim("a")


def test_c1_grants_episodes_up_to_a_batch(swarm):
    s = swarm("episode_count", batch_tasks=2, repeats=2)
    s.run("a"), s.run("a"), s.claim("a")
    last = s.claim("b")
    assert not s.may_claim("a") and not s.may_claim("c")
    s.book.abort(last.episode_id)
    assert s.may_claim("c")
    s.claim("c")
    s.clock.advance(PATIENCE_UNKNOWN_S + 1)  # both open ones are stuck
    assert s.may_claim("d")


@pytest.mark.parametrize("policy", ["all_clients_agree", "any_client_agrees"])
def test_under_agreement_clients_decide_how_much_is_enough(swarm, policy):
    s = swarm(policy, batch_tasks=1, repeats=1)
    for task in "aab":
        assert s.may_claim(task)
        s.run(task)


@pytest.mark.parametrize("policy", [*COUNTING, "all_clients_agree"])
def test_a_client_waits_at_its_share_while_others_go_on(swarm, policy):
    s = swarm(policy, batch_tasks=3, repeats=2)
    s.clients.register("x", share=1)
    s.clients.register("y", share=2)
    s.run("x0", 0.0, client="x")
    assert s.may_claim("x0", "x")  # the second repeat of its one task
    wait = s.pool.may_claim("x1", "x")
    assert wait is not None and wait.code is Code.SHARE_FULL and "'x'" in wait.message
    assert s.may_claim("y0", "y")


def test_c1_counts_the_share_in_episodes(swarm):
    s = swarm("episode_count", batch_tasks=2, repeats=2)
    s.clients.register("x", share=1)
    s.run("a", client="x"), s.run("b", client="x")
    wait = s.pool.may_claim("c", "x")
    assert wait is not None and wait.code is Code.SHARE_FULL
    s.claim("u"), s.claim("v")
    assert not s.may_claim("w")


def test_clients_without_a_share_get_what_is_left(swarm):
    s = swarm("task_count", batch_tasks=2, repeats=1)
    s.clients.register("x", share=1)
    s.claim("a")
    assert not s.may_claim("b")
    assert s.may_claim("x0", "x")
    s.clients.register("y", share=1)
    assert not s.may_claim("b", "somebody")


def test_the_places_of_a_dead_client_are_free_for_those_without_a_share(swarm):
    s = swarm("task_count", batch_tasks=2, repeats=1, client_timeout_s=60.0)
    s.clients.register("x", share=2)
    assert not s.may_claim("a")
    s.clock.advance(61)
    assert s.may_claim("a")


def test_two_clients_with_shares_fill_batches_while_one_is_killed_and_restarted(swarm):
    """The small cocktail: training never stops, and every full batch holds the shares."""
    s = swarm("task_count", batch_tasks=3, repeats=2, client_timeout_s=30.0)
    s.clients.register("x", share=2)
    s.clients.register("y", share=1)
    dead, sizes = range(3, 6), []
    for step in range(1, 10):
        if step == 6:
            s.clients.register("y", share=1)
        for _ in range(100):
            s.clock.advance(1)
            for client in ("x", "y"):
                if client == "y" and step in dead:
                    continue
                s.clients.heartbeat(client)
                for task in range(3):
                    name = f"{client}-{step}-{task}"
                    if s.may_claim(name, client):
                        s.run(name, client=client)
            if s.ready:
                break
        assert s.ready, s.pool.view(step).explanation
        batch = s.pool.take_batch(step)
        s.weight_version = step
        s.pool.advance(step)
        sizes.append({c: len({e.task_id for e in batch.episodes if e.client == c}) for c in "xy"})
    assert sizes[0] == sizes[1] == sizes[8] == {"x": 2, "y": 1}
    assert {"x": 2, "y": 0} in sizes[2:5]
