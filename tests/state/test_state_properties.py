"""Properties of episodes and pool together, over random histories:

1. Every admitted episode is in exactly one of: the pool, one batch, the dropped (with a reason).
2. No episode is twice in batches; a batch holds admitted episodes only, grouped by task.
3. Every claimed episode is open or closed in exactly one way; keys and ids are never reused.
4. `ready` never says no while all conditions are met, and a batch that was ready has what its policy promises.
5. Clients that go on working bring about the next step, whoever dies: claims never deadlock (C1-C3).
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from state_parts import build_swarm, end_result, finished_of

from swarmtune.episodes import EpisodeError
from swarmtune.pool import Admitted, Rejected
from swarmtune.protocol import EpisodeState

POLICIES = ["episode_count", "task_count", "nonzero_variance_task_count", "all_clients_agree", "any_client_agrees"]
TASKS = ["a", "b", "c", "d"]
CLIENTS = [None, "x", "y"]
SETTINGS = settings(max_examples=150, stateful_step_count=60, deadline=None)


class EpisodesAndPool(RuleBasedStateMachine):
    opened = Bundle("opened")

    @initialize(
        policy=st.sampled_from(POLICIES),
        batch_tasks=st.integers(1, 3),
        repeats=st.integers(1, 3),
        max_staleness=st.integers(0, 2),
        shares=st.sampled_from([{}, {"x": 1}, {"x": 1, "y": None}, {"x": None, "y": None}]),
    )
    def start(self, policy, batch_tasks, repeats, max_staleness, shares):
        self.s = build_swarm(
            policy, batch_tasks=batch_tasks, repeats=repeats, max_staleness=max_staleness, client_timeout_s=50.0
        )
        for name, share in shares.items():
            self.s.clients.register(name, share)
        self.claimed = {}
        self.admitted: set[str] = set()
        self.trained: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()

    @rule(target=opened, task=st.sampled_from(TASKS), client=st.sampled_from(CLIENTS), asked=st.booleans())
    def claim(self, task, client, asked):
        if asked and self.s.pool.may_claim(task, client) is not None:
            task = "extra"  # a claim that came before the batch was full, and is open still
        episode = self.s.claim(task, client)
        assert episode.episode_id not in self.claimed
        self.claimed[episode.episode_id] = episode
        return episode

    @rule(episode=consumes(opened), reward=st.sampled_from([0.0, 0.5, 1.0]), stored=st.booleans())
    def end(self, episode, reward, stored):
        if not episode.is_open:
            with pytest.raises(EpisodeError):
                self.s.book.begin_end(episode.episode_id, "late", reward)
            return
        self.s.book.begin_end(episode.episode_id, "s", reward)
        if not stored:
            self.s.book.cancel_end(episode.episode_id)
            self.s.book.begin_end(episode.episode_id, "again", reward)
        self.s.book.commit_end(episode.episode_id, end_result(episode.episode_id))
        outcome = self.s.pool.admit(finished_of(episode, reward), weight_version=self.s.weight_version)
        if isinstance(outcome, Rejected):
            assert self.s.weight_version - episode.weight_version > self.s.config.max_staleness
            return
        assert isinstance(outcome, Admitted)
        self.admitted.add(episode.episode_id)
        self.dropped.update(d.episode_id for d in outcome.dropped)

    @rule(episode=opened)
    def repeat_an_end(self, episode):
        if episode.state is EpisodeState.ENDED:
            begun = self.s.book.begin_end(episode.episode_id, episode.submission_id, 0.0)
            assert begun.answer == end_result(episode.episode_id)

    @rule(episode=consumes(opened))
    def abort(self, episode):
        if episode.is_open:
            self.s.book.abort(episode.episode_id, "failed")

    @rule(seconds=st.sampled_from([1.0, 40.0, 700.0]))
    def wait(self, seconds):
        self.s.clock.advance(seconds)
        for episode in self.s.book.expire_due():
            assert episode.state is EpisodeState.EXPIRED

    @rule(name=st.sampled_from(["x", "y"]), agrees=st.booleans())
    def client_speaks(self, name, agrees):
        if name in [v.name for v in self.s.clients.views()]:
            step = self.s.weight_version + 1
            self.s.clients.agree(name, step, expected=step) if agrees else self.s.clients.heartbeat(name)

    @precondition(lambda self: self.s.ready)
    @rule()
    def train(self):
        step = self.s.weight_version + 1
        view = self.s.pool.view(step)
        batch = self.s.pool.take_batch(step)
        self._check_batch(batch.episodes, view)
        self.trained.update(e.episode_id for e in batch.episodes)
        self.s.weight_version = step
        self.dropped.update(d.episode_id for d in self.s.pool.advance(step))

    def _check_batch(self, episodes, view):
        sizes = Counter(e.task_id for e in episodes)
        tasks_in_order = [e.task_id for i, e in enumerate(episodes) if not i or episodes[i - 1].task_id != e.task_id]
        assert len(tasks_in_order) == len(sizes), "episodes of a task stand together"
        if view.policy == "episode_count":
            assert len(episodes) == view.conditions[0].have <= self.s.batch_tasks * self.s.repeats
        elif view.policy in {"task_count", "nonzero_variance_task_count"}:
            assert len(sizes) == view.conditions[0].have <= self.s.batch_tasks
            assert min(sizes.values()) >= self.s.repeats
        else:
            assert len(self.s.pool) == 0

    @invariant()
    def nothing_is_lost_or_doubled(self):
        if not hasattr(self, "s"):
            return
        pooled = Counter(e.episode_id for e in self.s.pool.episodes())
        assert pooled + self.trained + self.dropped == Counter(self.admitted)
        assert sum(self.s.pool.dropped_counts.values()) == self.dropped.total()
        assert len(self.s.pool) == pooled.total() == self.s.pool.view(1).episodes

    @invariant()
    def open_means_claimed(self):
        if not hasattr(self, "s"):
            return
        opened = self.s.book.open_episodes()
        assert {e.episode_id for e in opened} == {i for i, e in self.claimed.items() if e.is_open}
        assert {t: o.count for t, o in self.s.book.open_tasks.items()} == Counter(e.task_id for e in opened)
        assert len({e.key for e in self.claimed.values()}) == len(self.claimed)

    @invariant()
    def ready_is_all_conditions_met(self):
        if not hasattr(self, "s"):
            return
        step = self.s.weight_version + 1
        view = self.s.pool.view(step)
        assert view.ready == self.s.pool.ready(step) == all(c.met for c in view.conditions)
        assert view.explanation.startswith(f"step {step} can start" if view.ready else f"step {step} waits for")


EpisodesAndPool.TestCase.settings = SETTINGS
test_episodes_and_pool = EpisodesAndPool.TestCase


@st.composite
def crowds(draw):
    """Clients with or without shares, each with a way of working, some of which die."""
    batch_tasks = draw(st.integers(1, 4))
    names = draw(st.lists(st.sampled_from(["x", "y", "z"]), min_size=1, max_size=3, unique=True))
    left, clients = batch_tasks, {}
    for name in names:
        share = draw(st.one_of(st.none(), st.integers(1, left))) if left else None
        left -= share or 0
        clients[name] = {
            "share": share,
            "parallel": draw(st.integers(1, 4)),
            "repeats": draw(st.integers(1, 5)),
            "fails": draw(st.integers(0, 3)),
            "dies_at": draw(st.one_of(st.none(), st.integers(0, 300))),
        }
    # Somebody must live on who can fill what is left: one without a share, or every share is taken.
    clients[names[0]]["dies_at"] = None
    if left and not any(c["share"] is None and c["dies_at"] is None for c in clients.values()):
        clients["free"] = {"share": None, "parallel": 2, "repeats": 2, "fails": 0, "dies_at": None}
    return batch_tasks, clients


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    crowd=crowds(),
    policy=st.sampled_from(["episode_count", "task_count", "nonzero_variance_task_count"]),
    repeats=st.integers(1, 3),
    random=st.randoms(use_true_random=False),
)
def test_clients_that_go_on_working_always_bring_about_the_next_step(crowd, policy, repeats, random):
    batch_tasks, clients = crowd
    repeats = max(2, repeats) if policy == "nonzero_variance_task_count" else repeats
    s = build_swarm(policy, batch_tasks=batch_tasks, repeats=repeats, client_timeout_s=30.0)
    for name, c in clients.items():
        s.clients.register(name, c["share"])
    todo = {name: [] for name in clients}
    running: dict[str, list] = {name: [] for name in clients}
    made = Counter()
    for second in range(6000):
        s.clock.advance(1)
        s.book.expire_due()
        for name, c in clients.items():
            if c["dies_at"] is not None and second >= c["dies_at"]:
                continue  # its open episodes stay open until their lease runs out
            s.clients.heartbeat(name)
            if not todo[name]:
                made[name] += 1
                # At least N repeats in the end: the task list says how often each is tried before the next one.
                todo[name] = [f"{name}{made[name]}"] * max(repeats, c["repeats"])
            if len(running[name]) < c["parallel"] and s.may_claim(todo[name][0], name):
                running[name].append(s.claim(todo[name].pop(0), name))
            if running[name] and random.random() < 0.5:
                episode = running[name].pop(0)
                if random.randrange(5) < c["fails"]:
                    s.book.abort(episode.episode_id, "failed")
                    todo[name].insert(0, episode.task_id)
                elif episode.is_open:
                    s.end(episode, random.choice([0.0, 1.0]))
        if s.ready:
            assert s.step()
        if s.weight_version == 3:
            return
    pytest.fail(f"stuck: {s.pool.view(s.weight_version + 1).explanation}")
