"""How campaigns stand being killed: SIGKILL at every journal point, and at random ones by the hundred.

`python benchmarks/kills.py [--campaigns 20] [--kills 25]` prints what was killed, what it cost in attempts and repeated
steps, and every violation: a run live twice, a slot shared, an orphan, a decision asked twice, another answer.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "core"), str(ROOT / "tests" / "study")]

from killing import Battle, Outcome, journal_points  # noqa: E402 - the tests hold the machinery


def enumerated(base: Path) -> tuple[list[Outcome], str]:
    """One campaign for each point of an undisturbed one, dying there."""
    calm = Battle(base / "calm", levels=2, trace=True).run()
    points = journal_points(calm.points)
    return [Battle(base / f"point{n}", levels=2, crash_at=f"{p}@1").run() for n, p in enumerate(points)], calm.answer


def at_random(base: Path, campaigns: int, kills: int) -> tuple[list[Outcome], str]:
    calm = Battle(base / "calm-long", steps=6, step_s=0.02).run()
    battles = [
        Battle(base / f"random{n}", steps=6, step_s=0.02, view=n % 2 == 0, stray=n % 3 > 0) for n in range(campaigns)
    ]
    return [b.run(random.Random(n), kills) for n, b in enumerate(battles)], calm.answer


def describe(title: str, outcomes: list[Outcome], answer: str, took_s: float) -> None:
    kills: Counter[str] = sum((o.kills for o in outcomes), Counter())
    wrong = [o for o in outcomes if o.answer != answer]
    violations = [v for o in outcomes for v in o.violations]
    print(f"{title}: {len(outcomes)} campaigns in {took_s:.0f} s, {kills.total()} kills {dict(kills)}")
    print(f"  {sum(o.leaders for o in outcomes)} leaders, {sum(o.attempts for o in outcomes)} attempts", end="")
    print(f" for {sum(o.runs for o in outcomes)} runs, {sum(o.asked.total() for o in outcomes)} questions asked")
    print(f"  {len(wrong)} other answers, {len(violations)} violations")
    for violation in violations:
        print(f"    {violation}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--campaigns", type=int, default=20)
    parser.add_argument("--kills", type=int, default=25)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        outcomes, answer = enumerated(Path(folder))
        describe("at every point", outcomes, answer, time.monotonic() - began)
        began = time.monotonic()
        outcomes, answer = at_random(Path(folder), options.campaigns, options.kills)
        describe("at random", outcomes, answer, time.monotonic() - began)


if __name__ == "__main__":
    main()
