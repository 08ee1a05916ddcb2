"""Statistics against scipy's own, and the error rates they promise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from a3r import statistics as s

VALUES = st.lists(st.floats(-100, 100).map(lambda v: round(v, 3)), min_size=2, max_size=12)


@given(VALUES)
def test_t_interval_is_scipys(x: list[float]) -> None:
    low, high = s.FUNCTIONS["ci_low"](x, (), {"alpha": 0.05}), s.FUNCTIONS["ci_high"](x, (), {"alpha": 0.05})
    assert low is not None and high is not None
    if (s.sd(x) or 0.0) > 1e-6:
        expected = stats.ttest_1samp(x, 0.0).confidence_interval(0.95)
        assert (low, high) == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-6)
    else:
        assert low == pytest.approx(x[0]) == high


@given(VALUES, VALUES)
def test_contrast_is_welchs(x: list[float], y: list[float]) -> None:
    if not s.sd(x) or not s.sd(y):
        return
    params = {"a": 1.0, "b": -1.0, "shift": 0.0, "alpha": 0.1}
    expected = stats.ttest_ind(x, y, equal_var=False)
    assert s.p_value(x, y, params) == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    interval = expected.confidence_interval(0.9)
    assert s.bound(x, y, params, -1) == pytest.approx(interval.low, rel=1e-6, abs=1e-6)
    assert s.bound(x, y, params, 1) == pytest.approx(interval.high, rel=1e-6, abs=1e-6)


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=2, max_size=9))
def test_paired_is_scipys(pairs: list[tuple[float, float]]) -> None:
    x, y = [round(p[0], 2) for p in pairs], [round(p[1], 1) for p in pairs]
    if (s.sd(s.paired(x, y)) or 0.0) > 1e-6:
        assert s.FUNCTIONS["paired_p"](x, y, {}) == pytest.approx(stats.ttest_rel(x, y).pvalue, rel=1e-6, abs=1e-9)


@given(st.integers(0, 20), st.integers(1, 20))
def test_wilson_is_scipys(hits: int, others: int) -> None:
    x = [1.0] * hits + [0.0] * others
    expected = stats.binomtest(hits, len(x)).proportion_ci(0.95, method="wilson")
    got = (s.FUNCTIONS["rate_low"](x, (), {"alpha": 0.05}), s.FUNCTIONS["rate_high"](x, (), {"alpha": 0.05}))
    assert got == pytest.approx((expected.low, expected.high), abs=1e-4)


@settings(max_examples=50)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=10))
def test_isotonic_is_scipys(values: list[float]) -> None:
    fitted = s.isotonic(values, [1.0] * len(values))
    assert fitted == pytest.approx(scipy_isotonic(values), abs=1e-9)
    assert fitted == sorted(fitted)


def scipy_isotonic(values: list[float]) -> list[float]:
    from scipy.optimize import isotonic_regression

    return list(isotonic_regression(values).x)


def test_interaction_is_the_difference_of_differences() -> None:
    high_high, low_low, low_high, high_low = [5.0, 6.0], [1.0, 1.5], [2.0, 2.0], [3.0, 4.0]
    found = s.interactions([*high_high, *low_low], [*low_high, *high_low], {"k": 2.0})
    assert found == [5 - 2 - (3 - 1), 6 - 2 - (4 - 1.5)]


def test_identical_values_prove_no_absence_of_noise_when_a_floor_is_given() -> None:
    x = [0.7, 0.7, 0.7]
    assert s.bound(x, (), {"shift": -0.6, "alpha": 0.05, "floor": 0.1}, -1) < 0 < s.bound(x, (), {"alpha": 0.05}, -1)  # type: ignore[operator]


def test_too_few_values_give_none_rather_than_a_number() -> None:
    for name in ("sd", "ci_low", "ci_high", "diff_p"):
        assert s.FUNCTIONS[name]([1.0], (), {"alpha": 0.05}) is None
    assert s.FUNCTIONS["mean"]([], (), {}) is None


def test_looks_share_alpha() -> None:
    assert sum(s.look_alphas([3, 6, 12], 0.05)) == pytest.approx(0.05)
    assert s.look_alphas([3, 6, 12], 0.05) == sorted(s.look_alphas([3, 6, 12], 0.05))


def test_stopping_at_any_look_keeps_the_error_within_alpha() -> None:
    lot, looks, studies, wrong = random.Random(1), [3, 6, 12], 1500, 0
    for _ in range(studies):
        x = [lot.gauss(0.0, 1.0) for _ in range(looks[-1])]
        shares = s.look_alphas(looks, 0.05)
        wrong += any((s.p_value(x[:n], (), {}) or 1.0) < a for n, a in zip(looks, shares, strict=True))
    assert wrong / studies <= 0.05 + 3 * (0.05 * 0.95 / studies) ** 0.5


def test_seeds_needed_reach_the_power_they_promise() -> None:
    n = s.seeds_needed(noise=0.3, margin=0.5, alpha=0.05, power=0.8)
    lot = random.Random(2)
    found = sum(
        (s.p_value([lot.gauss(0.5, 0.3) for _ in range(n)], (), {}) or 1.0) < 0.05 for _ in range(1000)
    )  # fmt: skip
    assert found / 1000 >= 0.75
    assert s.margin_reached(0.3, n, 0.05) <= 0.5 < s.margin_reached(0.3, n - 1, 0.05)
    assert s.seeds_needed(0.3, 0.0, 0.05) == 1000
