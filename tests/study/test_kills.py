"""SIGKILL to leader, supervisor, trainer and tmux server: at every point a campaign passes, and at random.

What must hold after each: the answer of the undisturbed campaign, no run live twice, no slot shared (a witness inside
the trainer holds locks that the product does not know), no process left, no lease left, the journal whole, and each
decision made once and asked once, except for leaders that died between asking and noting the answer.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from killing import Battle, Outcome, journal_points

MORE_POINTS = [
    "supervisor:step@1,study:before_fence@1",
    "supervisor:step@1,study:after_fence@1",
    "supervisor:step@2,journal:ATTEMPT_LOST:before@1",
    "supervisor:step@2,journal:ATTEMPT_LOST:after@1",
    "supervisor:before_result@1,study:after_fence@1",
    "supervisor:after_result@2,journal:RUN_COMPLETED:before@2",
    "journal:ATTEMPT_INTENT:after@2,journal:ATTEMPT_LOST:before@1",
    "study:started@1,study:started@2,study:started@3",
    "supervisor:claimed@1,supervisor:claimed@2,supervisor:claimed@3",
    "supervisor:spawned_main@1,supervisor:spawned_main@2,journal:ATTEMPT_LOST:after@2",
]
"""Points that only a damaged campaign passes, and the same point again and again."""
MOST_CAMPAIGNS, KILLS_EACH = 30, 25
"""Campaigns are played until 200 kills have struck: on a fast machine one ends before it has had its share."""


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Outcome:
    """What the small campaign looks like when nobody disturbs it."""
    out = Battle(tmp_path_factory.mktemp("calm") / "study", levels=2, trace=True).run()
    assert not out.violations
    return out


def check(out: Outcome, answer: str) -> None:
    assert out.violations == []
    assert out.answer == answer


@pytest.mark.slow
def test_every_point_may_be_the_last(calm, tmp_path):
    points = journal_points(calm.points)
    assert len(points) > 30
    died = Counter()
    for number, point in enumerate(points):
        battle = Battle(tmp_path / f"point{number}", levels=2, crash_at=f"{point}@1")
        out = battle.run()
        assert out.died_at == [point]
        check(out, calm.answer)
        died.update(out.kills)
        battle.clean()
    assert died.total() == len(points)


@pytest.mark.slow
@pytest.mark.parametrize("crashes", MORE_POINTS)
def test_dying_while_recovering_is_recovered_from(calm, tmp_path, crashes):
    out = Battle(tmp_path / "study", levels=2, crash_at=crashes).run()
    assert len(out.died_at) == crashes.count("@")
    check(out, calm.answer)


@pytest.mark.slow
def test_two_hundred_random_kills_change_nothing(tmp_path):
    answer = Battle(tmp_path / "calm", steps=6, step_s=0.02).run().answer
    kills: Counter[str] = Counter()
    for seed in range(MOST_CAMPAIGNS):
        battle = Battle(tmp_path / f"study{seed}", steps=6, step_s=0.02, view=seed % 2 == 0, stray=seed % 3 > 0)
        out = battle.run(random.Random(seed), KILLS_EACH)
        check(out, answer)
        kills += out.kills
        battle.clean()
        if kills.total() >= 200:
            break
    assert kills.total() >= 200, kills
    assert set(kills) == {"leader", "supervisor", "trainer", "tmux"}
