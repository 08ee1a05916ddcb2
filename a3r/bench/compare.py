"""Two commits side by side: means, their difference with its interval, and what may be said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from a3r.bench.session import Session
from a3r.bench.store import Result
from a3r.bench.suites import LoadedSuite
from a3r.statistics import FUNCTIONS, mean

ALPHA = 0.05


@dataclass(frozen=True)
class Row:
    """One metric of one task at two commits."""

    suite: str
    task: str
    metric: str
    unit: str
    direction: str
    n: tuple[int, int]
    a: float
    b: float
    difference: float
    """B minus A."""
    low: float | None
    high: float | None
    """95 % interval of the difference (Welch); None below two runs of either."""
    least: float
    verdict: str


def compare(session: Session, a: str, b: str) -> list[Row]:
    """Rows of everything that both commits have results of; every valid run of a commit counts."""
    rows = []
    for loaded in session.suites:
        both = [_ok(session.results.of(loaded.id, c)) for c in (a, b)]
        for task in loaded.suite.tasks:
            for name in task.metrics:
                values = [[r.metrics[name] for r in results if r.task == task.name] for results in both]
                if all(values):
                    rows.append(_row(loaded, task.name, name, values[0], values[1]))
    return rows


def _ok(results: Sequence[Result]) -> list[Result]:
    return [r for r in results if r.status == "ok"]


def _row(loaded: LoadedSuite, task: str, name: str, a: list[float], b: list[float]) -> Row:
    metric = loaded.suite.task(task).metrics[name]
    rules = metric.rules((2,))
    first, second = mean(a) or 0.0, mean(b) or 0.0
    params = {"a": 1.0, "b": -1.0, "alpha": ALPHA, "floor": 0.0}
    low, high = (FUNCTIONS[f](b, a, params) for f in ("diff_low", "diff_high"))
    least = rules.least(first)
    return Row(
        loaded.name, task, name, metric.unit, metric.direction, (len(a), len(b)), first, second, second - first,
        low, high, least, _verdict(low, high, least, 1 if metric.direction == "higher" else -1),
    )  # fmt: skip


def _verdict(low: float | None, high: float | None, least: float, better: int) -> str:
    """What the interval allows to say; nothing is claimed from the mere lack of a difference."""
    if low is None or high is None:
        return "too few runs"
    worst, best = sorted((better * low, better * high))
    if worst > 0:
        return "better"
    if best < 0:
        return "worse"
    if worst > -least:
        return "not worse by the least effect"
    return "undecided"
