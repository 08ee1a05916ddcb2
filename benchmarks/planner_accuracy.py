"""How often the adaptive leader is right, over simulated studies whose truth is known.

    python benchmarks/planner_accuracy.py [--studies 200] [--noise 0.3 0.8]

Each study asks for the smallest of seven levels that still trains. The true threshold is drawn evenly from the levels,
the bar stands halfway between the two plateaus (gap 1), every run's value carries normal noise, and a tenth of the runs
crash for good. Printed per noise and design: right answers, undecided, wrong, right among the decided, runs, and runs
as a share of the full grid with the same seeds (every level at the last look).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a3r.blueprint import load_blueprint
from a3r.goal import Goal, GoalLock
from a3r.leader import Verdict
from a3r.leaders.adaptive import AdaptiveLeader
from a3r.simulate import study

LEVELS = [1, 2, 4, 8, 16, 32, 64]
BASE = Path(__file__).resolve().parent.parent / "blueprints" / "simulated.yaml"
RULES: dict[str, dict[str, Any]] = {
    "bar": {"rule": {"at_least": 0.5}},
    "reference": {"rule": {"not_worse_by": 0.5}, "reference": {"level": 64}},
}


@dataclass(frozen=True)
class Tally:
    studies: int
    right: int
    undecided: int
    wrong: int
    runs: float
    grid: int

    @property
    def right_share(self) -> float:
        return self.right / self.studies

    @property
    def right_if_decided(self) -> float:
        decided = self.right + self.wrong
        return self.right / decided if decided else 1.0

    @property
    def runs_share(self) -> float:
        return self.runs / self.grid

    def line(self) -> str:
        return (
            f"right {self.right_share:.3f}  undecided {self.undecided / self.studies:.3f}  wrong "
            f"{self.wrong / self.studies:.3f}  right among decided {self.right_if_decided:.3f}  runs {self.runs:.1f} "
            f"= {self.runs_share:.0%} of the grid's {self.grid}"
        )


def make_lock(
    noise: float, threshold: float, crash: float, seed_base: int, rule: str = "bar", **stats: Any
) -> GoalLock:
    base, _ = load_blueprint(BASE)
    criterion = {"metric": "reward/mean", "at": {"last_k": 1}, **RULES[rule]}
    goal = {
        "title": "simulated",
        "question": {"type": "min_that_still", "factor": "batch_size", "levels": LEVELS, "criterion": criterion},
        "base": "simulated.yaml",
        "hitl": {"approve": "none"},
        "stats": {"seed_base": seed_base, **stats},
    }
    config = {
        "sim.factor": "batch_size",
        "sim.threshold": threshold,
        "sim.noise": noise,
        "sim.fail": "code",
        "sim.fail_p": crash,
        "total_training_steps": 2,
    }
    return GoalLock(goal=Goal.model_validate(goal), base=base.sealed(config=config), source_sha256="0" * 64, prose="")


def tally(
    noise: float, studies: int, slots: int = 8, rule: str = "bar", crash: float = 0.1, attempts: int = 1,
    first: int = 0, **stats: Any,
) -> Tally:  # fmt: skip
    """Run studies whose thresholds and seeds follow from their number alone."""
    right = undecided = wrong = runs = 0
    for number in range(first, first + studies):
        threshold = random.Random(f"threshold {number}").choice(LEVELS if rule == "bar" else LEVELS[:-1])
        lock = make_lock(noise, threshold, crash, seed_base=1000 * (number + 1), rule=rule, **stats)
        decision, history = study(lock, AdaptiveLeader(), slots=slots, attempts=attempts)
        runs += len(history.observations)
        if decision.verdict is not Verdict.SUPPORTED:
            undecided += 1
        elif decision.level == threshold:
            right += 1
        else:
            wrong += 1
    looks = make_lock(noise, 1, crash, 0, rule, **stats).goal.stats.looks
    return Tally(studies, right, undecided, wrong, runs / studies, len(LEVELS) * looks[-1])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=200)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.15, 0.3, 0.5, 0.8])
    parser.add_argument("--attempts", type=int, default=1, help="tries per run; 1 loses a tenth of the runs")
    args = parser.parse_args(argv)
    for noise in args.noise:
        for rule in RULES:
            for slots, design in ((8, "screen+confirm"), (2, "bisection")):
                found = tally(noise, args.studies, slots=slots, rule=rule, attempts=args.attempts)
                print(f"noise/gap {noise:<4g} {rule:<9} {design:<14}  {found.line()}", flush=True)


if __name__ == "__main__":
    main()
