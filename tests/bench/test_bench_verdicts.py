"""Verdicts over simulated histories. The full measurement is benchmarks/bench_detectors.py; these hold its figures with
fewer histories, so their bounds leave room for chance (the seeds are fixed)."""

import importlib.util
import sys
from pathlib import Path

import pytest

from a3r.bench.verdicts import (
    Alarm,
    Change,
    Finding,
    Outcome,
    Point,
    Reruns,
    Rules,
    balance,
    confirm,
    judge,
    sign_test,
)

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_detectors.py"
SPEC = importlib.util.spec_from_file_location("bench_detectors", PATH)
detectors = importlib.util.module_from_spec(SPEC)
sys.modules["bench_detectors"] = detectors
SPEC.loader.exec_module(detectors)

HIGHER = Rules(better="higher", min_effect=0.5)
LOWER = Rules(better="lower", min_effect=0.5)


def points(*means):
    """Commits c0, c1, … whose two samples lie 0.2 apart."""
    return [Point(f"c{i}", (m - 0.1, m + 0.1)) for i, m in enumerate(means)]


def reruns_at(**levels):
    """Reruns of commits at their levels, with a little scatter."""

    def of(alarm):
        scatter = (-0.1, 0.1, -0.05, 0.05, 0.08, -0.08, 0.02, -0.02)
        return Reruns(*(tuple(levels.get(c, 10.0) + s for s in scatter) for c in (alarm.head, alarm.base)))

    return of


def none_made(alarm):
    return Reruns()


def test_false_alarms_stay_below_one_in_five_per_40_commits():
    cell = detectors.simulate(0.0, 150)
    assert cell.false_worse + cell.false_better <= 0.2


def test_a_drop_of_two_sigma_is_confirmed_at_once_and_its_commit_named():
    cell = detectors.simulate(2.0, 100)
    assert cell.confirmed >= 0.98
    assert cell.delay == 0
    assert cell.bisected >= 0.95
    assert cell.named >= 0.95


def test_a_drop_of_one_sigma_is_confirmed_within_40_commits():
    assert detectors.simulate(1.0, 100).confirmed >= 0.90


def test_a_steady_history_is_fine():
    found = judge(points(10, 10.1, 9.9, 10, 10.05), none_made, HIGHER)
    assert [f.outcome for f in found] == [Outcome.BASELINE] + [Outcome.FINE] * 4


@pytest.mark.parametrize(("rules", "level", "change"), [
    (HIGHER, 8.0, Change.REGRESSION), (HIGHER, 12.0, Change.IMPROVEMENT),
    (LOWER, 12.0, Change.REGRESSION), (LOWER, 8.0, Change.IMPROVEMENT),
])  # fmt: skip
def test_a_change_is_confirmed_in_the_right_direction(rules, level, change):
    found = judge(points(10, 10.1, 9.9, 10, level), reruns_at(c4=level), rules)[-1]
    assert (found.outcome, found.change) == (Outcome.CONFIRMED, change)
    assert found.effect == pytest.approx(level - 10)


def test_only_the_reruns_decide():
    unlucky = judge(points(10, 10.1, 9.9, 10, 7.0), reruns_at(), HIGHER)[-1]
    assert unlucky.outcome is Outcome.REFUTED


def test_a_marked_commit_waits_for_its_reruns_and_so_does_what_follows():
    found = judge(points(10, 10.1, 9.9, 10, 7.0, 10.0), none_made, HIGHER)
    assert (len(found), found[-1].outcome, found[-1].needs) == (5, Outcome.PENDING, HIGHER.looks[0])


def test_a_change_below_the_least_effect_is_no_alarm():
    found = judge(points(10, 10.0, 10.0, 10, 9.6), none_made, HIGHER)
    assert found[-1].outcome is Outcome.FINE


def test_after_a_confirmed_change_the_baseline_starts_anew():
    level = {f"c{i}": 7.0 for i in range(4, 8)}
    found = judge(points(10, 10.1, 9.9, 10, 7, 7.05, 6.95, 7), reruns_at(**level), HIGHER)
    assert [f.outcome for f in found[4:]] == [Outcome.CONFIRMED] + [Outcome.FINE] * 3


def test_slow_drift_is_found_though_no_single_commit_is_marked():
    means = [10, 10.12, 9.88, 10.1, 9.9, 10.05, 9.95, 10.1, 9.9, 10] + [10 - 0.06 * i for i in range(1, 15)]
    level = {f"c{i}": m for i, m in enumerate(means)}
    found = judge(points(*means), reruns_at(**level), Rules(better="higher", min_effect=0.3))
    hit = next(f for f in found if f.outcome is Outcome.CONFIRMED)
    assert hit.by == "drift"


def test_an_effect_that_noise_could_explain_is_undecided():
    head, base = (8, 12, 7, 11, 8, 12, 7, 11), (8, 13, 9, 12, 9, 12, 8, 12)
    found = confirm(Alarm("h", "b", Change.REGRESSION, "screen"), Reruns(head, base), HIGHER)
    assert found.outcome is Outcome.UNDECIDED


def test_equal_values_do_not_make_a_tiny_change_certain():
    rules = Rules(better="lower", min_effect=0.1, relative=True)
    steady = [Point(f"c{i}", (100.0, 100.0)) for i in range(5)]
    assert judge([*steady, Point("c5", (101.0, 101.0))], none_made, rules)[-1].outcome is Outcome.FINE


def test_the_balance_warns_when_refuted_marks_lean_to_one_side():
    worse = [Finding(str(i), Outcome.REFUTED, Change.REGRESSION) for i in range(12)]
    better = [Finding(str(i), Outcome.REFUTED, Change.IMPROVEMENT) for i in range(12)]
    assert balance(worse).warning and not balance(worse + better).warning
    assert sign_test(5, 5) == 1.0 and sign_test(10, 0) == pytest.approx(2 / 1024)
