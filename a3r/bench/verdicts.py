"""What a sequence of measured commits says about one metric: fine, a confirmed change, or not decided.

A screen marks a commit (one-sided t against the last accepted commits, or a CUSUM of slow drift); a marked commit is
measured again together with an early base, and only these reruns decide. After a confirmed change the baseline starts
anew at that commit. The state is a pure function of the points and reruns fed in; nothing here measures anything.

Inside, every value is turned so that a larger one is worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from a3r.statistics import contrast, look_alphas, pooled_sd, t_quantile

FLOOR_SHARE = 0.25
"""Least noise to assume, as a share of the least effect of interest: equal values do not prove that there is none."""
YOUNG_DF = 2
"""With fewer degrees of freedom between commits, a commit's own samples are compared with its predecessor's."""


class Change(StrEnum):
    """Which way a metric went."""

    REGRESSION = "regression"
    IMPROVEMENT = "improvement"

    @property
    def sign(self) -> int:
        return 1 if self is Change.REGRESSION else -1


class Outcome(StrEnum):
    """What is known of one commit and one metric."""

    BASELINE = "baseline"
    """The first of its history: nothing to compare it with."""
    FINE = "fine"
    REFUTED = "refuted"
    """Marked by the screen; its reruns show no change."""
    CONFIRMED = "confirmed"
    UNDECIDED = "undecided"
    """The reruns show an effect of interest that their noise could explain."""
    PENDING = "pending"
    """Marked by the screen; its reruns are not complete."""
    UNCONFIRMED = "unconfirmed"
    """Marked by the screen; its reruns could not be made. It stays out of the baseline, as an undecided one does."""


@dataclass(frozen=True)
class Rules:
    """How one metric is judged. Fixed before the first result."""

    better: Literal["higher", "lower"]
    min_effect: float
    """Smaller changes are not of interest; in the metric's unit, or a share of the baseline when `relative`."""
    relative: bool = False
    level: float = 0.95
    """Of the one-sided screen."""
    window: int = 10
    """Accepted commits the screen compares with."""
    reach: int = 30
    """How many accepted commits back the base of a confirmation lies: before a change that was missed at first."""
    drift_k: float = 0.5
    drift_h: float = 4.5
    looks: tuple[int, ...] = (4, 8)
    """Reruns of head and of base after which the confirmation may decide."""
    alpha: float = 0.04
    """Chance that a confirmation finds a change where there is none, one-sided, over all looks."""

    def worse(self, value: float) -> float:
        return -value if self.better == "higher" else value

    def least(self, level: float) -> float:
        """The least effect of interest at a baseline level."""
        return self.min_effect * abs(level) if self.relative else self.min_effect


@dataclass(frozen=True)
class Point:
    """One measured commit."""

    commit: str
    values: tuple[float, ...]
    """Its samples, in the metric's unit."""


@dataclass(frozen=True)
class Alarm:
    """A marked commit, and the pair whose reruns decide."""

    head: str
    base: str
    change: Change
    by: Literal["screen", "drift"]


@dataclass(frozen=True)
class Reruns:
    """Fresh values of the pair of an alarm, in the metric's unit."""

    head: tuple[float, ...] = ()
    base: tuple[float, ...] = ()
    failed: bool = False
    """One of them could not be made, so there will be no more."""

    @property
    def pairs(self) -> int:
        return min(len(self.head), len(self.base))


@dataclass(frozen=True)
class Finding:
    """One commit's verdict on one metric."""

    commit: str
    outcome: Outcome
    change: Change | None = None
    by: str = ""
    base: str | None = None
    needs: int = 0
    """Reruns of head and base each that a pending finding waits for."""
    effect: float | None = None
    """Head minus base by the reruns, in the metric's unit."""
    low: float | None = None
    high: float | None = None
    """Two-sided 90 % interval of the effect."""
    band: tuple[float, float] | None = None
    """Where the screen expected the commit's mean, in the metric's unit."""


RerunsOf = Callable[[Alarm], Reruns]


def judge(points: Sequence[Point], reruns_of: RerunsOf, rules: Rules) -> list[Finding]:
    """Verdicts of commits in first-parent order; stops after a pending one, for what follows depends on it."""
    detector = Detector(rules)
    findings: list[Finding] = []
    for point in points:
        finding = detector.take(point, reruns_of)
        findings.append(finding)
        if finding.outcome is Outcome.PENDING:
            break
    return findings


@dataclass
class Detector:
    """The baseline of one metric, and the drift sums on both sides."""

    rules: Rules
    accepted: list[Point] = field(default_factory=list)
    """Since the baseline last started anew; values turned so that larger is worse."""
    earlier: list[list[float]] = field(default_factory=list)
    """Commit means of ended baselines: they still tell the noise."""
    drift: dict[Change, float] = field(default_factory=lambda: dict.fromkeys(Change, 0.0))

    def take(self, point: Point, reruns_of: RerunsOf) -> Finding:
        """Judge the next commit and move on."""
        turned = self._turned(point)
        if not self.accepted:
            self.accepted.append(turned)
            return Finding(point.commit, Outcome.BASELINE)
        band = self._band(len(point.values))
        alarm = self._screen(turned) or self._drift(turned)
        if alarm is None:
            self.accepted.append(turned)
            return Finding(point.commit, Outcome.FINE, band=band)
        reruns = reruns_of(alarm)
        finding = confirm(alarm, reruns, self.rules)
        self._settle(finding, turned, reruns)
        return replace(finding, band=band)

    # -- marking

    def _screen(self, point: Point) -> Alarm | None:
        centre, least = self._centre(), self._least()
        noise, df = self.noise()
        value = _mean(point.values)
        for change in Change:
            excess = change.sign * (value - centre)
            if excess < least:
                continue
            if df >= YOUNG_DF:
                n = len(self._window())
                marked = excess > t_quantile(df, self.rules.level) * noise * math.sqrt(1 + 1 / n)
            else:
                marked = self._differs_from_last(point, change)
            if marked:
                return self._alarm(point, change, "screen")
        return None

    def _differs_from_last(self, point: Point, change: Change) -> bool:
        """One-sided Welch test of a commit's samples against the last accepted commit's."""
        floor = FLOOR_SHARE * self._least()
        found = contrast(point.values, self.accepted[-1].values, {"a": change.sign, "b": -change.sign, "floor": floor})
        if found is None:
            return True  # one sample each tells nothing: let the reruns decide
        estimate, error, df = found
        return estimate > t_quantile(df, self.rules.level) * error

    def _drift(self, point: Point) -> Alarm | None:
        noise, df = self.noise()
        if df < YOUNG_DF or noise == 0.0:
            return None
        first = [_mean(p.values) for p in self.accepted[: 2 * self.rules.window]]
        z = (_mean(point.values) - _mean(first)) / (noise * math.sqrt(1 + 1 / len(first)))
        for change in Change:
            self.drift[change] = max(0.0, self.drift[change] + change.sign * z - self.rules.drift_k)
        crossed = [c for c in Change if self.drift[c] > self.rules.drift_h]
        return self._alarm(point, crossed[0], "drift") if crossed else None

    def _alarm(self, point: Point, change: Change, by: Literal["screen", "drift"]) -> Alarm:
        return Alarm(point.commit, self.accepted[-self.rules.reach :][0].commit, change, by)

    # -- moving on

    def _settle(self, finding: Finding, point: Point, reruns: Reruns) -> None:
        change = finding.change
        if finding.outcome is Outcome.PENDING or change is None:
            return
        self.drift[change] = 0.0
        if finding.outcome is Outcome.CONFIRMED:
            self.earlier.append([_mean(p.values) for p in self.accepted])
            self.accepted = [Point(point.commit, tuple(self.rules.worse(v) for v in reruns.head))]
            self.drift = dict.fromkeys(Change, 0.0)
        elif finding.outcome is Outcome.REFUTED:
            # Without its reruns: they would pull every marked commit to the middle, and the noise would look smaller.
            self.accepted.append(point)

    # -- the baseline

    def noise(self) -> tuple[float, int]:
        """(standard deviation of commit means, degrees of freedom), not below its floor."""
        groups = [*self.earlier, [_mean(p.values) for p in self.accepted]]
        groups = [g for g in groups if len(g) >= 2]
        found = pooled_sd(groups)
        floor = FLOOR_SHARE * self._least()
        return max(found or 0.0, floor), sum(len(g) - 1 for g in groups)

    def _window(self) -> list[Point]:
        return self.accepted[-self.rules.window :]

    def _centre(self) -> float:
        return _mean([_mean(p.values) for p in self._window()])

    def _least(self) -> float:
        return self.rules.least(self._centre())

    def _band(self, samples: int) -> tuple[float, float] | None:
        """Where the screen lets a commit's mean pass, in the metric's unit."""
        noise, df = self.noise()
        if df < YOUNG_DF:
            return None
        half = t_quantile(df, self.rules.level) * noise * math.sqrt(1 + 1 / len(self._window()))
        half, centre = max(half, self._least()), self._centre()
        ends = sorted((self.rules.worse(centre - half), self.rules.worse(centre + half)))
        return ends[0], ends[1]

    def _turned(self, point: Point) -> Point:
        return Point(point.commit, tuple(self.rules.worse(v) for v in point.values))


def confirm(alarm: Alarm, reruns: Reruns, rules: Rules) -> Finding:
    """What the reruns of head and base say, at the looks fixed in advance; nothing else is looked at."""
    finding = Finding(alarm.head, Outcome.PENDING, alarm.change, alarm.by, alarm.base)
    for look, alpha in zip(rules.looks, look_alphas(rules.looks, rules.alpha), strict=True):
        if reruns.pairs < look and reruns.failed:
            return replace(finding, outcome=Outcome.UNCONFIRMED)
        if reruns.pairs < look:
            return replace(finding, outcome=Outcome.PENDING, needs=look)
        head, base = reruns.head[:look], reruns.base[:look]
        effect = _mean(head) - _mean(base)
        excess = alarm.change.sign * rules.worse(effect)
        least = rules.least(_mean(base))
        low, high, error, df = _interval(head, base, FLOOR_SHARE * least)
        finding = replace(finding, effect=effect, low=low, high=high)
        if excess >= least and excess > t_quantile(df, 1 - alpha) * error:
            return replace(finding, outcome=Outcome.CONFIRMED)
        if excess <= 0:
            return replace(finding, outcome=Outcome.REFUTED)
        # What stands when no look is left:
        finding = replace(finding, outcome=Outcome.UNDECIDED if excess >= least else Outcome.REFUTED)
    return finding


def _interval(head: Sequence[float], base: Sequence[float], floor: float) -> tuple[float, float, float, float]:
    """(low, high, standard error, degrees of freedom) of head minus base."""
    found = contrast(head, base, {"a": 1.0, "b": -1.0, "floor": floor})
    if found is None:
        return -math.inf, math.inf, math.inf, 1.0
    estimate, error, df = found
    half = t_quantile(df, 0.95) * error
    return estimate - half, estimate + half, error, df


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


@dataclass(frozen=True)
class Balance:
    """Whether confirmed changes, and marks that reruns refuted, lean to one side."""

    regressions: int
    improvements: int
    marks_worse: int
    marks_better: int

    @property
    def warning(self) -> str | None:
        """Noise marks both sides alike: when refuted marks do not, the machine drifts or the metric is skewed."""
        if sign_test(self.marks_worse, self.marks_better) < 0.01:
            side = "worse" if self.marks_worse > self.marks_better else "better"
            return (
                f"{self.marks_worse} refuted marks for worse and {self.marks_better} for better: the screen leans to "
                f"{side}; look for a drift of the machine"
            )
        return None


def balance(findings: Sequence[Finding]) -> Balance:
    def count(change: Change, *outcomes: Outcome) -> int:
        return sum(f.change is change and f.outcome in outcomes for f in findings)

    return Balance(
        regressions=count(Change.REGRESSION, Outcome.CONFIRMED),
        improvements=count(Change.IMPROVEMENT, Outcome.CONFIRMED),
        marks_worse=count(Change.REGRESSION, Outcome.REFUTED, Outcome.UNDECIDED),
        marks_better=count(Change.IMPROVEMENT, Outcome.REFUTED, Outcome.UNDECIDED),
    )


def sign_test(a: int, b: int) -> float:
    """Two-sided p of a coin showing a heads and b tails."""
    n, tail = a + b, max(a, b)
    if n == 0:
        return 1.0
    return min(1.0, 2 * math.fsum(math.comb(n, i) for i in range(tail, n + 1)) / 2**n)
