"""Rules of batching (docs/batching.md), B tasks, N repeats:

1. C1 trains the B·N oldest episodes once there are so many.
2. C2 trains the B tasks that were complete first (≥ N episodes), each with all its episodes, once there are so many.
3. C3 is C2 over tasks whose rewards differ; a complete task without difference is dropped, counted, and told.
4. C4 trains everything once the quorum of live registered clients agrees to this step, or the deadline has passed.
5. C5 trains everything once one registered client agrees to this step.
6. A batch is grouped by task, in order of completion, then of admission. What it leaves stays in the pool.
7. A batch holds at most its share of each live client that has one; the places of a client that is gone are not waited
   for when only clients with a share are left.
8. Episodes from more than max_staleness weight versions ago are rejected, and dropped where they wait.
9. A policy that is not met says so in numbers.
"""

from __future__ import annotations

import pytest
from state_parts import finished_of, sample_of

from swarmtune.pool import Admitted, DropReason, Rejected
from swarmtune.protocol import Code

# -- C1


def test_c1_starts_at_b_times_n_episodes_of_any_tasks_and_takes_the_oldest(swarm):
    s = swarm("episode_count", batch_tasks=2, repeats=2)
    ids = [s.run("a"), s.run("b"), s.run("a")]
    assert not s.ready
    ids += [s.run("c"), s.run("a")]
    assert s.ready
    a1, b1, a2, c1, a3 = ids
    assert s.step() == [a1, a2, b1, c1]
    assert [e.episode_id for e in s.pool.episodes()] == [a3]
    assert not s.ready


# -- C2


def test_c2_waits_for_complete_tasks_however_many_episodes_there_are(swarm):
    s = swarm("task_count", batch_tasks=2, repeats=2)
    for task in "abcde":
        s.run(task)
    s.run("a")
    assert not s.ready
    s.run("d")
    assert s.ready


def test_c2_takes_whole_tasks_in_order_of_completion_and_leaves_the_rest(swarm):
    s = swarm("task_count", batch_tasks=2, repeats=2)
    a1, b1, c1, b2, d1, c2, a2 = (s.run(t) for t in "abcbdca")
    assert s.step() == [b1, b2, c1, c2]
    assert {e.episode_id for e in s.pool.episodes()} == {a1, a2, d1}
    d2 = s.run("d")
    assert s.step() == [a1, a2, d1, d2]


def test_c2_trains_a_surplus_with_its_task(swarm):
    s = swarm("task_count", batch_tasks=1, repeats=2)
    ids = [s.run("a") for _ in range(3)]
    assert s.step() == ids
    assert len(s.pool) == 0


# -- C3


def test_c3_drops_complete_tasks_whose_rewards_are_equal_and_waits_for_others(swarm):
    s = swarm("nonzero_variance_task_count", batch_tasks=2, repeats=2)
    first = s.claim("flat")
    s.run("flat", 1.0)
    admitted = s.end(first, 1.0)
    assert len(admitted.dropped) == 2 and first.episode_id in {d.episode_id for d in admitted.dropped}
    assert {d.reason for d in admitted.dropped} == {DropReason.ZERO_VARIANCE}
    assert s.pool.dropped_counts == {DropReason.ZERO_VARIANCE: 2, DropReason.STALE: 0, DropReason.UPDATE_FAILED: 0}
    assert len(s.pool) == 0
    a = s.run_task("a", [0.0, 1.0])
    assert not s.ready
    b = s.run_task("b", [0.0, 1e-9])
    assert s.ready
    assert s.step() == a + b


def test_c3_lets_a_dropped_task_be_tried_again(swarm):
    s = swarm("nonzero_variance_task_count", batch_tasks=1, repeats=2)
    s.run_task("a", [0.0, 0.0])
    assert s.may_claim("a")
    ids = s.run_task("a", [0.0, 1.0])
    assert s.step() == ids


def test_c2_keeps_tasks_whose_rewards_are_equal(swarm):
    s = swarm("task_count", batch_tasks=1, repeats=2)
    ids = s.run_task("a", [1.0, 1.0])
    assert s.step() == ids


# -- C4 and C5


def test_c4_waits_until_all_live_clients_agree_to_this_step(swarm):
    s = swarm("all_clients_agree", client_timeout_s=60.0)
    s.clients.register("x")
    s.clients.register("y")
    ids = [s.run("a", client="x"), s.run("b", client="y"), s.run("a", client="y")]
    s.clients.agree("x", 1, expected=1)
    assert not s.ready
    assert "not agreed: y" in s.pool.view(1).explanation
    s.clients.agree("y", 1, expected=1)
    assert s.ready
    assert s.step() == [ids[0], ids[2], ids[1]]
    s.run("a")
    assert not s.ready  # the agreement was for step 1


def test_c4_does_not_wait_for_a_client_that_died(swarm):
    s = swarm("all_clients_agree", client_timeout_s=60.0)
    s.clients.register("x")
    s.clients.register("y")
    s.run("a", client="x")
    s.clients.agree("x", 1, expected=1)
    s.clock.advance(50)
    s.clients.heartbeat("x")
    assert not s.ready
    s.clock.advance(20)
    assert s.ready


def test_c4_trains_with_what_is_there_once_the_deadline_has_passed(swarm):
    s = swarm("all_clients_agree", agree_deadline_s=30.0)
    s.clients.register("x")
    s.clients.register("y")
    s.run("a")
    s.clock.advance(40)
    assert not s.ready
    s.clients.agree("x", 1, expected=1)
    s.clients.heartbeat("y")
    s.clock.advance(29)
    assert not s.ready
    s.clock.advance(1)
    assert s.ready
    condition = s.pool.view(1).conditions[0]
    assert (condition.have, condition.need) == (1, 2) and "deadline" in condition.detail


def test_c4_is_content_with_a_quorum(swarm):
    s = swarm("all_clients_agree", quorum=0.5)
    for name in "xyz":
        s.clients.register(name)
    s.run("a")
    s.clients.agree("x", 1, expected=1)
    assert not s.ready
    s.clients.agree("z", 1, expected=1)
    assert s.ready


@pytest.mark.parametrize("policy", ["all_clients_agree", "any_client_agrees"])
def test_agreement_alone_does_not_train_an_empty_pool(swarm, policy):
    s = swarm(policy)
    s.clients.register("x")
    s.clients.agree("x", 1, expected=1)
    assert not s.ready
    assert "episodes 0 of 1" in s.pool.view(1).explanation
    s.run("a")
    assert s.ready


def test_c4_without_a_live_client_says_so(swarm):
    s = swarm("all_clients_agree")
    s.run("a")
    assert not s.ready
    assert "no registered client is alive" in s.pool.view(1).explanation


def test_c5_starts_with_one_agreement_even_if_that_client_dies_afterwards(swarm):
    s = swarm("any_client_agrees", client_timeout_s=60.0)
    s.clients.register("x")
    s.clients.register("y")
    s.run("a")
    assert not s.ready
    s.clients.agree("y", 1, expected=1)
    s.clock.advance(61)
    assert s.ready
    s.step()
    s.run("a")
    assert not s.ready


# -- shares


def test_a_batch_holds_each_clients_share(swarm):
    s = swarm("task_count", batch_tasks=3, repeats=1)
    s.clients.register("x", share=1)
    s.clients.register("y", share=2)
    x1, x2, x3 = (s.run(f"x{i}", client="x") for i in range(3))
    assert not s.ready
    y1 = s.run("y0", client="y")
    assert not s.ready
    assert "of y 1 of 2" in s.pool.view(1).explanation
    y2 = s.run("y1", client="y")
    assert s.ready
    assert s.step() == [x1, y1, y2]
    assert [e.episode_id for e in s.pool.episodes()] == [x2, x3]


def test_clients_without_a_share_fill_what_is_left(swarm):
    s = swarm("task_count", batch_tasks=3, repeats=1)
    s.clients.register("x", share=1)
    ids = [s.run(t) for t in "abc"]
    assert not s.ready
    x1 = s.run("x", client="x")
    assert s.ready
    assert s.step() == [*ids[:2], x1]


def test_c1_counts_shares_in_episodes(swarm):
    s = swarm("episode_count", batch_tasks=2, repeats=2)
    s.clients.register("x", share=1)
    ids = [s.run(f"t{i}", client="x") for i in range(4)]
    assert not s.ready
    others = [s.run("u"), s.run("v")]
    assert s.ready
    assert s.step() == [*ids[:2], *others]


def test_training_does_not_wait_for_the_share_of_a_client_that_died(swarm):
    s = swarm("task_count", batch_tasks=4, repeats=1, client_timeout_s=60.0)
    s.clients.register("x", share=2)
    s.clients.register("y", share=2)
    y1 = s.run("y0", client="y")
    s.clock.advance(50)
    s.clients.heartbeat("x")
    x1, x2 = s.run("x0", client="x"), s.run("x1", client="x")
    assert not s.ready
    s.clock.advance(20)
    assert s.ready
    assert "client is gone (y)" in s.pool.view(1).conditions[0].detail
    assert s.step() == [y1, x1, x2]
    s.clients.register("y", share=2)  # restarted: full batches again
    s.run("x2", client="x"), s.run("x3", client="x")
    assert not s.ready
    s.run("y1", client="y"), s.run("y2", client="y")
    assert s.ready
    assert len(s.step()) == 4


def test_a_live_client_without_a_share_takes_the_places_of_the_dead(swarm):
    s = swarm("task_count", batch_tasks=3, repeats=1, client_timeout_s=60.0)
    s.clients.register("x", share=2)
    s.clock.advance(61)
    s.clients.register("free")
    s.run("a", client="free")
    assert not s.ready
    s.run("b", client="free"), s.run("c", client="free")
    assert s.ready


def test_a_step_that_is_draining_is_trained_although_a_client_came_back(swarm):
    s = swarm("task_count", batch_tasks=2, repeats=1, client_timeout_s=60.0)
    s.clients.register("y", share=1)
    s.clock.advance(61)
    s.clients.register("x", share=1)
    x1 = s.run("x0", client="x")
    assert s.ready
    s.clients.heartbeat("y")
    assert not s.ready
    assert s.step() == [x1]


# -- staleness, admission, nothing to take


def test_an_episode_from_too_long_ago_is_rejected(swarm):
    s = swarm(max_staleness=1)
    old = s.claim("a")
    s.weight_version = 2
    rejected = s.pool.admit(finished_of(old, 1.0), weight_version=2)
    assert isinstance(rejected, Rejected) and rejected.code is Code.STALE
    assert "max_staleness" in rejected.message
    assert isinstance(s.pool.admit(finished_of(old, 1.0), weight_version=1), Admitted)


def test_an_episode_that_waits_too_long_is_dropped_and_told(swarm):
    s = swarm(max_staleness=1, batch_tasks=1, repeats=2)
    left = s.run("a")
    s.run_task("b", [0.0, 1.0])
    s.step()
    assert [e.episode_id for e in s.pool.episodes()] == [left]
    assert s.pool.advance(1) == []
    dropped = s.pool.advance(2)
    assert [(d.episode_id, d.reason) for d in dropped] == [(left, DropReason.STALE)]
    assert len(s.pool) == 0


def test_a_complete_task_that_loses_stale_episodes_is_incomplete_again(swarm):
    s = swarm(max_staleness=0, batch_tasks=2, repeats=2)
    s.run("a")
    s.weight_version = 1
    s.run("a")
    s.run_task("b", [0.0, 1.0])
    assert s.ready
    assert len(s.pool.advance(1)) == 1
    assert not s.ready


def test_an_episode_without_a_sampled_token_is_rejected(swarm):
    s = swarm()
    episode = s.claim("a")
    for samples in ([], [sample_of(episode.episode_id, "a", tokens=1)]):
        finished = finished_of(episode, 1.0)
        finished.samples = samples
        rejected = s.pool.admit(finished, weight_version=0)
        assert isinstance(rejected, Rejected) and rejected.code is Code.NO_CALLS


def test_an_episode_enters_the_pool_once(swarm):
    s = swarm()
    episode = s.claim("a")
    s.end(episode)
    with pytest.raises(ValueError, match="already"):
        s.pool.add(finished_of(episode, 0.0))


def test_there_is_no_empty_batch(swarm):
    with pytest.raises(ValueError, match="nothing"):
        swarm().pool.take_batch(1)


# -- why not yet


def test_the_view_says_in_numbers_what_is_missing_and_when_to_expect_it(swarm):
    s = swarm("task_count", batch_tasks=2, repeats=3)
    for task in "aaabb":
        s.clock.advance(2)
        s.run(task)
    s.claim("b")
    view = s.pool.view(1)
    assert (view.ready, view.episodes, view.tasks, view.tasks_complete, view.open_episodes) == (False, 5, 2, 1, 1)
    assert [(c.name, c.have, c.need, c.met) for c in view.conditions] == [("complete_tasks", 1, 2, False)]
    assert "complete tasks 1 of 2" in view.explanation and "'b' 2/3" in view.explanation
    assert view.eta_s == pytest.approx(2.0)
    s.clock.advance(4)
    assert s.pool.view(1).eta_s == pytest.approx(3.0)  # silence slows the rate
    s.clock.advance(600)
    assert s.pool.view(1).eta_s is None


def test_the_view_of_a_quiet_pool_says_that_nothing_runs(swarm):
    s = swarm()
    assert "no episode is open, none was admitted yet" in s.pool.view(1).explanation
    s.run("a")
    s.clock.advance(75)
    assert "75 s ago" in s.pool.view(1).explanation


def test_c3_expects_more_episodes_where_tasks_turn_out_flat(swarm):
    s = swarm("nonzero_variance_task_count", batch_tasks=2, repeats=2)
    for task in ("f", "g", "h"):
        s.clock.advance(1)
        s.run_task(task, [1.0, 1.0])
    view = s.pool.view(1)
    assert "6 episodes were dropped" in view.explanation
    assert view.eta_s is not None and view.eta_s > 4 / (5 / 2.0)


@pytest.mark.parametrize(
    "policy",
    ["episode_count", "task_count", "nonzero_variance_task_count", "all_clients_agree", "any_client_agrees"],
)
def test_ready_is_exactly_all_conditions_met(swarm, policy):
    s = swarm(policy, batch_tasks=1, repeats=2)
    s.clients.register("x")
    assert not s.pool.view(1).ready
    s.run_task("a", [0.0, 1.0])
    s.clients.agree("x", 1, expected=1)
    view = s.pool.view(1)
    assert view.ready and s.ready and all(c.met for c in view.conditions)
    assert view.explanation.startswith("step 1 can start") and view.eta_s == 0.0
