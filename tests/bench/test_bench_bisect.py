"""The bisection finds a change that it is told exists, by measuring few commits."""

import random

from a3r.bench.bisect import locate, posterior
from a3r.bench.verdicts import Change


def noisy(first_bad: int, effect: float, seed: int):
    draw = random.Random(seed)
    return lambda i: [draw.gauss(effect if i >= first_bad else 0.0, 1.0) for _ in range(2)]


def ends(measure, count):
    return [(i, v) for i in (0, count - 1) for _ in range(4) for v in measure(i)]


def test_the_first_changed_commit_is_found_and_named_surely():
    right = 0
    for seed in range(60):
        first = 1 + seed % 15
        measure = noisy(first, 3.0, seed)
        found = locate(16, ends(measure, 16), measure, Change.REGRESSION)
        right += found.sure and found.position == first
    assert right >= 57


def test_adjacent_commits_need_no_run():
    found = locate(2, [(0, 0.0), (1, 5.0)], lambda i: 1 / 0, Change.REGRESSION)
    assert (found.position, found.runs, found.sure) == (1, 0, True)


def test_noise_without_a_change_is_not_named():
    draw = random.Random(3)
    found = locate(8, [(0, 0.1), (7, 0.2)], lambda i: [draw.gauss(0, 1)] * 2, Change.REGRESSION, most_runs=40)
    assert not found.sure


def test_an_improvement_is_no_regression():
    chances = posterior([(0, 5.0), (0, 5.1), (1, 5.0), (2, 0.0), (2, 0.1)], 3, Change.IMPROVEMENT)
    assert chances[2] > 0.9
    assert posterior([(0, 0.0), (1, 1.0), (2, 1.0)], 3, Change.REGRESSION)[0] == 0.0
