"""How often the nightly verdicts are right, over simulated commit histories whose truth is known.

    python benchmarks/bench_detectors.py [--histories 300]

A history has 20 commits without a change and 40 more; each commit is measured by `--samples` runs with unit noise,
and reruns are drawn afresh. Effects are in units of the noise of one run. Printed per cell: false alarms per 40
commits, the share of changes confirmed, the delay in commits, how often the bisection names the right commit, and the
extra runs.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from a3r.bench.bisect import locate
from a3r.bench.verdicts import Alarm, Change, Finding, Outcome, Point, Reruns, Rules, judge

WARM_UP, COMMITS = 20, 40
RULES = Rules(better="higher", min_effect=0.5)


@dataclass
class History:
    """One simulated history: commits are named by their number."""

    seed: int
    effect: float = 0.0
    at: int = WARM_UP
    """The first commit with the effect."""
    samples: int = 2
    rules: Rules = RULES
    reruns: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.seed}:{self.effect}:{self.at}")
        self.drawn: dict[Alarm, Reruns] = {}

    def run(self, commit: int) -> float:
        return self.random.gauss(-self.effect if commit >= self.at else 0.0, 1.0)

    def rerun(self, alarm: Alarm) -> Reruns:
        """As many pairs as the looks may ask for."""
        if alarm not in self.drawn:
            most = self.rules.looks[-1]
            head, base = (tuple(self.run(int(c)) for _ in range(most)) for c in (alarm.head, alarm.base))
            self.drawn[alarm] = Reruns(head, base)
        return self.drawn[alarm]

    def findings(self) -> list[Finding]:
        points = [Point(str(n), tuple(self.run(n) for _ in range(self.samples))) for n in range(WARM_UP + COMMITS)]
        return judge(points, self.rerun, self.rules)

    def locate(self, finding: Finding) -> int | None:
        """The commit that the bisection names; None when it stays undecided."""
        first = int(finding.base or 0)
        count = int(finding.commit) - first + 1
        reruns = self.rerun(Alarm(finding.commit, finding.base or "", Change.REGRESSION, finding.by))  # pyright: ignore[reportArgumentType]
        worse = self.rules.worse
        known = [(0, worse(v)) for v in reruns.base] + [(count - 1, worse(v)) for v in reruns.head]
        found = locate(count, known, lambda i: [worse(self.run(first + i)) for _ in range(2)], Change.REGRESSION)
        self.reruns += found.runs
        return first + found.position if found.sure else None


@dataclass(frozen=True)
class Cell:
    """What a number of histories with one effect came to."""

    false_worse: float
    false_better: float
    """Per 40 commits."""
    confirmed: float
    delay: float
    delay_90: float
    bisected: float
    """Right among those that named a commit."""
    named: float
    bisect_runs: float
    marks: float
    """Confirmations per 40 commits."""

    def line(self) -> str:
        return (
            f"false alarms per 40 commits {self.false_worse:.3f} worse {self.false_better:.3f} better  confirmed "
            f"{self.confirmed:.3f}  delay {self.delay:g} (90 %: {self.delay_90:g})  bisect right {self.bisected:.3f} "
            f"of {self.named:.3f} named, with {self.bisect_runs:.1f} runs  confirmations {self.marks:.1f}"
        )


def simulate(effect: float, histories: int, samples: int = 2, rules: Rules = RULES, first: int = 0) -> Cell:
    """Histories that follow from their number alone."""
    false = {Change.REGRESSION: 0, Change.IMPROVEMENT: 0}
    delays: list[int] = []
    right = named = runs = marks = 0
    for number in range(first, first + histories):
        history = History(number, effect, samples=samples, rules=rules)
        found = [f for f in history.findings() if int(f.commit) >= WARM_UP]
        marks += sum(f.change is not None for f in found)
        confirmed = [f for f in found if f.outcome is Outcome.CONFIRMED]
        hit = next((f for f in confirmed if effect and f.change is Change.REGRESSION), None)
        for finding in confirmed:
            if finding is not hit and finding.change is not None:
                false[finding.change] += 1
        if hit:
            delays.append(int(hit.commit) - history.at)
            answer = history.locate(hit)
            named += answer is not None
            right += answer == history.at
            runs += history.reruns
    hits = max(1, len(delays))
    return Cell(
        false_worse=false[Change.REGRESSION] / histories,
        false_better=false[Change.IMPROVEMENT] / histories,
        confirmed=len(delays) / histories,
        delay=statistics.median(delays) if delays else float("nan"),
        delay_90=sorted(delays)[int(0.9 * (len(delays) - 1))] if delays else float("nan"),
        bisected=right / max(1, named),
        named=named / hits,
        bisect_runs=runs / hits,
        marks=marks / histories,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=300)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--effects", type=float, nargs="+", default=[0.0, 1.0, 2.0, 3.0])
    args = parser.parse_args(argv)
    for effect in args.effects:
        print(f"{effect:g} σ  {simulate(effect, args.histories, args.samples).line()}", flush=True)


if __name__ == "__main__":
    main()
